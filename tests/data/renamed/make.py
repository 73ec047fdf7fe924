"""Writes what a version that renamed leaves where it is killed: two shards' directories.

Run it with the code of 0.2.0, or of the last commit that had the verb:

    git worktree add --detach /tmp/renaming a892dcf6
    PYTHONPATH=/tmp/renaming/client:/tmp/renaming/server python make.py

Its two workers made two steps of each, and w0 has given the third. Each parameter and table was
about to get the name `new-...` when

    marked-p, marked-t      shard 0 had decided it, and nothing else was done
    ahead-p, ahead-t        shard 1 had given the new name, too
    moved-p, moved-t        both shards had, and shard 0's log had not said so

and done-p, done-t were renamed. Values are whole, and the rule is plain SGD with rate 0.5.
"""

from __future__ import annotations

import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import shardwell
from shardwell.errors import StorageError
from shardwell.rpc.shard_channel import ShardChannel
from shardwell_server import LocalCluster
from shardwell_server.store.mmap.store import MmapStore

STATES = ("marked", "ahead", "moved", "done")
SIZE = 40
IDS = np.arange(4)
ANSWERS = {"marked": 3, "ahead": 4}
"""Answers that the renaming client has had: both shards look, shard 0 marks, shard 1 moves."""
PACKED = Path(__file__).parent / "shards.tar.xz"


class EndedError(BaseException):
    """The renaming client ends here."""


def give(handle: Any, step: int) -> None:
    """A worker's gradient of a step."""
    if handle.kind == "table":
        handle.put_row_gradients(IDS, np.full((4, 2), step + 1, np.float32))
    else:
        handle.put_gradient(np.full(SIZE, step + 1, np.float32))


def opened(client: Any, name: str, **crew: Any) -> Any:
    """A parameter or table, by the end of its name."""
    rule = {"optimizer": shardwell.SGD(learning_rate=0.5), "codec": "fp32", **crew}
    if name.endswith("t"):
        return client.table(name, row_count=50, dim=2, initializer=shardwell.Zeros(), **rule)
    made = client.parameter(name, size=SIZE, **rule)
    made.init(np.zeros(SIZE, np.float32))
    return made


def rename(client: Any, name: str, state: str) -> None:
    """Renames, as far as the state says."""
    change, log, answers = ShardChannel.change_name, MmapStore.log_name, 0

    def counted(channel: Any, *request: Any) -> Any:
        nonlocal answers
        answer = change(channel, *request)
        answers += 1
        if answers == ANSWERS.get(state):
            raise EndedError
        return answer

    def refused(store: Any, event: Any, compacted: Any) -> None:
        if state == "moved" and event["kind"] == "deleted" and "shard-0" in str(store._path):
            raise StorageError("the process ends here")
        log(store, event, compacted)

    ShardChannel.change_name, MmapStore.log_name = counted, refused  # type: ignore[method-assign]
    try:
        client.rename(name, f"new-{name}", force=True)
    except (EndedError, StorageError):
        assert state != "done"
    finally:
        ShardChannel.change_name, MmapStore.log_name = change, log  # type: ignore[method-assign]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        live, left = Path(scratch, "live"), Path(scratch, "left")
        with (
            LocalCluster(2, live, cluster_id="kept", chunk_size_bytes=1024) as cluster,
            shardwell.connect(cluster.target, worker_id="w0") as first,
            shardwell.connect(cluster.target, worker_id="w1") as second,
        ):
            for name in [f"{state}-{kind}" for state in STATES for kind in "pt"]:
                crew = [opened(each, name, worker_count=2) for each in (first, second)]
                for step in range(2):
                    for handle in crew:
                        give(handle, step)
                give(crew[0], 2)
                rename(second, name, name.partition("-")[0])
            shutil.copytree(live, left)
        with (
            lzma.open(PACKED, "xb", preset=9) as packed,
            tarfile.open(fileobj=packed, mode="w") as a,
        ):
            for path in sorted(left.iterdir()):
                a.add(path, path.name, filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes user and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    sys.exit(main())

"""Writes what the tests keep of a release: data directories, a checkpoint, an accumulator's file.

Run it with the code of the release, as its own tests do, and never again for that release:

    git worktree add --detach /tmp/release v0.2.0
    PYTHONPATH=/tmp/release/client:/tmp/release/server python make.py 0.2.0

`0.2.0.tar.xz` has, as a kill leaves them, in the middle of a step:

    process/shard-0, shard-1    all kinds of parameters and tables
    step/shard-0, shard-1       some of them, with journals (durability "step")
    checkpoint                  all, at the versions before the open step
    sums                        a gradient accumulator's file, closed
    contributions/              contribution logs, where the release has them

    expected.json               what that release read before the open step, and after it

`2026-11-27.tar.xz` was made so by a commit between two releases, the first whose directories have
whole blocks and whose checkpoints are of format 3; its names have been renamed.

Values are small integers, so that what plain SGD makes of them is exact. The program uses nothing
but the release's package.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardwell
from shardwell_server import LocalCluster, MmapGradientAccumulator

SIZE = 1500
ROWS = np.array([3, 500, 7], np.int64)
SGD = shardwell.SGD(learning_rate=0.5)
HAS_MEMBERS = hasattr(shardwell, "Elastic")


def parameters() -> dict[str, dict[str, Any]]:
    """The parameters that are opened, by name; each is trained by w0 and w1."""
    crew = {"worker_count": 2}
    found = {
        "sgd": {"optimizer": SGD, "codec": "fp16", **crew},
        "momentum": {"optimizer": shardwell.SGD(learning_rate=0.5, momentum=0.5), **crew},
        "adam": {"optimizer": shardwell.Adam(learning_rate=0.5), "codec": "fp32", **crew},
        "clipped": {"optimizer": shardwell.SGD(learning_rate=0.5, clip_norm=8.0), **crew},
        "async": {"optimizer": SGD, "mode": "async", "codec": "bf16"},
    }
    if HAS_MEMBERS:
        found["int8"] = {"optimizer": SGD, "codec": "int8", **crew}
        found["elastic"] = {"optimizer": SGD, "members": shardwell.Elastic(max_count=4)}
        found["quorum"] = {"optimizer": SGD, "min_contributors": 2, **crew}
    return found


def tables() -> dict[str, dict[str, Any]]:
    """The same of tables."""
    found = {
        "rows": {"optimizer": SGD, "worker_count": 2},
        "adagrad": {"optimizer": shardwell.Adagrad(learning_rate=0.5), "worker_count": 2},
    }
    if HAS_MEMBERS:
        found["elastic_rows"] = {"optimizer": SGD, "members": shardwell.Elastic(max_count=4)}
    return found


def gradient(worker: int, step: int) -> np.ndarray:
    """Whole numbers from -8 to 8."""
    values = (np.arange(SIZE) * (2 * worker + 1) + 5 * step) % 17 - 8
    return values.astype(np.float32)


def row_gradients(worker: int, step: int) -> np.ndarray:
    """The same of rows."""
    return gradient(worker, step)[: ROWS.size * 4].reshape(ROWS.size, 4)


def give(handles: list[Any], name: str, worker: int, step: int) -> None:
    """One worker's contribution to one step."""
    handle = handles[worker]
    if name in tables():
        handle.put_row_gradients(ROWS, row_gradients(worker, step))
    else:
        handle.put_gradient(gradient(worker, step))


def join(client: Any, handles: list[Any], name: str) -> None:
    """Lets both workers take part: the second one from step 1 on, after step 0 of the first."""
    handles[0].join()
    joining = threading.Thread(target=handles[1].join)
    joining.start()
    while [member.state for member in client.members(name)].count("awaited") < 2:
        time.sleep(0.01)
    give(handles, name, 0, 0)
    joining.join()


def values_of(handle: Any, name: str, version: int) -> list[Any]:
    """What a worker reads of a version."""
    if name in tables():
        return handle.get_rows(ROWS, min_version=version).tolist()
    return handle.get_weights(min_version=0 if name == "async" else version).tolist()


def copied(source: Path, target: Path) -> None:
    """Copies what a kill would leave: the kernel has all that was acknowledged.

    Some files may be in the middle of being replaced, by a thread that makes an image, say.
    """
    deadline_s = time.monotonic() + 30
    while True:
        try:
            shutil.copytree(source, target)
            return
        except shutil.Error:
            shutil.rmtree(target)
            if time.monotonic() > deadline_s:
                raise


def train(into: Path, names: list[str], durability: str, expected: dict[str, Any]) -> None:
    """Trains on a cluster with files, and copies those in the middle of a step."""
    options: dict[str, Any] = {}
    if HAS_MEMBERS:
        options["contribution_dir"] = into.parent / f"contributions-{durability}"
        options["contribution_dir"].mkdir()
    live = into.with_name(f"{into.name}-live")
    with (
        LocalCluster(
            2,
            live,
            cluster_id="kept",
            chunk_size_bytes=1024,
            durability=durability,
            **options,
        ) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as first,
        shardwell.connect(cluster.target, worker_id="w1") as second,
    ):
        handles: dict[str, list[Any]] = {}
        for name in names:
            if name in tables():
                spec = {"row_count": 1000, "dim": 4, **tables()[name]}
                handles[name] = [each.table(name, **spec) for each in (first, second)]
            else:
                spec = {"size": SIZE, **parameters()[name]}
                handles[name] = [each.parameter(name, **spec) for each in (first, second)]
                for handle in handles[name]:
                    handle.init(np.arange(SIZE, dtype=np.float32) % 16)
            if "members" in spec:
                join(first, handles[name], name)
                give(handles[name], name, 0, 1)
            else:
                give(handles[name], name, 0, 0)
                give(handles[name], name, 1, 0)
                give(handles[name], name, 0, 1)
            give(handles[name], name, 1, 1)
            before = values_of(handles[name][1], name, 2)
            expected.setdefault(name, {})["before"] = before
        if hasattr(first, "rename"):
            first.parameter("gone", size=4, optimizer=SGD).init(np.zeros(4))
            first.delete("gone")
            first.parameter("old", size=4, optimizer=SGD).init(np.ones(4))
            first.rename("old", "renamed")
        if durability == "process":
            first.save_checkpoint(into.parent / "checkpoint", keep=None)
        for name in names:
            give(handles[name], name, 0, 2)
        copied(live, into)
        for name in names:
            give(handles[name], name, 1, 2)
            expected[name]["after"] = values_of(handles[name][0], name, 3)
    shutil.rmtree(live)


def main(version: str) -> None:
    assert shardwell.__version__ == version, shardwell.__file__
    packed_path = Path(__file__).parent / f"{version}.tar.xz"
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        every = [*parameters(), *tables()]
        train(root / "process", every, "process", expected)
        some = [name for name in every if name in ("sgd", "momentum", "int8", "elastic", "rows")]
        train(root / "step", some, "step", {})
        with MmapGradientAccumulator(root / "sums", dim=4, max_rows=8) as sums:
            sums.accumulate(3, np.array([1, 2, 3, 4], np.float32))
        (root / "expected.json").write_text(json.dumps(expected, sort_keys=True))
        with (
            lzma.open(packed_path, "xb", preset=9) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in sorted(root.iterdir()):
                archive.add(path, path.name, filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes user and time."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(sys.argv[1])

"""A cluster of forked shards (forkserver.py), so that a killed one is back in milliseconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.polling import PATIENCE_S
from harness.programs.forkserver import ForkedCall, ForkedCalls
from harness.programs.ports import free_port

SERVING = "serving on "
_START_TIMEOUT_S = PATIENCE_S
_PORT_TRY_COUNT = 20


def serve_shard(*flags: str) -> None:
    """A shard's process: the command `shardwell serve`."""
    from shardwell_server.cli.serve import serve

    serve.main(list(flags))


class ForkedCluster:
    """S shards with files. A context manager that kills them.

    Their ports are not of those that the system gives to outgoing connections: while a shard is
    dead, one of those might be taken, even by the client that tries to reach it.
    """

    def __init__(
        self,
        forked: ForkedCalls,
        data_dir: Path,
        *,
        shard_count: int,
        chunk_size_bytes: int,
        durability: str = "process",
        cluster_id: str = "shardwell",
    ) -> None:
        self.shards: list[ForkedCall] = []
        """By index; a dead one until it is started again."""
        self._forked = forked
        self._data_dir = data_dir
        self._flags = (
            f"--shard-count={shard_count}",
            f"--chunk-size-bytes={chunk_size_bytes}",
            f"--durability={durability}",
            f"--cluster-id={cluster_id}",
        )
        self._addresses: list[str] = []
        try:
            for index in range(shard_count):
                self._start_anywhere(index)
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """What `shardwell.connect` takes."""
        return ",".join(self._addresses)

    def start(self, shard_index: int) -> None:
        """Starts a dead shard on its address; does not wait until it serves."""
        self.shards[shard_index] = self._started(shard_index, self._addresses[shard_index])

    def _start_anywhere(self, shard_index: int) -> None:
        for _ in range(_PORT_TRY_COUNT):
            address = f"127.0.0.1:{free_port()}"
            shard = self._started(shard_index, address)
            self.shards[shard_index:] = [shard]
            if shard.await_line(SERVING, timeout_s=_START_TIMEOUT_S) == address:
                self._addresses.append(address)
                return
            shard.reap()
        raise AssertionError(f"shard {shard_index} does not start: {list(shard.lines)}")

    def _started(self, shard_index: int, address: str) -> ForkedCall:
        return self._forked.start(
            serve_shard,
            f"--shard-index={shard_index}",
            f"--listen={address}",
            f"--data-dir={self._shard_dir(shard_index)}",
            *self._flags,
        )

    def stored(self, parameter: str, array: str = "weights") -> npt.NDArray[np.float32]:
        """All slices of a parameter's array, from the shards' files: these bits and no others."""
        parts = []
        for shard_index in range(len(self.shards)):
            for path in self._shard_dir(shard_index).glob("parameters/*[0-9]/parameter.json"):
                if json.loads(path.read_text().rpartition("}")[0] + "}")["name"] == parameter:
                    parts.append(np.fromfile(path.with_name(array), "<f4"))
        assert len(parts) == len(self.shards), f"{parameter!r} is on {len(parts)} shards"
        return np.concatenate(parts)

    def await_change(self, shard_index: int, where: float, *, timeout_s: float) -> bool:
        """Returns the moment that an element changes, 0 <= `where` < 1; False if none has in time.

        Looks without a pause: a chunk is written in less time than a pause takes.
        """
        files = [
            path
            for name in ("weights", "gradient_sum", "sums", "slot-0")
            for path in sorted(self._shard_dir(shard_index).glob(f"*s/*[0-9]/{name}"))
            if path.stat().st_size
        ]
        if not files:
            return False
        place = where * len(files)
        words = np.memmap(files[int(place)], "<u4", "r")
        word = memoryview(words)[int(place % 1 * words.size) :]
        before, deadline_s = word[0], time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if word[0] != before:
                return True
        return False

    def _shard_dir(self, shard_index: int) -> Path:
        return self._data_dir / f"shard-{shard_index}"

    def close(self) -> None:
        """Kills the shards."""
        for shard in self.shards:
            shard.kill()

    def __enter__(self) -> ForkedCluster:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

"""A worker process that contributes when a line says so, and reports what came of it.

python session_worker.py TARGET WORKER_ID KIND MODE WORKER_COUNT

KIND is "parameter" or "table". Each line on stdin is a call, answered by one line on stdout:
"put VALUE" ends a step with that gradient everywhere; "open" opens the subject again; "close"
closes the client in order. Of an error, the answer is its type and message.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import shardwell

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.programs.commands import Program

SIZE = 200
SGD = shardwell.SGD(learning_rate=1.0)
PATH = Path(__file__)


class Subject:
    """A parameter or a table, whose elements all have one value: minus the sum of gradients."""

    def __init__(
        self, client: shardwell.Client, kind: str, mode: Any, *, worker_count: int = 1
    ) -> None:
        self.client = client
        self._options: dict[str, Any] = {
            "optimizer": SGD,
            "mode": mode,
            "codec": "fp32",
            "worker_count": worker_count,
        }
        self.kind = kind
        self.handle: Any
        self.open()

    def open(self) -> None:
        """Opens it, or opens it again."""
        if self.kind == "parameter":
            self.handle = self.client.parameter("subject", size=SIZE, **self._options)
            self.handle.init(np.zeros(SIZE, np.float32))
        else:
            self.handle = self.client.table(
                "subject", row_count=SIZE, dim=1, initializer=shardwell.Zeros(), **self._options
            )

    def put(self, value: float, **options: Any) -> int:
        """Adds a gradient; the step that it joined."""
        if self.kind == "parameter":
            return int(self.handle.put_gradient(np.full(SIZE, value, np.float32), **options))
        gradients = np.full((SIZE, 1), value, np.float32)
        return int(self.handle.put_row_gradients(np.arange(SIZE), gradients, **options))

    def values(self) -> set[float]:
        """The values that elements have."""
        if self.kind == "parameter":
            return set(self.handle.get_weights().tolist())
        return set(self.handle.get_rows(np.arange(SIZE)).reshape(-1).tolist())

    def statuses(self) -> list[Any]:
        """What each shard says of it."""
        if self.kind == "parameter":
            return [status.parameters[0] for status in self.client.status()]
        return list(self.handle.status())


class SessionWorker(Program):
    """Such a process, started."""

    def __init__(
        self, target: str, worker_id: str, kind: str, mode: str, *, worker_count: int = 1
    ) -> None:
        import subprocess

        arguments = (target, worker_id, kind, mode, str(worker_count))
        super().__init__(str(PATH), *arguments, stdin=subprocess.PIPE, is_forked=True)
        assert self.read_line() == "ready"

    def ask(self, line: str) -> str:
        """Makes a call; what came of it."""
        self.begin(line)
        return self.read_line()

    def begin(self, line: str) -> None:
        """Makes a call; its answer is the next line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


def main() -> None:
    """Answers line by line."""
    target, worker_id, kind, mode, worker_count = sys.argv[1:]
    with shardwell.connect(target, worker_id=worker_id, timeout_s=20.0) as client:
        subject = Subject(client, kind, mode, worker_count=int(worker_count))
        print("ready", flush=True)
        for line in sys.stdin:
            verb, *arguments = line.split()
            try:
                if verb == "put":
                    print(f"step {subject.put(float(arguments[0]))}", flush=True)
                elif verb == "open":
                    subject.open()
                    print(f"at {subject.handle.next_step}", flush=True)
                else:
                    client.close()
                    print("closed", flush=True)
            except shardwell.ShardwellError as error:
                print(f"{type(error).__name__}: {error.message}", flush=True)


if __name__ == "__main__":
    main()

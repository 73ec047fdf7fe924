"""Workers of an elastic group as processes, and what their steps must have been."""

from __future__ import annotations

import json
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harness.polling import PATIENCE_S
from harness.programs.commands import Program
from harness.programs.elastic_group_worker import ELEMENT_COUNT, after

_WORKER = Path(__file__).with_name("elastic_group_worker.py")
Line = dict[str, Any]


class ElasticWorker(Program):
    """One worker. A context manager that kills it."""

    def __init__(
        self,
        target: str,
        uid: int,
        size: int = 8,
        *,
        element_count: int = 1000,
        retry: bool = True,
        **options: Any,
    ) -> None:
        self.uid = uid
        given = {"lease_s": 2.0, "join_timeout_s": 60.0, "timeout_s": 60.0, "size": size, **options}
        super().__init__(
            str(_WORKER),
            target,
            str(uid),
            json.dumps({"element_count": element_count, "retry": retry, **given}),
            stdin=subprocess.PIPE,
            environment={"OPENBLAS_NUM_THREADS": "1"},
            is_forked=True,
        )

    def await_line(self, what: Callable[[Line], Any], timeout_s: float = PATIENCE_S) -> Line:
        """The next line for which `what` is true."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            line: Line = json.loads(self.read_line(max(deadline_s - time.monotonic(), 0.01)))
            if what(line):
                return line
            last = f"{self.lines[:3]} ... {self.lines[-3:]}, log {self.log[-5:]}"
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {last}"

    def await_step_of(self, uids: Iterable[int]) -> Line:
        """The next step in which these workers, and no others, took part."""
        mask = sum(2**uid for uid in uids)
        return self.await_line(lambda line: line.get("who") == mask)

    def stop(self) -> None:
        """Has it leave after its step."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def leave(self) -> int:
        """The same; its exit code."""
        self.stop()
        return self.end()

    @property
    def steps(self) -> list[Line]:
        """What it has said of its steps, as far as it was read."""
        return [line for line in map(json.loads, self.lines) if "step" in line]


def check_steps(workers: Iterable[ElasticWorker]) -> dict[int, int]:
    """All that made a step agree on who took part, and on weights, which a replay has too.

    Returns:
        Masks of those that took part, by step.
    """
    found: dict[int, int] = {}
    crcs: dict[int, set[int]] = {}
    for worker in workers:
        steps = worker.steps
        numbers = [line["step"] for line in steps]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
        for line in steps:
            assert line["who"] >> worker.uid & 1, f"{worker.uid} took no part in {line}"
            assert found.setdefault(line["step"], line["who"]) == line["who"], line
            crcs.setdefault(line["step"], set()).add(line["crc"])
    weights = np.zeros(ELEMENT_COUNT)
    assert sorted(found) == list(range(len(found))), "steps are missing"
    for step in range(len(found)):
        weights = after(weights, found[step], step)
        assert crcs[step] == {zlib.crc32(weights.tobytes())}, f"weights after step {step}"
    return found

"""A member of a group in a process of its own; it does what lines of JSON say, one answer each.

python group_worker.py TARGET NAME RANK SIZE STRATEGY OPTIONS

It says {"ready": ...} when it has joined. See `Commands` for what may be asked; errors are
answers. "sum" calls all-reduce again and again until it fails, and checks every result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import shardwell

STRATEGIES = {"ring": shardwell.Ring(), "tree": shardwell.Tree(), "centralized": None}


def contribution(rank: int, size: int) -> np.ndarray:
    """What a rank gives: integers, so that sums are exact in every order and codec."""
    return (np.arange(size, dtype=np.float32) % 7 + rank + 1).astype(np.float32)


def total(rank_count: int, size: int) -> np.ndarray:
    """The sum over ranks, by arithmetic."""
    whole = (np.arange(size) % 7) * rank_count + rank_count * (rank_count + 1) // 2
    return whole.astype(np.float32)


class Commands:
    """What may be asked of a member."""

    def __init__(self, group: shardwell.Group) -> None:
        self._group = group

    def standing(self) -> dict[str, Any]:
        """Its place."""
        group = self._group
        return {"rank": group.rank, "size": group.size, "generation": group.generation}

    def sum(self, size: int, count: int = 2**31, timeout_s: float = 60.0) -> dict[str, Any]:
        """So many all-reduces; a wrong result is an AssertionError."""
        expected = total(self._group.size, size)
        for _ in range(count):
            array = contribution(self._group.rank, size)
            self._group.all_reduce(array, timeout_s=timeout_s)
            assert (array == expected).all(), f"{array[:8]} instead of {expected[:8]}"
            print("#", flush=True)
        return self.standing()

    def peak(self, size: int, count: int) -> dict[str, Any]:
        """Resident memory in KiB, a quarter of the way and at the end of so many calls."""
        array, found = np.zeros(size, np.float32), []
        for number in range(count):
            self._group.all_reduce(array)
            if number in (count // 4, count - 1):
                with open("/proc/self/status") as status:
                    lines = dict(line.split(":", 1) for line in status)
                found.append(int(lines["VmRSS"].split()[0]))
        return {"kib": found}

    def barrier(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """One barrier."""
        self._group.barrier(timeout_s=timeout_s)
        return self.standing()

    def join(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Group.join."""
        return {"last": self._group.join(timeout_s=timeout_s)}

    def rebuild(self, timeout_s: float = 60.0, wait_s: float = 0.0) -> dict[str, Any]:
        """Group.rebuild."""
        self._group.rebuild(timeout_s=timeout_s, replacement_wait_s=wait_s)
        return self.standing()

    def interruptible(self, size: int) -> dict[str, Any]:
        """As `sum`, but Ctrl-C ends the block."""
        return self.sum(size)


def answered(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer, or the error as one."""
    try:
        return answer()
    except shardwell.ShardwellError as error:
        return {
            "error": type(error).__name__,
            "rank": error.rank,
            "missing": list(getattr(error, "missing_ranks", ())),
            "message": error.message,
        }


def main() -> None:
    """Joins, and serves commands until its input ends."""
    target, name, rank, size, strategy, options = sys.argv[1:]
    addresses: Any = target.split("|") if "|" in target else target

    def join() -> dict[str, Any]:
        nonlocal group
        group = shardwell.join_group(
            name,
            int(rank),
            int(size),
            STRATEGIES[strategy] or shardwell.Centralized(),
            addresses,
            **json.loads(options),
        )
        return Commands(group).standing()

    group: shardwell.Group | None = None
    print(json.dumps(answered(join)), flush=True)
    if group is None:
        return
    with group:
        commands = Commands(group)
        for line in sys.stdin:
            asked = json.loads(line)
            do = asked.pop("do")
            if do == "raise":
                raise RuntimeError("the training code fails")
            print(json.dumps(answered(lambda: getattr(commands, do)(**asked))), flush=True)  # noqa: B023


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print(json.dumps({"interrupted": os.getpid()}), flush=True)
        sys.exit(130)

"""Runs torch's own tests of a process group on the backend "shardwell", in processes of one group.

    python suite_program.py FOLDER WORLD_SIZE [NAME...]

Each rank is a fork of this process, which has imported torch's suite once. The suite believes that
its backend is gloo, so that it makes the tests of gloo on a CPU; the process group is ours. For
each test rank 0 prints a line: the name, and "ok", "skipped: REASON" or "failed: ERROR" of the rank
that was not ok. After a test that was not ok on all ranks, and one that has ended it, the process
group is made anew.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

FOLDER, WORLD_SIZE, NAMES = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.environ.update(
    BACKEND="gloo",
    INIT_METHOD=f"file://{FOLDER}/own-store",
    WORLD_SIZE=str(WORLD_SIZE),
    TEMP_DIR=str(FOLDER),
    MASTER_ADDR="127.0.0.1",
)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

import shardwell.torch  # noqa: E402, F401 (registers the backend)

TEST_S, MEETING_S, GROUP_S = 60, 90, 20
BARRIERS_MAX = 1000
SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The suite, of which a method is made at a time."""


class Rank:
    """One process of the group."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._group_number = 0

    def run(self) -> None:
        names = NAMES or sorted(name for name in dir(Case) if name.startswith("test_"))
        for number, name in enumerate(names):
            suite.Barrier.barrier_id = number * BARRIERS_MAX  # the same where a test ended early
            results = self._met(f"{number}", self._run(name))
            is_alive = self._met(f"{number}-alive", str(dist.is_initialized()))
            bad = next((result for result in results if result != "ok"), "ok")
            if self.rank == 0:
                print(name, bad, flush=True)
            if bad.startswith("failed") or "False" in is_alive or "timeout" in name:
                self._end_group()
        self._end_group()

    def _run(self, name: str) -> str:
        case = Case(name)
        case.rank, case.file_name = self.rank, str(FOLDER / f"store-{self._group_number}")
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        warnings.resetwarnings()
        signal.alarm(TEST_S)
        try:
            if not dist.is_initialized():
                self._begin_group()
            getattr(case, name)()
        except SystemExit as error:
            return f"skipped: {SKIPS.get(error.code, error.code)}"  # type: ignore[call-overload]
        except unittest.SkipTest as error:
            return f"skipped: {error}"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return "failed: " + words.replace("\n", " ")
        finally:
            signal.alarm(0)
        return "ok"

    def _begin_group(self) -> None:
        dist.init_process_group(
            "shardwell",
            init_method=f"file://{FOLDER}/store-{self._group_number}",
            world_size=WORLD_SIZE,
            rank=self.rank,
            timeout=timedelta(seconds=GROUP_S),
        )
        self._group_number += 1

    def _end_group(self) -> None:
        signal.alarm(TEST_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.alarm(0)

    def _met(self, what: str, said: str) -> list[str]:
        """What all ranks said."""
        own = FOLDER / f"said-{what}-{self.rank}"
        own.with_suffix(".part").write_text(said)
        own.with_suffix(".part").rename(own)
        found = [FOLDER / f"said-{what}-{rank}" for rank in range(WORLD_SIZE)]
        deadline_s = time.monotonic() + MEETING_S
        while not all(each.exists() for each in found):
            assert time.monotonic() < deadline_s, f"a rank has not come to {what}"
            time.sleep(0.005)
        return [each.read_text() for each in found]


def _late(*_: Any) -> None:
    raise TimeoutError(f"not done after {TEST_S} s")


def main() -> int:
    (FOLDER / "barrier").mkdir()
    (FOLDER / "test_dir").mkdir()
    torch.set_num_threads(1)
    children = []
    rank = 0
    for number in range(1, WORLD_SIZE):
        child = os.fork()
        if not child:
            rank = number
            break
        children.append(child)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    signal.signal(signal.SIGALRM, _late)
    Rank(rank).run()
    if rank:
        os._exit(0)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())

"""Members of groups as processes, as a test sees them: asked, killed, stopped, restarted."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.polling import PATIENCE_S
from harness.programs.commands import Program

_WORKER = Path(__file__).with_name("group_worker.py")
ANSWER_TIMEOUT_S = PATIENCE_S

Answer = dict[str, Any]


class GroupProcess(Program):
    """One member. A context manager that kills it."""

    def __init__(
        self,
        target: str | Sequence[str],
        rank: int,
        size: int,
        *,
        name: str = "job",
        strategy: str = "ring",
        **options: Any,
    ) -> None:
        given = {"lease_s": 2.0, "join_timeout_s": 60.0, "timeout_s": 60.0, **options}
        super().__init__(
            str(_WORKER),
            target if isinstance(target, str) else "|".join(target),
            name,
            str(rank),
            str(size),
            strategy,
            json.dumps(given),
            stdin=subprocess.PIPE,
            environment={"OPENBLAS_NUM_THREADS": "1"},
            is_forked=True,
        )

    def begin(self, do: str, **arguments: Any) -> None:
        """Asks; `answer` has what comes of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The next answer; the steps that were reported before it are skipped."""
        deadline_s = time.monotonic() + timeout_s
        while (line := self.read_line(max(deadline_s - time.monotonic(), 0.01))) == "#":
            # Steps may come faster than the shortest wait.
            assert time.monotonic() < deadline_s, f"no answer within {timeout_s:g} s"
        found: Answer = json.loads(line)
        return found

    def ask(self, do: str, **arguments: Any) -> Answer:
        """Both."""
        self.begin(do, **arguments)
        return self.answer()

    def await_step(self) -> None:
        """Returns when one more "sum" is done."""
        line = self.read_line()
        assert line == "#", line

    def leave(self) -> int:
        """Closes its input, so that it leaves the group; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.end()


def answers(members: Sequence[GroupProcess], timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
    """The next answer of each, all within one deadline."""
    deadline_s = time.monotonic() + timeout_s
    return [member.answer(max(deadline_s - time.monotonic(), 0.01)) for member in members]


def ask_all(members: Sequence[GroupProcess], do: str, **arguments: Any) -> list[Answer]:
    """Asks all at once; their answers."""
    for member in members:
        member.begin(do, **arguments)
    return answers(members)

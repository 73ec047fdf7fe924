"""The fates of the demo's workers while they train, and who takes part: `demo --chaos`.

A plan is drawn from a seed: at which steps which workers come, leave in order, and die by kill -9.
Who takes part is what shards say: the contributors of the steps that workers report.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwell_server.demo.digits.worker import Task
from shardwell_server.demo.workers import Member, WorkerPool

CHAOS_STEP_COUNT = 1500
"""So many that workers have the time to start which come later."""
_EVENT_COUNT = 6
Happening: TypeAlias = Literal["comes", "leaves", "dies"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A worker's fate."""

    step: int
    what: Happening
    """The fate: `leaves` is SIGTERM, after its step; `dies` is kill -9."""
    worker_index: int
    """The worker's index; one that has gone comes again under its name."""


def drawn_plan(seed: int, worker_count: int, step_count: int) -> list[Event]:
    """Draws events, each kind among them, in order of steps; two workers always stay."""
    draw = random.Random(seed)  # noqa: S311 (no secret)
    while True:
        kinds: list[Happening] = ["comes", "comes", "leaves", "dies"]
        kinds += draw.choices(("comes", "leaves", "dies"), k=_EVENT_COUNT - len(kinds))
        draw.shuffle(kinds)
        changes = (1 if kind == "comes" else -1 for kind in kinds)
        counts = list(itertools.accumulate(changes, initial=worker_count))
        if min(counts) >= 2 and max(counts) <= worker_count + 2:
            break
    here, gone, newest = list(range(worker_count)), list[int](), worker_count
    span = step_count / (_EVENT_COUNT + 2)
    events = []
    for number, kind in enumerate(kinds):
        if kind == "comes":
            if gone and draw.random() < 0.5:
                index = gone.pop(0)
            else:
                index, newest = newest, newest + 1
            here.append(index)
        else:
            index = here.pop(draw.randrange(min(len(here), 3)))  # none that has hardly begun
            gone.append(index)
        step = int(span * (number + 1 + draw.uniform(-0.25, 0.25)))
        events.append(Event(step=step, what=kind, worker_index=index))
    return events


class Chaos:
    """Lets a plan happen to the workers of a pool, and says who came, left and was lost."""

    def __init__(
        self,
        plan: list[Event],
        pool: WorkerPool,
        task_of: Callable[[int], Task],
        say: Callable[[str], None],
    ) -> None:
        self._plan = list(plan)
        self._pool = pool
        self._task_of = task_of
        self._say = say
        self._expected = {member.task.worker_id for member in pool.members}
        """Workers that began, and were in no step yet: they come, and count as those that began."""
        self._gone: dict[str, Happening] = {}
        self._taking_part: tuple[str, ...] = ()
        self._reached = -1
        self.counts: dict[str, int] = {"came": 0, "left": 0, "lost": 0}

    @property
    def rest_count(self) -> int:
        """The events that did not happen, where the training ended before."""
        return len(self._plan)

    @property
    def step(self) -> int:
        """The step of the furthest worker."""
        return max(member.step for member in self._pool.members)

    @property
    def taking_part(self) -> tuple[str, ...]:
        """The workers whose gradients the newest step has."""
        return self._taking_part

    def go_on(self) -> None:
        """Makes due events happen, and notes who takes part since the last look."""
        self._look()
        if not self._plan or self.step < self._plan[0].step:
            return
        event = self._plan[0]
        worker_id = self._task_of(event.worker_index).worker_id
        if event.what == "comes":
            if any(member.task.worker_id == worker_id for member in self._pool.living):
                return
            self._pool.start(self._task_of(event.worker_index))
            self._say(f"step {self.step}: {worker_id} is started")
        else:
            if worker_id not in self._taking_part:  # it comes before it goes
                return
            member = next(m for m in self._pool.living if m.task.worker_id == worker_id)
            self._gone[worker_id] = event.what
            by_force = event.what == "dies"
            member.let_go(by_force=by_force)
            sent = "kill -9" if by_force else "SIGTERM to"
            self._say(f"step {self.step}: {sent} {worker_id}")
        del self._plan[0]

    def _look(self) -> None:
        newest: Member = max(self._pool.members, key=lambda member: member.step)
        report = newest.latest
        if report is None or not report.contributors or report.step <= self._reached:
            return
        before, now = set(self._taking_part), set(report.contributors)
        self._reached, self._taking_part = report.step, tuple(sorted(now))
        come = now - before - self._expected
        self._expected -= now
        for worker_id in sorted(come):
            self.counts["came"] += 1
            self._say(f"step {report.step}: [green]{worker_id} takes part[/]")
        for worker_id in sorted(before - now):
            how = self._gone.pop(worker_id, None)
            self.counts["left" if how == "leaves" else "lost"] += 1
            what = "[yellow]has left" if how == "leaves" else "[red]is lost"
            self._say(f"step {report.step}: {worker_id} {what}[/], the others go on")

"""Supervised processes: started, watched, started again and stopped, by one thread.

Workers of `shardwell run`, shards of LocalCluster and GroupCluster, and the demo's workers have
places here, which one process after another may fill. Ray supervises the shards of `RayCluster`.

| state | of its process | ends when | then |
|---|---|---|---|
| starting | runs, and is not ready | it is ready | running |
| | | it ends | pausing; failed: `unready_count_max` times in a row, by itself |
| | | it is not ready within `ready_s` | failed |
| running | runs | it ends with a code of `done_codes` | done |
| | | it ends with another | pausing; failed: after `count_max` restarts |
| pausing | has ended | the pause is over, and its group gone | starting |
| done, failed | has ended | | |

A stop asks each process once. From then on nothing is started, an end is `done` whatever its code,
and what does not end within the grace is killed.
"""

from __future__ import annotations

import contextlib
import enum
import math
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shardwell.process.connected import Closing
from shardwell_server.processes.child import Child, describe_exit

ChildT = TypeVar("ChildT", bound=Child)
_NOT_STARTED_PAUSE_S = 1.0
"""Until a process is started again that the system had no room for."""
_BY_OTHERS = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Codes of a process that ended in order, or by a signal from outside, before it was ready."""


class State(enum.Enum):
    """The state of a place."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    PAUSING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """The rule by which a process that has ended is followed by another."""

    count_max: int = 0
    first_pause_s: float = 0.0
    pause_s_max: float = 0.0
    """Pauses double up to it, so that a process that always fails does not burn the machine."""
    done_codes: Collection[int] = (0,)
    unready_count_max: int = 1
    ready_s: float = math.inf

    def pause_s(self, count: int) -> float:
        """Returns the pause before restart `count` + 1."""
        return min(self.first_pause_s * 2.0**count, self.pause_s_max)


_NEVER = Restarts()


class Place(Generic[ChildT]):
    """The place of one process after another; `start` gets how many restarts there were."""

    def __init__(self, start: Callable[[int], ChildT], rule: Restarts) -> None:
        self._start = start
        self.rule = rule
        self.restart_count = 0
        self.code: int | None = None
        self._unready_count = 0
        self._due_s = math.inf
        """The monotonic time of the next restart, or of the deadline of a start."""
        self.begin()

    def begin(self) -> None:
        """Starts a process."""
        self.process = self._start(self.restart_count)
        is_ready = self.process.is_ready()
        self.state = State.RUNNING if is_ready else State.STARTING
        self._due_s = math.inf if is_ready else time.monotonic() + self.rule.ready_s

    def look(self, *, is_stopping: bool) -> Change[ChildT] | None:
        """Makes the next change of state, if one is due."""
        was, words = self.state, ""
        if was is State.STARTING and self.process.is_ready():
            self.state, self._due_s, self._unready_count = State.RUNNING, math.inf, 0
        elif was in (State.STARTING, State.RUNNING) and (code := self.process.poll()) is not None:
            self.process.ask_the_rest()
            words = f"has ended with {describe_exit(code)}"
            self._end(code, is_stopping=is_stopping)
            if code != 0 and not is_stopping:
                self.process.ask_to_stop()  # what it has started
        elif was is State.PAUSING and is_stopping:
            self.state = State.DONE
        elif time.monotonic() < self._due_s:
            pass
        elif was is State.STARTING:
            self.state = State.FAILED
        elif was is State.PAUSING and not self.process.is_gone:
            self.process.send(signal.SIGKILL)
        elif was is State.PAUSING:
            self.restart_count += 1
            try:
                self.begin()
            except OSError as error:
                words = f"can't be started: {error}"
                self._end(self.code or 1, is_stopping=is_stopping)
                self._due_s = max(self._due_s, time.monotonic() + _NOT_STARTED_PAUSE_S)
        return Change(self, was, words) if words or self.state is not was else None

    def _end(self, code: int, *, is_stopping: bool) -> None:
        is_unready = self.state is State.STARTING
        self._unready_count += is_unready and code not in _BY_OTHERS
        self.code = code
        self._due_s = math.inf
        if is_stopping or (code in self.rule.done_codes and not is_unready):
            self.state = State.DONE
        elif self.restart_count < self.rule.count_max and (
            self._unready_count < self.rule.unready_count_max
        ):
            self.state = State.PAUSING
            self._due_s = time.monotonic() + self.rule.pause_s(self.restart_count)
        else:
            self.state = State.FAILED


class Change(NamedTuple, Generic[ChildT]):
    """A change of a place's state."""

    place: Place[ChildT]
    was: State
    words: str


class Supervisor(Closing, Generic[ChildT]):
    """A set of places, watched and stopped together. A context manager that leaves no process."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.places: list[Place[ChildT]] = []
        self.stop_s: float | None = None
        """The monotonic time of the request to stop."""

    def add(self, start: Callable[[int], ChildT], rule: Restarts = _NEVER) -> Place[ChildT]:
        """Starts a process in a new place; OSError: it can not be started."""
        place = Place(start, rule)
        self.places.append(place)
        return place

    def look(self) -> list[Change[ChildT]]:
        """Makes all changes of state that are due."""
        looked = [place.look(is_stopping=self.stop_s is not None) for place in self.places]
        return [change for change in looked if change is not None]

    @property
    def is_awaited(self) -> bool:
        """Returns True while a process runs, or is to be started."""
        return any(place.state not in (State.DONE, State.FAILED) for place in self.places)

    @property
    def is_settled(self) -> bool:
        """True if no change is due before a process ends."""
        states = {place.state for place in self.places}
        return self.stop_s is None and State.RUNNING in states and State.PAUSING not in states

    @property
    def is_gone(self) -> bool:
        """True if all processes have ended, with all that they have started."""
        return all(place.process.is_gone for place in self.places)

    @property
    def rest_s(self) -> float:
        """The rest of the grace, once processes were asked to stop."""
        return math.inf if self.stop_s is None else self.stop_s + self.grace_s - time.monotonic()

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Signals those that have got none. Also from signal handlers."""
        if self.stop_s is None:
            self.stop_s = time.monotonic()
        for place in self.places:
            place.process.ask_to_stop(number)

    def close(self) -> None:
        """Asks all to stop, waits for their ends and kills after the grace. Safe to repeat."""
        with contextlib.ExitStack() as stack:  # goes on with the others if one is interrupted
            for place in self.places:
                stack.callback(lambda child: child.close(max(self.rest_s, 0.0)), place.process)
            self.ask_to_stop()

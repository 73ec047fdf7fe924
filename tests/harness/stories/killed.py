"""Stories that are cut off after any write: a parameter's, a table's, an accumulator's.

And the program that tells one again and again, and is killed after a later write each time:

Usage: killed.py STORY DIRECTORY FIRST PACE

Tellings are cut off after write n = FIRST, FIRST + PACE, ... until one comes to its end. Each
leaves DIRECTORY/n/store, and DIRECTORY/n/answered with a byte for each call that was answered. A
process of its own, so that it can fork: nothing else runs in it.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import shardwell_server
from harness.stories import accumulator, crash, parameter, table
from harness.stories.crash import SameMachine, Written
from harness.stories.images import image_of
from shardwell_server.config import Durability
from shardwell_server.shard.shard import Shard
from shardwell_server.store.contract import TableStorage
from shardwell_server.store.files.boot import Boot
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

if TYPE_CHECKING:
    from harness.stories.power import Disk

Reached: TypeAlias = Callable[[str], None]
_SOURCES = Path(shardwell_server.__file__).parent
_TABLE_SOURCES = ("store/mmap/table.py", "store/row_undo.py")


def _nothing(point: str) -> None:
    pass


class Story(abc.ABC):
    """What happens to files of one kind, as a list of calls. Any number of times, anywhere."""

    write_count_min: int
    """It has more; a hook that is never called would make tests of it empty."""
    sources: Sequence[Path]
    """Whose writes it makes, all of them."""
    unreached: frozenset[str] = frozenset()
    """Except what only a recovery writes, or another story."""
    recovery_points: frozenset[str]
    """What the recoveries of all that it leaves write."""

    @property
    @abc.abstractmethod
    def states(self) -> Sequence[Any]:
        """What there is before the first call, and after each."""

    @abc.abstractmethod
    def tell(self, path: Path, answered: Callable[[], None], reached: Reached) -> None:
        """All of it, in an empty directory."""

    @abc.abstractmethod
    def state_at(self, path: Path, reached: Reached = _nothing) -> Any:
        """What a process that goes on from files finds; they are recovered then."""

    @abc.abstractmethod
    def check(self, path: Path, answered_count: int, where: str) -> None:
        """The files hold what was answered, or a call more."""

    @abc.abstractmethod
    def check_goes_on(
        self, path: Path, answered_count: int, where: str, *, is_whole: bool = True
    ) -> None:
        """The same; and the story can go on, to the same end.

        Args:
            is_whole: Else only the end counts: what was damaged may be made anew on the way.
        """

    @property
    def call_count(self) -> int:
        """How many calls it has."""
        return len(self.states) - 1

    def points(self) -> set[str]:
        """The names of the writes that it is to make."""
        return points_in(self.sources) - self.unreached


def points_in(sources: Iterable[Path]) -> set[str]:
    """The names of all writes that stand in files."""
    text = "".join(source.read_text() for source in sources)
    return set(re.findall(r'reached\("([^"]+)"\)', text))


def all_points() -> set[str]:
    """Those of everything that can be killed."""
    return points_in(
        file for folder in ("store", "accumulator") for file in (_SOURCES / folder).rglob("*.py")
    )


class StoredStory(Story):
    """Of what a shard's store holds.

    Args:
        durability: Argument of `--durability`.
        boot: Boot id of the machine that goes on: the same one, or one that lost power since.
    """

    what: str
    """What it is of, in messages; of two parameters the first."""
    directory: str
    """In which that is."""

    def __init__(self, durability: str = "process", boot: type[Boot] = SameMachine) -> None:
        self._durability = durability
        self._boot = boot

    def may_be(self, state: Any, answered_count: int) -> bool:
        """Whether there is what was answered, or a call more."""
        return state in self.states[answered_count : answered_count + 2]


class ParameterStory(StoredStory):
    """harness/stories/parameter.py, on a shard."""

    what = "parameter 'sync'"
    directory = "parameters/000001"
    write_count_min = 300
    sources = tuple(
        file
        for file in (_SOURCES / "store").rglob("*.py")
        if str(file.relative_to(_SOURCES)) not in _TABLE_SOURCES
    )
    recovery_points = frozenset({"taken back", "undo done", "undo voided", "mark", "mark's check"})
    unreached = frozenset(
        {"taken back", "undo done"}
        | {"journal segment", "journal entry", "image begun", "image written"}
        | {"image in place", "segment forgotten", "image forgotten", "file restored"}
        # Of states: tests/unit/shard/parameter/test_training_states.py.
        | {"room for a page of a state", "a page of a state"}
        # Of deletions: tests/unit/shard/test_deletions.py.
        | {"log of names", "removed files", "removed files' name"}
        | {"new layout", "new layout's name"}
    )

    @functools.cached_property
    def _undisturbed(self) -> crash.Undisturbed:
        return crash.undisturbed_story()

    @property
    def states(self) -> Sequence[parameter.State]:
        return self._undisturbed.states

    def tell(self, path: Path, answered: Callable[[], None], reached: Reached) -> None:
        with self._recovered(path, reached) as shard:
            for call in parameter.story():
                call.make(shard)
                for each in shard.parameters.all():
                    each.make_durable()
                answered()
                shard.make_images()  # as its thread does now and then

    def state_at(self, path: Path, reached: Reached = _nothing) -> Any:
        with self._recovered(path, reached) as shard:
            return parameter.state_of(shard)

    def check(self, path: Path, answered_count: int, where: str) -> None:
        assert self.state_at(path) in self.states[answered_count : answered_count + 2], where

    def check_goes_on(
        self, path: Path, answered_count: int, where: str, *, is_whole: bool = True
    ) -> None:
        with self._recovered(path) as shard:
            if is_whole:  # else no test looks first: damage must be found in use
                assert self.may_be(parameter.state_of(shard), answered_count), where
            crash.go_on(shard, answered_count, self._undisturbed)

    @contextlib.contextmanager
    def _recovered(self, path: Path, reached: Reached = _nothing) -> Iterator[Shard]:
        kept = {"durability": self._durability, "boot": self._boot}
        with parameter.short_blocks(), crash.recovered(path, reached, **kept) as shard:
            yield shard


class TableStory(StoredStory):
    """harness/stories/table.py, on storage."""

    what = "table 't'"
    directory = "tables/000001"
    write_count_min = 150
    sources = tuple(_SOURCES / name for name in _TABLE_SOURCES)
    unreached = frozenset({"rows taken back"})
    recovery_points = frozenset({"rows taken back", "undo voided", "mark", "mark's check"})

    @functools.cached_property
    def states(self) -> Sequence[table.State]:
        """In memory; before the story seats are taken."""
        blank, storage = table.make(MemoryStore()), table.make(MemoryStore())
        for _ in range(2):
            blank.add_seat()
        states = [table.state_of(blank)]
        table.tell(storage, answered=lambda: states.append(table.state_of(storage)))
        return states

    def tell(self, path: Path, answered: Callable[[], None], reached: Reached) -> None:
        table.tell(self.recovered(path, reached), reached, answered)

    def state_at(self, path: Path, reached: Reached = _nothing) -> Any:
        return table.state_of(self.recovered(path, reached))

    def check(self, path: Path, answered_count: int, where: str) -> None:
        assert self.state_at(path) in self.states[answered_count : answered_count + 2], where

    def check_goes_on(
        self, path: Path, answered_count: int, where: str, *, is_whole: bool = True
    ) -> None:
        storage = self.recovered(path)
        if is_whole:
            assert self.may_be(table.state_of(storage), answered_count), where
        table.tell(storage)
        assert table.state_of(storage) == self.states[-1], where

    def may_be(self, state: table.State, answered_count: int) -> bool:
        if answered_count == 0 and not any(state["keys"]):  # seats may be missing
            state = {**state, "positions": self.states[0]["positions"]}
        return super().may_be(state, answered_count)

    def recovered(self, path: Path, reached: Reached = _nothing) -> TableStorage:
        """The table as a new process finds it, or makes it."""
        kept = {"durability": Durability(self._durability), "boot": self._boot(path)}
        return table.make(MmapStore(path, reached=reached, **kept))


class AccumulatorStory(Story):
    """harness/stories/accumulator.py; `apply` leaves one block in doubt."""

    states = accumulator.STATES
    write_count_min = 90
    sources = (*(_SOURCES / "accumulator").glob("*.py"), _SOURCES / "store/row_undo.py")
    unreached = frozenset({"rows taken back"})
    recovery_points = frozenset({"rows taken back", "words cleared", "state"})

    def tell(self, path: Path, answered: Callable[[], None], reached: Reached) -> None:
        with accumulator.as_killed(path, reached) as telling:
            for call in accumulator.STORY:
                telling.make(call)
                answered()

    def state_at(self, path: Path, reached: Reached = _nothing) -> Any:
        with accumulator.as_killed(path, reached) as telling:
            return telling.sums()

    def check(self, path: Path, answered_count: int, where: str) -> None:
        self.check_goes_on(path, answered_count, where)

    def check_goes_on(
        self, path: Path, answered_count: int, where: str, *, is_whole: bool = True
    ) -> None:
        assert is_whole
        states = accumulator.STATES
        with accumulator.as_killed(path) as telling:
            found, before, is_done = telling.sums(), states[answered_count], False
            if answered_count < self.call_count:
                call = accumulator.STORY[answered_count]
                assert call.may_leave(before, found), where
                if call.kind == "apply":
                    self._check_applied_except_a_block(answered_count, found, telling.rows)
                else:
                    rows = self._rows_after(answered_count)
                    np.testing.assert_array_equal(telling.rows, rows, where)
                    is_done = found != before
            else:
                assert found == before, where
            for call in accumulator.STORY[answered_count + is_done :]:
                telling.make(call)
            assert telling.sums() == states[-1], where

    def _rows_after(self, answered_count: int) -> np.ndarray:
        """What the rows are when so many calls were answered."""
        rows = np.zeros((accumulator.ROW_COUNT, accumulator.DIM))
        story = accumulator.STORY[:answered_count]
        for call, sums in zip(story, accumulator.STATES, strict=False):
            if call.kind == "apply":
                for row, values in sums.items():
                    rows[row] -= accumulator.RATE * np.array(values)
        return rows

    def _check_applied_except_a_block(
        self, answered_count: int, found: accumulator.Sums, rows: np.ndarray
    ) -> None:
        """Rows without a sum were applied; of those with one, at most a block's."""
        before, old = accumulator.STATES[answered_count], self._rows_after(answered_count)
        doubtful_count = 0
        for block, _ in accumulator.blocks_left(before, found):
            is_doubtful = False
            for row in block:
                new = old[row] - accumulator.RATE * np.array(before[row])
                if row in found:
                    assert ((rows[row] == old[row]) | (rows[row] == new)).all()
                    is_doubtful |= bool((rows[row] != old[row]).any())
                else:
                    np.testing.assert_array_equal(rows[row], new)
            doubtful_count += is_doubtful
        assert doubtful_count <= 1


STORIES: dict[str, Story] = {
    "parameter": ParameterStory(),
    "table": TableStory(),
    "accumulator": AccumulatorStory(),
}


WritesOf: TypeAlias = Callable[[Story], list[Written]]
"""A fixture of tests: what every write of a story leaves."""


def writes_of(story: Story, path: Path, disk: Disk | None = None) -> list[Written]:
    """Tells it once: the files after every write, and what of them is on a disk."""
    found: list[Written] = []
    answered_count = 0

    def answered() -> None:
        nonlocal answered_count
        answered_count += 1

    def reached(point: str) -> None:
        synced = {} if disk is None else disk.synced_below(path)
        found.append(Written(point, answered_count, image_of(path), synced))

    story.tell(path, answered, reached)
    return found


# The program.


def tell_killed(story: Story, path: Path, killed_after: int) -> None:
    """Tells it in this process, which ends at the write of that number, 1 being the first."""
    write_count = 0

    def reached(point: str) -> None:
        nonlocal write_count
        write_count += 1
        if write_count == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    (path / "store").mkdir(parents=True)
    notes = os.open(path / "answered", os.O_WRONLY | os.O_CREAT)
    story.tell(path / "store", lambda: os.write(notes, b".") and None, reached)


def main(name: str, directory: str, first: str, pace: str) -> int:
    """Prints the number of the telling that came to its end."""
    story, number = STORIES[name], int(first)
    while True:
        child = os.fork()
        if child == 0:
            try:
                tell_killed(story, Path(directory) / str(number), number)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            print(number)
            return status
        number += int(pace)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

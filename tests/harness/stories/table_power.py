"""Loss of power in the story of a table with a journal and images, each file as a disk has it.

The story makes an image after each change, and changes between an image's blocks as well. What is
mapped is scrambled, and journals are cut back to what was synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.stories.crash import SameMachine
from harness.stories.images import Image, image_of, restore
from harness.stories.power import following_renames
from harness.stories.table import LAYOUT, STORY, State, apply, make, state_of, take_seats, tell
from shardwell_server.config import Durability
from shardwell_server.store import TableStorage
from shardwell_server.store.files.boot import Boot
from shardwell_server.store.journal import journal
from shardwell_server.store.memory.store import MemoryStore
from shardwell_server.store.mmap import table as mapped_table
from shardwell_server.store.mmap.store import MmapStore

TABLE = "tables/000001"
MAPPED = {"weights", "slot-0", "slot-1", "sums", "has_sum", "keys", "update_counts", "last_steps"}
MAPPED |= {"row_checks", "key_checks", "sum_checks", "records", "marks", "undo"}
STEP = Durability("step")


def many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an image after each change, in blocks of two rows."""
    monkeypatch.setattr(journal, "IMAGE_AT_BYTES_MIN", 0)
    monkeypatch.setattr(mapped_table, "_BLOCK_BYTES", 2 * LAYOUT.row_size_bytes)


def undisturbed() -> list[State]:
    """Before the story, seats taken, and after each step."""
    storage = make(MemoryStore())
    states: list[State] = []
    for _ in range(2):
        storage.add_seat()
    states.append(state_of(storage))
    tell(storage, answered=lambda: states.append(state_of(storage)))
    return states


STATES = undisturbed()


def _nothing(point: str) -> None:
    pass


def recovered(
    path: Path,
    reached: Callable[[str], None] = _nothing,
    *,
    boot: type[Boot] = SameMachine,
    durability: Durability = STEP,
) -> TableStorage:
    """The table as a new process finds it."""
    return make(MmapStore(path, boot=boot(path), durability=durability, reached=reached))


def go_on(storage: TableStorage, answered: Callable[[], None] = lambda: None) -> None:
    """The story from where it was, with images, and changes between their blocks."""
    take_seats(storage)
    steps = iter(range(storage.record.version, len(STORY)))

    def one() -> bool:
        """Makes the next change, and sees that it is acknowledged; False, for `is_stopping`."""
        number = next(steps, None)
        if number is not None:
            apply(storage, STORY[number], number + 1)
            storage.make_durable()
            answered()
        return False

    while storage.record.version < len(STORY):
        one()
        storage.make_image(one)


class Synced:
    """What is on disk of files that grow: their sizes when they were last synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, int] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name)))
        following_renames(monkeypatch, self.sizes)

    def _recording(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            self.sizes[path] = os.fstat(file).st_size
            sync(file)

        return record


class Written(NamedTuple):
    """The files right after one write."""

    point: str
    answered_count: int
    image: Image
    on_disk: dict[str, int]
    """Bytes that are on disk of each journal segment."""

    def after_power_loss(self) -> Image:
        """Without what was mapped and never synced, and the ends of journals that were not."""
        found = dict(self.image)
        for name, contents in self.image.items():
            directory, _, file = name.rpartition("/")
            if contents and directory == TABLE and f"{TABLE}/table.json" in found:
                if file in MAPPED and standing_images(self.image):
                    found[name] = b"\x5a" * len(contents)
                elif file.startswith("journal-"):
                    found[name] = contents[: self.on_disk.get(name, 0)]
        return found


def standing_images(image: Image) -> list[str]:
    return [
        name
        for name, contents in image.items()
        if contents is None and "/image-" in name and not name.endswith(".new")
    ]


def scrambled_at(path: Path, to: Path) -> Path:
    """What another start of the machine finds, when all journals were synced."""
    image = image_of(path)
    sizes = {name: len(contents or b"") for name, contents in image.items()}
    return restore(Written("", 0, image, sizes).after_power_loss(), to)

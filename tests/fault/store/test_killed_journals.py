"""Goal: with a journal, too, whatever instruction a shard is killed at, and its machine after it,
the files hold each change whole or not at all, and all that was answered.

Method: the stories of test_killed.py with `--durability step` and many images: the files after each
write, gone on from as the same machine, and as one that lost power: then logs are what was synced
of them, and mapped files are scrambled. Oracle: the same stories, undisturbed, in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from harness.stories import killed
from harness.stories.crash import OtherStart, Written
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.killed import ParameterStory, StoredStory, TableStory
from harness.stories.power import (
    Disk,
    after_power_loss,
    many_images,
    scrambled_at,
    standing_images,
)
from harness.stories.table import STORY

KINDS: dict[str, type[StoredStory]] = {"parameter": ParameterStory, "table": TableStory}
KIND = pytest.mark.parametrize("kind", KINDS)
STORIES = {kind: make("step") for kind, make in KINDS.items()}
AFTER_POWER_LOSS = {kind: make("step", OtherStart) for kind, make in KINDS.items()}
"""The same, gone on with by a machine that lost power."""
PART_COUNT = 16
PART = pytest.mark.parametrize("part", range(PART_COUNT))
"""Every 16th write; all of them in one test would take too long on a busy machine."""
WritesOf: TypeAlias = Callable[[str], list[Written]]


@pytest.fixture(autouse=True)
def _many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    many_images(monkeypatch)


@pytest.fixture(scope="module")
def writes_of(tmp_path_factory: pytest.TempPathFactory) -> WritesOf:
    """The images that every write of a story leaves; each story runs once."""

    @functools.cache
    def written_by(kind: str) -> list[Written]:
        with (
            in_memory(tmp_path_factory.mktemp(kind)) as path,
            pytest.MonkeyPatch.context() as patch,
        ):
            many_images(patch)
            found = killed.writes_of(STORIES[kind], path, Disk(patch))
        assert len(found) > STORIES[kind].write_count_min
        return found

    return written_by


def lost(written: Written, path: Path) -> Path:
    """What the machine finds that was off right after that write."""
    return restore(after_power_loss(written.image, written.synced), path)


@KIND
def test_the_story_writes_journals_and_images(writes_of: WritesOf, kind: str) -> None:
    points = [written.point for written in writes_of(kind)]
    entry_count_min, image_count_min = {"parameter": (25, 4), "table": (len(STORY), 2)}[kind]
    assert points.count("journal entry") > entry_count_min
    assert points.count("image in place") > image_count_min
    expected = {"journal segment", "image begun", "image written", "image in place"}
    assert expected | {"segment forgotten", "image forgotten"} <= set(points)


def test_a_table_changes_while_an_image_is_under_way(writes_of: WritesOf) -> None:
    answered_count = 0
    for written in writes_of("table"):
        is_answered = written.answered_count > answered_count
        answered_count = written.answered_count
        if is_answered and any(".new" in name and "/image-" in name for name in written.image):
            return
    raise AssertionError("it never does")


@pytest.mark.sampled(2)
@PART
@KIND
def test_a_journal_killed_after_each_write(
    tmp_path: Path, writes_of: WritesOf, kind: str, part: int
) -> None:
    """And the machine loses power after that.

    Entries that were journaled before the kill and never counted may count after the other in a
    parameter, where their sender sends them again, and must not in a table.
    """
    story, without_power = STORIES[kind], AFTER_POWER_LOSS[kind]
    for written in writes_of(kind)[part::PART_COUNT]:
        path = restore(written.image, tmp_path / "store")
        state = story.state_at(path)
        at_once = scrambled_at(path, tmp_path / "again")
        if standing_images(image_of(at_once)):
            found = without_power.state_at(at_once)
            assert found == state or kind == "parameter", written.point
            assert story.may_be(found, written.answered_count), written.point
        story.check_goes_on(path, written.answered_count, written.point)
        later = scrambled_at(path, tmp_path / "again")
        assert without_power.state_at(later) == story.states[-1], written.point


@pytest.mark.sampled(2)
@PART
@KIND
def test_power_lost_after_each_write(
    tmp_path: Path, writes_of: WritesOf, kind: str, part: int
) -> None:
    story = AFTER_POWER_LOSS[kind]
    for written in writes_of(kind)[part::PART_COUNT]:
        path = lost(written, tmp_path / "store")
        story.check_goes_on(path, written.answered_count, written.point)
        # And once more, with the journal of both.
        again = scrambled_at(path, tmp_path / "again")
        assert story.state_at(again) == story.states[-1], written.point


@pytest.mark.exhaustive
@KIND
def test_power_lost_again_after_each_write_of_a_recovery(
    tmp_path: Path, writes_of: WritesOf, kind: str
) -> None:
    story, writes = AFTER_POWER_LOSS[kind], writes_of(kind)
    for written in writes[:: max(len(writes) // 25, 1)]:
        path, second = lost(written, tmp_path / "first"), tmp_path / "second"
        images: list[Image] = []

        def reached(_: str, path: Path = path, images: list[Image] = images) -> None:
            images.append(image_of(path))

        state = story.state_at(path, reached)
        assert story.may_be(state, written.answered_count), written.point
        for image in images[:: max(len(images) // 12, 1)]:
            again = scrambled_at(restore(image, second), tmp_path / "again")
            assert story.state_at(again) == state, written.point


@KIND
def test_going_back_to_process_forgets_images(
    tmp_path: Path, writes_of: WritesOf, kind: str
) -> None:
    story, in_process = STORIES[kind], killed.STORIES[kind]
    path = restore(writes_of(kind)[-1].image, tmp_path / "store")
    images: list[Image] = []
    in_process.state_at(path, lambda _: images.append(image_of(path)))
    assert not [name for name in image_of(path) if "/image-" in name or "/journal-" in name]
    for image in images:  # killed in between: it goes on from its files, as it was
        again = restore(image, tmp_path / "again")
        assert in_process.state_at(again) == story.states[-1]
    assert story.state_at(path) == story.states[-1]  # and forward again
    last = scrambled_at(path, tmp_path / "last")
    assert AFTER_POWER_LOSS[kind].state_at(last) == story.states[-1]

"""Goal: with a journal, too, whatever instruction a shard is killed at, and its machine after it,
the files hold each chunk before or after the call that was under way, and all that was answered.

Method: the training of test_killed.py with `--durability step`: images of the files after
each write, gone on from as the same machine, and as one that lost power, when image and journal
alone count: then the mapped files are scrambled. Oracle: the same training, undisturbed, in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stories.crash import (
    OtherStart,
    SameMachine,
    Undisturbed,
    Written,
    go_on,
    recovered,
    state_at,
    undisturbed_story,
    writes_of_story,
)
from harness.stories.images import Image, image_of, in_memory, restore
from harness.stories.parameter import short_blocks, state_of
from shardwell_server.store.journal import journal

PART_COUNT = 8
LOWEST_WRITE_COUNT = 300
"""The story has more; a hook that is never called would make these tests empty."""
MAPPED = {"weights", "gradient_sum", "slot-0", "slot-1", "records", "marks", "undo"}


@pytest.fixture(autouse=True)
def _short_blocks() -> Iterator[None]:
    with short_blocks():
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return undisturbed_story()


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    with (
        in_memory(tmp_path_factory.mktemp("story")) as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(journal, "IMAGE_AT_BYTES_MIN", 0)  # several, as it grows
        return writes_of_story(path, durability="step")


@pytest.fixture(params=range(PART_COUNT))
def part(request: pytest.FixtureRequest, writes: list[Written]) -> list[Written]:
    """Every eighth write; all of them in one test would take too long on a busy machine."""
    found = writes[request.param :: PART_COUNT]
    assert len(found) > LOWEST_WRITE_COUNT // PART_COUNT
    return found


def scrambled(image: Image) -> Image:
    """Without what was mapped and never synced, where there is an image to go back to."""
    imaged = {
        name.split("/image-")[0] for name in image if "/image-" in name and ".new" not in name
    }
    return {
        name: b"\x5a" * len(contents)
        if contents and name.rpartition("/")[2] in MAPPED and name.rpartition("/")[0] in imaged
        else contents
        for name, contents in image.items()
    }


def test_the_story_writes_journals_and_images(writes: list[Written]) -> None:
    points = [written.point for written in writes]
    assert points.count("journal entry") > 25
    for point in ("journal segment", "image begun", "image written", "image stands"):
        assert point in points
    assert points.count("image stands") > 4
    assert {"segment forgotten", "image forgotten"} <= set(points)


@pytest.mark.sampled(1)
def test_killed_after_each_write(
    tmp_path: Path, undisturbed: Undisturbed, part: list[Written]
) -> None:
    for written in part:
        n = written.answered_count
        path = restore(written.image, tmp_path / "store")
        with recovered(path, durability="step", boot=SameMachine) as shard:
            assert state_of(shard) in undisturbed.states[n : n + 2], written.point
            go_on(shard, n, undisturbed)


@pytest.mark.sampled(1)
def test_power_lost_after_each_write(
    tmp_path: Path, undisturbed: Undisturbed, part: list[Written]
) -> None:
    for written in part:
        n = written.answered_count
        path = restore(scrambled(written.image), tmp_path / "store")
        with recovered(path, durability="step", boot=OtherStart) as shard:
            assert state_of(shard) in undisturbed.states[n : n + 2], written.point
            go_on(shard, n, undisturbed)
        # And once more, with the journal of both.
        again = restore(scrambled(image_of(path)), tmp_path / "again")
        assert state_at(again, durability="step", boot=OtherStart) == undisturbed.states[-1]


@pytest.mark.sampled(1)
def test_killed_and_then_power_lost(
    tmp_path: Path, undisturbed: Undisturbed, part: list[Written]
) -> None:
    """What was journaled before the kill and never counted must not count after the other."""
    for written in part:
        n = written.answered_count
        path = restore(written.image, tmp_path / "store")
        with recovered(path, durability="step", boot=SameMachine) as shard:
            go_on(shard, n, undisturbed)
        again = restore(scrambled(image_of(path)), tmp_path / "again")
        assert state_at(again, durability="step", boot=OtherStart) == undisturbed.states[-1]


@pytest.mark.exhaustive
def test_power_lost_again_after_each_write_of_a_recovery(
    tmp_path: Path, undisturbed: Undisturbed, writes: list[Written]
) -> None:
    for written in writes[:: max(len(writes) // 25, 1)]:
        n = written.answered_count
        images: list[Image] = []
        path = restore(scrambled(written.image), tmp_path / "first")

        def reached(_: str, path: Path = path, images: list[Image] = images) -> None:
            images.append(image_of(path))

        state = state_at(path, reached, durability="step", boot=OtherStart)
        assert state in undisturbed.states[n : n + 2], written.point
        for image in images[:: max(len(images) // 12, 1)]:
            second = restore(scrambled(image), tmp_path / "second")
            assert state_at(second, durability="step", boot=OtherStart) == state, written.point


def test_going_back_to_process_forgets_images(
    tmp_path: Path, undisturbed: Undisturbed, writes: list[Written]
) -> None:
    path = restore(writes[-1].image, tmp_path / "store")
    images: list[Image] = []
    state_at(path, lambda _: images.append(image_of(path)), durability="process")
    assert not [name for name in image_of(path) if "/image-" in name or "/journal-" in name]
    for image in images:  # killed in between: it goes on from its files, as it was
        again = restore(image, tmp_path / "again")
        assert state_at(again, durability="process") == undisturbed.states[-1]

"""Goal: a table with `--durability step` has what was acknowledged after a loss of power, too.

Method: the story of a table with a journal and images, changes between an image's blocks as well.
After each write an image of the files, gone on from as the same machine, and as one that lost
power: then mapped files are scrambled, and journals cut back to what was synced. Oracle: the same
story, undisturbed, in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shardwell
from harness.images import Image, image_of, in_memory, restore
from harness.table_story import LAYOUT, STORY, State, apply, make, state_of, tell
from harness.telling import OtherStart, SameMachine
from shardwell.errors import StorageError
from shardwell_server.app import ShardServer
from shardwell_server.config import Durability, ShardConfig
from shardwell_server.store import MemoryStore, MmapStore, TableStorage, image_files
from shardwell_server.store import journaled_table as journaled
from shardwell_server.store.boot import Boot
from shardwell_server.store.data_dir import DataDir
from shardwell_server.store.table_storage import Places

TABLE = "tables/000001"
MAPPED = {"weights", "slot-0", "slot-1", "sums", "has_sum", "keys", "update_counts", "last_steps"}
MAPPED |= {"row_checks", "key_checks", "sum_checks", "records", "marks", "undo"}
STEP = Durability("step")


@pytest.fixture(autouse=True)
def _many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "IMAGE_AT_BYTES_MIN", 0)
    monkeypatch.setattr(journaled, "_BLOCK_BYTES", 2 * LAYOUT.row_size_bytes)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


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


def take_seats(storage: TableStorage) -> None:
    while len(storage.positions()) < 2:
        storage.add_seat()
        storage.log({"kind": "seat", "worker_id": f"w{len(storage.positions())}"})


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


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    with (
        in_memory(tmp_path_factory.mktemp("story")) as path,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(image_files, "IMAGE_AT_BYTES_MIN", 0)
        patch.setattr(journaled, "_BLOCK_BYTES", 2 * LAYOUT.row_size_bytes)
        synced = Synced(patch)
        found: list[Written] = []
        answered_count = 0

        def reached(point: str) -> None:
            sizes = {os.path.relpath(name, path): size for name, size in synced.sizes.items()}
            found.append(Written(point, answered_count, image_of(path), sizes))

        def answered() -> None:
            nonlocal answered_count
            answered_count += 1

        go_on(recovered(path, reached), answered)
        reached("end")
        # Many, and all alike to who comes back: an image under way, or one that goes, is none.
        return [written for written in found if written.point not in ("file", "image forgotten")]


def assert_has(storage: TableStorage, written: Written, *, back: int = 0) -> None:
    """The table holds what was answered, or one step more."""
    state, n = state_of(storage), written.answered_count
    if n == 0 and not state["keys"]:
        state["positions"] = STATES[0]["positions"]  # seats may be missing
    assert state in STATES[n - back : n + 2], written.point


def test_the_story_writes_journals_and_images(writes: list[Written]) -> None:
    points = [written.point for written in writes]
    assert points.count("journal entry") > len(STORY)
    assert points.count("image stands") > 2
    expected = {"journal segment", "image begun", "image written", "segment forgotten"}
    assert expected <= set(points)
    between = [
        writes[number - 1].point
        for number, written in enumerate(writes)
        if written.answered_count > writes[number - 1].answered_count
        and any(".new" in name and "/image-" in name for name in written.image)
    ]
    assert between  # changes while an image was under way


def test_power_lost_after_each_write(tmp_path: Path, writes: list[Written]) -> None:
    for written in writes:
        path = restore(written.after_power_loss(), tmp_path / "store")
        storage = recovered(path, boot=OtherStart)
        assert_has(storage, written)
        go_on(storage)
        assert state_of(storage) == STATES[-1]


def test_killed_and_then_power_lost(tmp_path: Path, writes: list[Written]) -> None:
    """What was journaled before the kill and never stood must not stand after the other."""
    for written in writes:
        path = restore(written.image, tmp_path / "store")
        storage = recovered(path)
        assert_has(storage, written)
        state = state_of(storage)
        at_once = scrambled_at(path, tmp_path / "again")
        if standing_images(image_of(at_once)):
            assert state_of(recovered(at_once, boot=OtherStart)) == state, written.point
        go_on(storage)
        assert state_of(storage) == STATES[-1]
        later = scrambled_at(path, tmp_path / "again")
        assert state_of(recovered(later, boot=OtherStart)) == STATES[-1], written.point


def scrambled_at(path: Path, to: Path) -> Path:
    """What another start of the machine finds, when all journals were synced."""
    image = image_of(path)
    sizes = {name: len(contents or b"") for name, contents in image.items()}
    return restore(Written("", 0, image, sizes).after_power_loss(), to)


def test_power_lost_again_after_each_write_of_a_recovery(
    tmp_path: Path, writes: list[Written]
) -> None:
    for written in writes[:: max(len(writes) // 25, 1)]:
        images: list[Image] = []
        path = restore(written.after_power_loss(), tmp_path / "first")

        def reached(_: str, path: Path = path, images: list[Image] = images) -> None:
            images.append(image_of(path))

        state = state_of(recovered(path, reached, boot=OtherStart))
        for image in images[:: max(len(images) // 12, 1)]:
            sizes = {name: len(contents or b"") for name, contents in image.items()}
            second = restore(Written("", 0, image, sizes).after_power_loss(), tmp_path / "second")
            assert state_of(recovered(second, boot=OtherStart)) == state, written.point


def test_going_back_to_process_forgets_images(tmp_path: Path, writes: list[Written]) -> None:
    process = Durability("process")
    path = restore(writes[-1].image, tmp_path / "store")
    images: list[Image] = []
    recovered(path, lambda _: images.append(image_of(path)), durability=process)
    assert not [name for name in image_of(path) if "/image-" in name or "/journal-" in name]
    for image in images:  # killed in between: it goes on from its files, as it was
        again = recovered(restore(image, tmp_path / "again"), durability=process)
        assert state_of(again) == STATES[-1]
    storage = recovered(path, durability=STEP)  # and forward again
    assert state_of(storage) == STATES[-1]
    assert state_of(recovered(scrambled_at(path, tmp_path / "last"), boot=OtherStart)) == STATES[-1]


def journal_of(path: Path) -> Path:
    """The longest segment that the newest image needs."""
    return max((path / TABLE).glob("journal-*"), key=lambda segment: segment.stat().st_size)


def told_story(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole story in one segment."""
    monkeypatch.setattr(image_files, "IMAGE_AT_BYTES_MIN", 1 << 30)
    go_on(recovered(restore({}, path)))


def test_a_journal_with_a_part_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_story(tmp_path / "store", monkeypatch)
    segment = journal_of(tmp_path / "store")
    data = segment.read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b"SWT1", at)]
    assert len(starts) == 1 + len(STORY)  # a mark, and each change
    for gone, what in ((0, "does not begin with a mark"), (1, "goes on with change 2; expected 1")):
        segment.write_bytes(data[: starts[gone]] + data[starts[gone + 1] :])
        path = scrambled_at(tmp_path / "store", tmp_path / "again")
        with pytest.raises(StorageError, match=what) as caught:
            recovered(path, boot=OtherStart)
        assert str(path / TABLE) in str(caught.value)
    for number, start in enumerate(starts[1:]):  # cut off: what was never synced
        for cut in (start, start + 7, start + 150):
            segment.write_bytes(data[:cut])
            path = scrambled_at(tmp_path / "store", tmp_path / "again")
            assert state_of(recovered(path, boot=OtherStart)) in STATES[number : number + 2]
    segment.write_bytes(data)


def test_an_image_newer_than_its_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may be of changes that nobody knows of any more."""
    path = tmp_path / "store"
    storage = recovered(restore({}, path))
    take_seats(storage)
    monkeypatch.setattr(storage._journaling, "wants_image", True)
    steps = iter(range(len(STORY)))

    def one() -> bool:
        number = next(steps)
        apply(storage, STORY[number], number + 1)
        return False

    for _ in range(3):
        one()
    storage.make_image(one)
    assert next(steps) > 4
    segment = journal_of(path)
    data = segment.read_bytes()
    second = data.index(b"SWT1", 4)
    segment.write_bytes(data[:second])
    with pytest.raises(StorageError, match=r"it ends with change 3; the image has [5-9]"):
        recovered(scrambled_at(path, tmp_path / "again"), boot=OtherStart)


class Failing:
    """A call of the system that fails while `error_number` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, part: str) -> None:
        self.error_number = 0
        real = getattr(os, name)

        def call(file: int, *given: object) -> object:
            if self.error_number and part in os.readlink(f"/proc/self/fd/{file}"):
                raise OSError(self.error_number, os.strerror(self.error_number))
            return real(file, *given)

        monkeypatch.setattr(os, name, call)


def test_a_change_that_cannot_be_journaled_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Failing(monkeypatch, "pwritev", "/journal-")
    path = restore({}, tmp_path / "store")
    storage = recovered(path)
    take_seats(storage)
    for number, step in enumerate(STORY):
        full.error_number = errno.ENOSPC
        with pytest.raises(StorageError, match=r"journal-.*free space"):
            apply(storage, step, number + 1)
        full.error_number = 0
        assert state_of(storage) == STATES[number]
        apply(storage, step, number + 1)
        assert state_of(storage) == STATES[number + 1]
        again = scrambled_at(path, tmp_path / "again")
        assert state_of(recovered(again, boot=OtherStart)) == STATES[number + 1]


def test_a_sync_that_failed_is_made_good_by_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a lost page the kernel tells once; to ask again and believe it would be a lie."""
    failing = Failing(monkeypatch, "fdatasync", "/journal-")
    path = restore({}, tmp_path / "store")
    storage = recovered(path)
    take_seats(storage)
    apply(storage, STORY[0], 1)
    failing.error_number = errno.EIO
    with pytest.raises(StorageError, match=r"journal-\d+: syncing it failed"):
        storage.make_durable()
    with pytest.raises(StorageError, match="making an image failed"):
        storage.make_image(lambda: False)
    asked = {path.name for path in (path / TABLE).glob("journal-*")}
    failing.error_number = 0
    with pytest.raises(StorageError, match="syncing it failed"):
        storage.make_durable()
    again = recovered(restore(image_of(path), tmp_path / "again"))  # a process that finds it so
    again.make_durable()
    storage.make_image(lambda: False)
    storage.make_durable()
    (image,) = standing_images(image_of(path))
    for segment in (path / TABLE).glob("journal-*"):
        assert segment.name.rpartition("-")[2] >= image.rpartition("-")[2]
        assert segment.name not in asked  # which the disk has lost pages of
    lost = scrambled_at(path, tmp_path / "lost")
    assert state_of(recovered(lost, boot=OtherStart)) == STATES[1]


def test_images_that_fail_leave_the_journal_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Failing(monkeypatch, "posix_fallocate", "/image-")
    path = restore({}, tmp_path / "store")
    storage = recovered(path)
    take_seats(storage)
    apply(storage, STORY[0], 1)
    monkeypatch.setattr(storage._journaling, "wants_image", True)
    full.error_number = errno.ENOSPC
    for _ in range(5):
        with pytest.raises(StorageError, match="free space"):
            storage.make_image(lambda: False)
    assert len(list((path / TABLE).glob("journal-*"))) <= 3
    assert not list((path / TABLE).glob("image-*.new"))
    lost = scrambled_at(path, tmp_path / "lost")
    assert state_of(recovered(lost, boot=OtherStart)) == STATES[1]
    full.error_number = 0
    storage.make_image(lambda: True)  # the shard stops
    assert not list((path / TABLE).glob("image-*.new"))
    storage.make_image(lambda: False)
    lost = scrambled_at(path, tmp_path / "lost")
    assert state_of(recovered(lost, boot=OtherStart)) == STATES[1]


def test_an_image_verifies_no_row_that_is_being_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half changed, it would be taken for damaged."""
    path = restore({}, tmp_path / "store")
    tell(recovered(path))
    storage = recovered(path)
    verify, found = storage.verify, []

    def checked(places: Places) -> None:
        found.append(storage._lock.locked())  # type: ignore[attr-defined]
        verify(places)

    monkeypatch.setattr(storage, "verify", checked)
    monkeypatch.setattr(storage._journaling, "wants_image", True)
    storage.make_image(lambda: False)
    assert found
    assert all(found)


def test_without_an_image_what_is_damaged_is_refused(tmp_path: Path) -> None:
    process = Durability("process")
    storage = recovered(restore({}, tmp_path / "store"), durability=process)
    tell(storage)
    image = image_of(tmp_path / "store")
    for name in sorted(MAPPED):
        contents = image[f"{TABLE}/{name}"] or b""
        torn = {**image, f"{TABLE}/{name}": b"\x5a" * len(contents)}
        path = restore(torn, tmp_path / "again")

        def use(path: Path = path) -> State:
            found = recovered(path, boot=OtherStart, durability=process)
            found.verify(np.arange(found.record.row_used))
            return state_of(found)

        with pytest.raises(StorageError, match="damaged"):
            use()
    assert state_of(recovered(restore(image, tmp_path / "again"), boot=OtherStart)) == STATES[-1]


@contextlib.contextmanager
def served(path: Path) -> Iterator[str]:
    config = ShardConfig(shard_index=0, shard_count=1, durability=STEP)
    with DataDir(path, config) as claimed, ShardServer(config, claimed) as server:
        yield server.address


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_table_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """What was answered to workers is there, and they go on at the step that they were at."""
    synced = Synced(monkeypatch)
    first, second = tmp_path / "first", tmp_path / "second"
    ids = np.arange(0, 90, 3)
    gradients = np.arange(ids.size * 4, dtype=np.float32).reshape(-1, 4)

    def opened(target: str, stack: contextlib.ExitStack) -> list[shardwell.Table]:
        """Of two workers."""
        return [
            stack.enter_context(
                stack.enter_context(shardwell.connect(target, worker_id=f"w{number}")).table(
                    "t",
                    row_count=50_000,
                    dim=4,
                    optimizer=shardwell.SGD(learning_rate=1.0, momentum=0.5),
                    initializer=shardwell.Uniform(low=-1, high=1, seed=7),
                    worker_count=2,
                    codec="fp32",
                    mode=mode,
                )
            )
            for number in range(2)
        ]

    with contextlib.ExitStack() as stack:
        tables = opened(stack.enter_context(served(first)), stack)
        for step in range(4):
            for number, table in enumerate(tables):
                assert table.put_row_gradients(ids + number, gradients * step) == step
        tables[0].put_row_gradients(ids + 2, gradients)  # sync: in an open step's sums
        expected = tables[0].get_rows(np.arange(100))
        sizes = {os.path.relpath(name, first): size for name, size in synced.sizes.items()}
        restore(Written("", 0, image_of(first), sizes).after_power_loss(), second)
        tables[1].put_row_gradients(ids + 3, gradients)
        following = tables[0].get_rows(np.arange(100))
    boot = json.loads((second / "boot.json").read_text())
    (second / "boot.json").write_text(json.dumps({**boot, "boot_id": "another start"}))
    with contextlib.ExitStack() as stack:
        tables = opened(stack.enter_context(served(second)), stack)
        assert [table.next_step for table in tables] == [5, 4]
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), expected)
        tables[1].put_row_gradients(ids + 3, gradients)
        np.testing.assert_array_equal(tables[0].get_rows(np.arange(100)), following)


def test_a_gradient_that_cannot_be_journaled_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Failing(monkeypatch, "pwritev", "/journal-")
    with (
        served(tmp_path / "first") as target,
        shardwell.connect(target, worker_id="w0", timeout_s=20) as client,
        client.table(
            "t",
            row_count=50_000,
            dim=4,
            optimizer=shardwell.SGD(learning_rate=1.0),
            initializer=shardwell.Zeros(),
            codec="fp32",
        ) as table,
    ):
        ones = np.ones((3, 4), np.float32)
        table.put_row_gradients([1, 2, 3], ones)
        full.error_number = errno.ENOSPC
        with pytest.raises(StorageError, match=r"journal-.*free space"):
            table.put_row_gradients([3, 4, 5], ones)
        np.testing.assert_array_equal(table.get_rows([1, 2, 3, 4, 5])[:, 0], [-1, -1, -1, 0, 0])
        np.testing.assert_array_equal(table.row_ids(), [1, 2, 3])
        full.error_number = 0
        table.put_row_gradients([3, 4, 5], ones)
        np.testing.assert_array_equal(table.get_rows([1, 2, 3, 4, 5])[:, 0], [-1, -1, -2, -1, -1])
        np.testing.assert_array_equal(table.row_ids(), [1, 2, 3, 4, 5])

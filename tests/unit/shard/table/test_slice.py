"""Goal: a part of a gradient counts whole or not at all, and no call reads half a row.

Method: messages made by protobuf and NumPy go to a table of a Shard in memory; storages that fail
at a chosen call stand in for disks. The orders of calls are test_slice_machine.py's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.data.sessions import contributor, enter, session_of, shared_parts
from harness.polling import PATIENCE_S
from harness.stories.crash import SameMachine
from harness.threads import together
from harness.wire_client.row_messages import answered, asking, part
from shardwell.errors import (
    DivergedError,
    LimitError,
    NonFiniteError,
    StorageError,
    WorkersMissingError,
)
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.rows import RowCodec
from shardwell_server.shard.deadline import NotYet, RequestDeadline
from shardwell_server.shard.quotas import ByteBudget, OwnedBytes, Usage
from shardwell_server.shard.table.index import HashRowIndex
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store.contract import TableLayout, TableStorage
from shardwell_server.store.memory import MemoryStore
from shardwell_server.store.mmap.store import MmapStore

OPTIMIZERS = [
    shardwell.SGD(learning_rate=0.5, momentum=0.9),
    shardwell.Adagrad(learning_rate=0.5, initial_accumulator=0.25),
    shardwell.RowWiseAdagrad(learning_rate=0.5),
    shardwell.Adam(learning_rate=0.5),
    shardwell.FTRL(learning_rate=0.5),
]
SPEC = TableSpec(
    name="t",
    row_count=1000,
    dim=2,
    optimizer=shardwell.SGD(learning_rate=1.0),
    initializer=shardwell.Zeros(),
    worker_count=1,
    codec="fp32",
)


def deadline() -> RequestDeadline:
    return RequestDeadline(0.0)


class Uncommitted:
    """A change whose journal can't be written."""

    def __init__(self, change: Any) -> None:
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._change, name)

    def commit(self, *what: Any) -> None:
        raise StorageError("can't write the journal", table="t")


class FailingTable:
    """A storage that raises at a chosen change or reservation, as a full or damaged disk does."""

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self.changes_left: int | None = None
        self.is_full = False
        self.cant_commit = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def reserve(self, row_count: int, at_most: int | None = None) -> None:
        if self.is_full:
            raise StorageError("no space left", table="t")
        self._storage.reserve(row_count, at_most)

    @contextlib.contextmanager
    def change(self, places: Any, **which: bool) -> Iterator[Any]:
        if self.changes_left is not None:
            if self.changes_left == 0:
                raise StorageError("row 3 was damaged", table="t")
            self.changes_left -= 1
        with self._storage.change(places, **which) as change:
            yield Uncommitted(change) if self.cant_commit else change


def table_of(
    *,
    batch: int = 100,
    stored_bytes_max: int = 2**30,
    path: Path | None = None,
    **fields: Any,
) -> tuple[TableSlice, FailingTable, ByteBudget]:
    """A table whose changes have at most `batch` rows, in memory or on files."""
    spec = dataclasses.replace(SPEC, **fields)
    layout = TableLayout(
        name="t",
        dim=spec.dim,
        slot_widths=spec.slot_widths,
        row_capacity=1000,
        rows_per_change_max=batch,
        with_sum=spec.worker_count > 1,
    )
    store = MemoryStore() if path is None else MmapStore(path, boot=SameMachine(path))
    storage, stored = FailingTable(store.create(layout)), ByteBudget(stored_bytes_max)
    made = TableSlice(
        spec,
        storage,  # type: ignore[arg-type]
        OwnedBytes(stored, Usage("")),
        shared_parts(),
    )
    return made, storage, stored


def give(
    table: TableSlice, step: int, gradients: dict[int, Any], worker: str = "w0", **options: Any
) -> bool:
    message = part(step, options.pop("index", 0), gradients, worker=worker, **options)
    enter(table, worker)
    return table.contribute(
        contributor(worker), message.gradient, np.frombuffer(message.payload, np.uint8), deadline()
    )


def get(table: TableSlice, *ids: int, min_version: int = 0) -> list[list[float]]:
    message = asking(list(ids), min_version)
    payload = np.frombuffer(message.payload, np.uint8)
    answer = table.rows_message(message.fetch, payload, deadline())
    values, _ = answered(answer, table.spec.dim, list(ids))
    return values.tolist()


@pytest.mark.parametrize("worker_count", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_a_row_that_comes_again_begins_anew(optimizer, worker_count) -> None:
    """Weights, state and count: it goes the way of a row that was never there."""
    table, storage, _ = table_of(
        optimizer=optimizer,
        worker_count=worker_count,
        initializer=shardwell.Uniform(low=-1, high=1, seed=3),
    )
    rounds = [{1: [1, 2], 2: [3, 4]}, {1: [5, -6], 2: [0.5, 3]}]
    seen = []
    for _ in range(2):
        for gradients in rounds:
            for worker in range(worker_count):
                give(table, table.version, gradients, f"w{worker}")
        seen.append(get(table, 1, 2))
        assert table.evict(table.version) == 2
        assert table.describe(9).row_count == 0
    assert seen[0] == seen[1]
    assert storage.record.row_used == 2  # the places served again


@pytest.mark.parametrize("worker_count", [1, 2])
def test_rows_of_the_open_step_are_not_evicted(worker_count) -> None:
    table, _, _ = table_of(worker_count=worker_count)
    for worker in range(worker_count):
        give(table, 0, {1: [1, 1], 2: [1, 1]}, f"w{worker}")
    give(table, 1, {2: [1, 1]}, ends=False)
    assert table.evict(99) == 1
    give(table, 1, {3: [1, 1]}, index=1)
    for worker in range(1, worker_count):
        give(table, 1, {2: [1, 1]}, f"w{worker}")
    assert get(table, 1, 2) == [[0, 0], [-2, -2]]


@pytest.mark.parametrize("on_files", [False, True])
def test_no_reader_sees_half_a_row(tmp_path, on_files) -> None:
    """All columns of a row change alike; so a row with two values would be a torn one."""
    dim, row_count, step_count = 512, 256, 60
    table, _, _ = table_of(dim=dim, batch=row_count, path=tmp_path if on_files else None)
    ids = np.arange(row_count)
    codec = RowCodec.of(table.spec)
    context = checksum.context(checksum.Kind.ROW_GRADIENTS, table.spec.name, "w0")
    is_done = threading.Event()

    def write() -> int:
        try:
            for step in range(step_count):
                header = pb.ExchangeRowsRequest()
                header.gradient.step, header.gradient.sample_count = step, 1
                header.gradient.end_of_step = True
                ones = np.ones((row_count, dim), np.float32)
                start = checksum.row_gradients(context, header.gradient)
                sealed = codec.encode(header, header.gradient.rows, ids, ones, start=start)
                message = pb.ExchangeRowsRequest.FromString(sealed)
                payload = np.frombuffer(message.payload, np.uint8)
                table.contribute(contributor("w0"), message.gradient, payload, deadline())
        finally:
            is_done.set()
        return step_count

    def read() -> int:
        message, count = asking(list(range(row_count))), 0
        payload = np.frombuffer(message.payload, np.uint8)
        while not is_done.is_set():
            answer = table.rows_message(message.fetch, payload, deadline())
            values, version = answered(answer, dim, ids.tolist())
            assert (values == -version).all()
            count += 1
        return count

    _, *reads = together([write, read, read])
    assert min(reads) > 0


def test_a_step_closes_batch_by_batch() -> None:
    table, storage, _ = table_of(worker_count=2, batch=3)
    for worker, sign in (("a", 1), ("b", 3)):
        for index, ids in enumerate(([1, 2, 3], [4, 5, 6], [7, 8])):
            gradients = {row_id: [sign * row_id, sign] for row_id in ids}
            give(table, 0, gradients, worker, index=index, ends=index == 2)
    assert table.version == 1
    assert get(table, 1, 8) == [[-2, -2], [-16, -2]]
    assert not storage.has_sum[:8].any()


@pytest.mark.parametrize("batch_count", range(4))
def test_a_step_goes_on_closing_where_it_was_cut_off(batch_count) -> None:
    """The next call gets the reason, or closes it; no row is updated twice."""
    table, storage, _ = table_of(worker_count=2, batch=2)
    ids = range(1, 8)
    for worker in ("a", "b"):
        for index in range(4):
            gradients = {row_id: [4, 8] for row_id in ids[2 * index : 2 * index + 2]}
            if (worker, index) == ("b", 3):
                storage.changes_left = 1 + batch_count
                with pytest.raises(StorageError, match="row 3 was damaged"):
                    give(table, 0, gradients, worker, index=index)
            else:
                give(table, 0, gradients, worker, index=index, ends=index == 3)
    assert table.version == 0
    with pytest.raises(StorageError, match="row 3 was damaged"):
        get(table, 1, min_version=1)
    with pytest.raises(StorageError, match="row 3 was damaged"):
        give(table, 1, {}, "a")
    storage.changes_left = None
    assert get(table, 1, min_version=1) == [[-4, -8]]
    assert not give(table, 0, {7: [4, 8]}, "b", index=3)
    assert give(table, 1, {}, "a")
    assert [get(table, row_id) for row_id in ids] == [[[-4, -8]]] * 7


def test_a_waiting_call_gets_the_error_of_a_step_that_can_not_close() -> None:
    """A waiting call gets the same error as the closing one; later it may close the step itself."""
    table, storage, _ = table_of(worker_count=2)
    woken: list[str] = []
    message = asking([1], 1)
    question = message.fetch, np.frombuffer(message.payload, np.uint8)
    waiting = RequestDeadline(60.0, wake=lambda: woken.append("b"))
    give(table, 0, {1: [4, 8]}, "b")
    with pytest.raises(NotYet):
        table.rows_message(*question, waiting)
    storage.changes_left = 1
    with pytest.raises(StorageError, match="row 3 was damaged"):
        give(table, 0, {1: [4, 8]}, "a")
    assert woken == ["b"]
    with pytest.raises(StorageError, match="row 3 was damaged"):
        table.rows_message(*question, waiting)
    storage.changes_left = None
    values, _ = answered(table.rows_message(*question, waiting), table.spec.dim, [1])
    assert values.tolist() == [[-4, -8]]


def test_a_full_disk_changes_no_row() -> None:
    table, storage, stored = table_of(batch=2)
    give(table, 0, {1: [1, 1]})
    before = stored.count
    storage.is_full = True
    with pytest.raises(StorageError, match="no space left"):
        give(table, 1, {1: [1, 1], 2: [1, 1]})
    assert (table.version, get(table, 1, 2), stored.count) == (1, [[-1, -1], [0, 0]], before)
    give(table, 1, {1: [1, 1]}, ends=False)  # what needs no room goes on
    storage.is_full = False
    give(table, 1, {2: [1, 1]}, index=1)
    assert get(table, 1, 2) == [[-2, -2], [-1, -1]]


@pytest.mark.parametrize("worker_count", [1, 2])
def test_what_can_not_be_committed_never_was(worker_count) -> None:
    table, storage, _ = table_of(worker_count=worker_count, batch=2)
    for worker in range(worker_count):
        give(table, 0, {1: [1, 1]}, f"w{worker}")
    storage.cant_commit = True
    for gradients in ({1: [1, 1], 2: [1, 1]}, {}):
        with pytest.raises(StorageError, match="can't write the journal"):
            give(table, 1, gradients)
    with pytest.raises(StorageError, match="can't write the journal"):
        table.evict(1)
    storage.cant_commit = False
    assert get(table, 1, 2) == [[-1, -1], [0, 0]]
    for worker in range(worker_count):
        give(table, 1, {2: [1, 1], 3: [1, 1]}, f"w{worker}")
    assert get(table, 1) + get(table, 2, 3) == [[-1, -1]] * 3
    assert table.describe(9).row_count == 3


@pytest.mark.parametrize("worker_count", [1, 2])
def test_rows_that_the_index_has_no_memory_for_never_were(monkeypatch, worker_count) -> None:
    table, _, _ = table_of(row_count=None, worker_count=worker_count)
    for worker in range(worker_count):
        give(table, 0, {1: [1, 1]}, f"w{worker}")
    add = HashRowIndex.add

    def of_some(self: HashRowIndex, ids: Any, places: Any) -> None:
        add(self, ids[:1], places[:1])
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(HashRowIndex, "add", of_some)
        with pytest.raises(MemoryError):
            give(table, 1, {2: [1, 1], 3: [1, 1]})
    assert get(table, 1, 2, 3) == [[-1, -1], [0, 0], [0, 0]]
    for worker in range(worker_count):
        give(table, 1, {3: [1, 1], 4: [2, 2]}, f"w{worker}")
    assert get(table, 1, 2, 3, 4) == [[-1, -1], [0, 0], [-1, -1], [-2, -2]]


def test_room_for_rows_counts_when_it_is_made() -> None:
    size = 4 * 2 + 40  # two values, and what is kept about a row
    table, _, stored = table_of(stored_bytes_max=3 * size)
    give(table, 0, {1: [1, 1], 2: [1, 1]})
    assert stored.count == 2 * size
    with pytest.raises(LimitError, match="stored_bytes_max=144: table 't' needs 96 bytes"):
        give(table, 1, {3: [1, 1], 4: [1, 1]})
    assert stored.count == 2 * size
    assert table.evict(1) == 2
    assert stored.count == 2 * size  # the room stays the table's
    give(table, 1, {3: [1, 1], 4: [1, 1], 5: [1, 1]})
    assert stored.count == 3 * size


def test_a_sum_beyond_float32_is_refused() -> None:
    table, storage, _ = table_of(worker_count=2)
    give(table, 0, {1: [1, 1], 5: [1, 1]}, "a")
    with pytest.raises(NonFiniteError, match=r"sum of step 0.*column 1 of row id 5") as caught:
        give(table, 0, {1: [1, 1], 5: [1, 3e38]}, "b", samples=2**24)
    assert caught.value.element_index == 3
    assert storage.record.contribution_count == 1
    give(table, 0, {1: [3, 3], 5: [1, 1]}, "b")
    assert get(table, 1, 5) == [[-2, -2], [-1, -1]]


@pytest.mark.parametrize("samples", [1, 2**24])
@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_a_mean_that_float32_holds_does_not_overflow(worker_count, samples) -> None:
    table, _, _ = table_of(worker_count=worker_count)
    for worker in range(worker_count):
        give(table, 0, {1: [3e38, -3e38]}, f"w{worker}", samples=samples)
    np.testing.assert_allclose(get(table, 1), [[-3e38, 3e38]], rtol=1e-6)


LARGE = {"RowWiseAdagrad": "row_sum", "Adagrad": "sum", "Adam": "exp_avg_sq", "FTRL": "z"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("fields", [{"worker_count": 2}, {"mode": "async", "worker_count": 0}, {}])
def test_a_row_gradient_that_state_can_not_take_is_refused(optimizer, fields) -> None:
    """It would freeze its row: a step of 0 for ever after. The next one counts instead."""
    table, storage, _ = table_of(optimizer=optimizer, **fields)
    if fields.get("worker_count") == 2:
        give(table, 0, {1: [1, 1], 5: [1, 1]}, "a")
    name = LARGE[type(optimizer).__name__]
    words = rf"gradient of 'b', table 't'.*'{name}' of row id 5, column"
    with pytest.raises(NonFiniteError, match=words) as caught:
        give(table, 0, {1: [1, 1], 5: [1, 1e20]}, "b")
    assert caught.value.table == "t"
    assert caught.value.element_index == (2 if name == "row_sum" else 3)
    give(table, 0, {1: [1, 1], 5: [1, 1]}, "b")
    assert all(np.isfinite(slot[: storage.record.row_used]).all() for slot in storage.slots)
    np.testing.assert_array_equal(*get(table, 1, 5))


def test_a_gradient_that_weighs_nothing_may_be_of_any_size() -> None:
    table, _, _ = table_of(worker_count=2, optimizer=shardwell.Adagrad(learning_rate=0.5))
    give(table, 0, {1: [1, 1]}, "a")
    give(table, 0, {1: [1e38, 1e38]}, "b", samples=0)
    assert get(table, 1) == [[-0.5, -0.5]]


def test_rows_that_diverged_are_named() -> None:
    table, _, _ = table_of()
    for step in range(2):
        give(table, step, {1: [1, 1], 7: [1, 3e38]})
    assert get(table, 1) == [[-2, -2]]
    with pytest.raises(DivergedError, match=r"version 2.*column 1 of row id 7") as caught:
        get(table, 1, 7)
    assert caught.value.element_index == -1  # a place in a message says nothing to the caller
    assert caught.value.table == "t"


@pytest.mark.parametrize("worker_count", [1, 2])
def test_what_is_not_finite_goes_through_where_it_may(worker_count) -> None:
    table, _, _ = table_of(worker_count=worker_count, allow_non_finite=True)
    for worker in range(worker_count):
        give(table, 0, {1: [np.nan, np.inf]}, f"w{worker}")
    np.testing.assert_array_equal(get(table, 1), [[np.nan, -np.inf]])


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"])
def test_a_slice_takes_rows_of_all_codecs(codec) -> None:
    table, _, _ = table_of(codec=codec, dim=64)
    rows, ids = RowCodec.of(table.spec), np.arange(0, 60, 2)
    gradients = np.tile(np.float32([2.0**-10, 3.0]), (30, 32))
    header = pb.ExchangeRowsRequest(gradient=pb.RowGradients(end_of_step=True, sample_count=1))
    context = checksum.context(checksum.Kind.ROW_GRADIENTS, table.spec.name, "w0")
    start = checksum.row_gradients(context, header.gradient)
    message = pb.ExchangeRowsRequest.FromString(
        rows.encode(header, header.gradient.rows, ids, gradients, start=start)
    )
    assert message.gradient.rows.lz4 == codec.endswith("lz4")
    payload = np.frombuffer(message.payload, np.uint8)
    assert table.contribute(contributor("w0"), message.gradient, payload, deadline())
    fetch = asking(ids.tolist())
    payload = np.frombuffer(fetch.payload, np.uint8)
    answer = pb.ExchangeRowsResponse.FromString(
        table.rows_message(fetch.fetch, payload, deadline())
    )
    payload = np.frombuffer(answer.payload, np.uint8)
    start = checksum.rows_answer(
        checksum.context(checksum.Kind.ROWS_ANSWER, table.spec.name), ids, answer.version
    )
    opened = rows.open(answer.rows, payload, start=start, with_ids=False, with_values=True)
    found = np.empty((30, 64), np.float32)
    rows.decode(opened, found)
    np.testing.assert_array_equal(found, -gradients)


def test_a_wait_ends_with_who_is_missing() -> None:
    table, _, _ = table_of(worker_count=3)
    give(table, 0, {1: [1, 1]}, "a")
    table.join("b", session_of("b").number)
    with pytest.raises(WorkersMissingError, match="missing of 3 workers: 'b' and 1 that never"):
        give(table, 1, {}, "a")


def test_a_call_that_waits_for_a_failed_scan_gets_the_reason() -> None:
    table, _, _ = table_of()
    with table.scan.under_way(1, lambda: True) as snapshot:
        assert snapshot is not None
        with pytest.raises(NotYet):
            table.scan.check_begun(snapshot, RequestDeadline(PATIENCE_S))
        snapshot.drop(StorageError("the spool is gone"))
        with pytest.raises(StorageError, match="the spool is gone"):
            table.scan.check_begun(snapshot, deadline())

"""Goal: what the gradient accumulator answers, in memory and in a file, and what it refuses.

Method: both kinds go through the same tests. Oracle: `np.add.at` in float64.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.data.memory import at_byte
from harness.stories.images import in_memory
from shardwell.errors import ArgumentError, ClosedError, NonFiniteError, StorageError
from shardwell_server import MmapGradientAccumulator
from shardwell_server.accumulator import accumulator as gradient_accumulator

ROW_COUNT = 300
Make = Callable[..., MmapGradientAccumulator]


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as path:
        yield path


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[MmapGradientAccumulator] = []

    def new(dim: int, max_rows: int = ROW_COUNT, **options: Any) -> MmapGradientAccumulator:
        path = tmp_path / str(len(made)) if request.param == "file" else None
        made.append(MmapGradientAccumulator(path, dim, max_rows, **options))
        return made[-1]

    yield new
    for accumulator in made:
        accumulator.close()


def all_sums(accumulator: MmapGradientAccumulator) -> np.ndarray:
    return np.array([accumulator.get_grad(row) for row in range(accumulator.row_count)])


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("rows_per_lock", [1, 64, 10**6])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_sums_and_apply_are_those_of_the_oracle(
    make: Make, dim: int, rows_per_lock: int, dtype: type
) -> None:
    rng = np.random.default_rng(dim)
    accumulator = make(dim, rows_per_lock=rows_per_lock)
    expected = np.zeros((ROW_COUNT, dim))
    for _ in range(4):
        ids = rng.zipf(1.3, 200) % ROW_COUNT
        gradients = rng.standard_normal((200, dim)).astype(dtype)
        accumulator.accumulate_rows(ids, gradients)
        np.add.at(expected, ids, gradients.astype(np.float32).astype(np.float64))
        row = int(rng.integers(ROW_COUNT))
        accumulator.accumulate(row, gradients[0])
        expected[row] += gradients[0].astype(np.float32)
    np.testing.assert_allclose(all_sums(accumulator), expected, rtol=1e-5, atol=1e-5)
    touched = np.flatnonzero(expected.any(axis=1))
    assert accumulator.touched_rows().tolist() == touched.tolist()
    weights = rng.standard_normal((ROW_COUNT, dim)).astype(np.float32)
    before = weights.copy()
    assert accumulator.apply(0.25, weights) == touched.size
    np.testing.assert_allclose(weights, before - 0.25 * expected, rtol=1e-5, atol=1e-5)
    untouched = np.setdiff1d(np.arange(ROW_COUNT), touched)
    np.testing.assert_array_equal(weights[untouched], before[untouched])
    assert accumulator.touched_rows().size == 0
    assert not all_sums(accumulator).any()
    assert accumulator.apply(0.25, weights) == 0


def test_after_apply_a_row_starts_from_nothing(make: Make) -> None:
    accumulator = make(2)
    weights = np.zeros((ROW_COUNT, 2), np.float32)
    for count in (3, 1):
        for _ in range(count):
            accumulator.accumulate(5, np.ones(2, np.float32))
        assert accumulator.get_grad(5).tolist() == [count, count]
        accumulator.apply(1.0, weights)
    assert weights[5].tolist() == [-4.0, -4.0]


def test_a_row_of_zeros_counts_as_touched(make: Make) -> None:
    accumulator = make(2)
    accumulator.accumulate(5, np.zeros(2, np.float32))
    assert accumulator.touched_rows().tolist() == [5]
    assert accumulator.apply(1.0, np.zeros((ROW_COUNT, 2), np.float32)) == 1


def test_zero_grad_forgets_all_sums(make: Make) -> None:
    accumulator = make(3)
    accumulator.accumulate_rows(np.arange(0, ROW_COUNT, 7), np.ones((43, 3), np.float32))
    accumulator.zero_grad()
    assert accumulator.touched_rows().size == 0
    assert not all_sums(accumulator).any()
    accumulator.accumulate(7, np.ones(3, np.float32))
    assert accumulator.get_grad(7).tolist() == [1, 1, 1]
    accumulator.zero_grad()
    accumulator.zero_grad()


def test_get_grad_is_a_copy(make: Make) -> None:
    accumulator = make(2)
    for row in (5, 6):
        accumulator.get_grad(row)[:] = 9
    accumulator.accumulate(5, np.ones(2, np.float32))
    taken = accumulator.get_grad(5)
    taken[:] = 9
    accumulator.accumulate(5, np.ones(2, np.float32))
    assert accumulator.get_grad(5).tolist() == [2, 2]
    assert taken.tolist() == [9, 9]


def test_the_gradient_that_was_passed_is_the_callers(make: Make) -> None:
    accumulator = make(2)
    gradients = np.ones((3, 2), np.float32)
    gradients.flags.writeable = False
    for ids in ([1, 2, 3], [3, 1, 3]):
        accumulator.accumulate_rows(ids, gradients)
    changed = np.ones(2, np.float32)
    accumulator.accumulate(9, changed)
    changed[:] = 5
    assert accumulator.get_grad(9).tolist() == [1, 1]
    assert accumulator.get_grad(3).tolist() == [3, 3]


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint16, np.uint64, ">i4"])
def test_any_integer_dtype_and_shape(make: Make, kind: Any) -> None:
    accumulator = make(2)
    ids = np.array([[3, 1, 3], [100, 2, 0]]).astype(kind)
    gradients = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    accumulator.accumulate_rows(ids[:, ::2], gradients[:, ::2])
    assert accumulator.get_grad(3).tolist() == [0 + 4, 1 + 5]
    assert accumulator.get_grad(np.int16(100)).tolist() == [6, 7]
    assert accumulator.touched_rows().tolist() == [0, 3, 100]
    accumulator.accumulate(np.uint64(0), np.ones(2, np.float32))
    assert accumulator.get_grad(0).tolist() == [11, 12]


def test_arrays_at_odd_addresses(make: Make) -> None:
    accumulator = make(2)
    ids, gradients = np.array([3, 1, 3]), np.arange(6, dtype=np.float32).reshape(3, 2)
    accumulator.accumulate_rows(at_byte(1, ids), at_byte(3, gradients))
    accumulator.accumulate(1, at_byte(5, gradients[2]))
    assert accumulator.get_grad(3).tolist() == [4, 6]
    assert accumulator.get_grad(1).tolist() == [6, 8]


@pytest.mark.parametrize("ids", [[], np.zeros(0, np.int32), np.zeros((0, 4), np.uint8)])
def test_an_empty_batch_is_nothing(make: Make, ids: Any) -> None:
    accumulator = make(2)
    accumulator.accumulate_rows(ids, np.zeros((*np.shape(ids), 2), np.float32))
    assert accumulator.touched_rows().size == 0


def test_a_batch_of_several_blocks(make: Make) -> None:
    """Rows of 64 KiB: eight are a block."""
    dim, rng = 16384, np.random.default_rng(0)
    accumulator = make(dim, 30)
    ids = rng.integers(0, 30, 50)
    gradients = rng.integers(-9, 9, (50, dim)).astype(np.float32)
    expected = np.zeros((30, dim))
    for part in (slice(0, 20), slice(20, 50)):
        accumulator.accumulate_rows(ids[part], gradients[part])
        np.add.at(expected, ids[part], gradients[part])
    np.testing.assert_array_equal(all_sums(accumulator), expected)
    weights = np.zeros((30, dim), np.float32)
    assert accumulator.apply(2.0, weights) == np.unique(ids).size
    np.testing.assert_array_equal(weights, -2 * expected)


def test_sums_beyond_float32_are_refused_and_change_nothing(make: Make) -> None:
    dim = 16384
    accumulator = make(dim, 30)
    large = np.full((20, dim), 3e38, np.float32)
    accumulator.accumulate_rows(np.arange(10, 30), large)
    before = all_sums(accumulator)
    with pytest.raises(NonFiniteError, match=r"sum of row 10 would be inf in column 0") as caught:
        accumulator.accumulate_rows(np.arange(20), large)  # row 10 is in the second block
    assert caught.value.element_index == -1
    with pytest.raises(NonFiniteError, match=r"gradients of row 3 add up to inf in column 0"):
        accumulator.accumulate_rows([3, 4, 3], large[:3])
    np.testing.assert_array_equal(all_sums(accumulator), before)
    assert accumulator.touched_rows().tolist() == [*range(10, 30)]
    accumulator.accumulate_rows(np.arange(20), -large)
    assert not accumulator.get_grad(10).any()


def test_a_product_beyond_float32_is_refused(make: Make) -> None:
    accumulator = make(2)
    weights = np.zeros((ROW_COUNT, 2), np.float32)
    accumulator.accumulate_rows([4, 5], np.array([[1, 1], [1, 3e38]], np.float32))
    with pytest.raises(NonFiniteError, match=r"row 5: learning_rate .* inf in column 1") as caught:
        accumulator.apply(10.0, weights)
    assert caught.value.element_index == 11
    assert not weights.any()
    assert accumulator.apply(0.5, weights) == 2
    assert weights[4].tolist() == [-0.5, -0.5]


BAD_ROWS = [-1, ROW_COUNT, 2**70, 1.0, True, None, "1", np.float32(1), np.bool_(True), [1]]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_refused(make: Make, row: Any) -> None:
    accumulator = make(2)
    with pytest.raises(ArgumentError, match="row_id must be"):
        accumulator.accumulate(row, np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match="row_id must be"):
        accumulator.get_grad(row)
    assert accumulator.touched_rows().size == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1, -2], "got -1 at place 1"),
        ([1, 2, ROW_COUNT], f"from 0 to {ROW_COUNT - 1}; got {ROW_COUNT} at place 2"),
        (np.array([1, 2**63 + 5, 3], np.uint64), "got 9223372036854775813 at place 1"),
        ([1.0, 2.0, 3.0], "must be integers; got float64"),
        ([True, False, True], "must be integers; got bool"),
        ([1, 2, 2**70], "must be integers; got object"),
        ([1, None, 2], "must be integers; got object"),
        ("abc", "must be integers; got"),
        (np.zeros(0, np.float32), "must be integers; got float32"),
        ([1, 2], r"shape \(2, 2\), that of row_ids \(2,\) and dim; got \(3, 2\)"),
        ([[1, 2, 3]], r"shape \(1, 3, 2\)"),
    ],
)
def test_bad_batches_are_refused(make: Make, ids: Any, message: str) -> None:
    accumulator = make(2)
    with pytest.raises(ArgumentError, match=message):
        accumulator.accumulate_rows(ids, np.ones((3, 2), np.float32))
    assert accumulator.touched_rows().size == 0


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.ones(3, np.float32), "must have 2 elements; got 3"),
        (np.ones(2, np.int32), "must be float32 .* got int32"),
        (["a", "b"], "must be"),
        ([1.0, 2.0, 3.0], "must have 2 elements; got 3"),
        (np.ones(2, np.complex64), "got complex64"),
        (np.array([1, np.nan]), r"gradient of row 1: element 1 is nan"),
        (np.array([-np.inf, 1], np.float16), r"element 0 is -inf"),
        (np.array([1, 1e39]), r"element 1 is 1e\+39, which is not a finite float32"),
    ],
)
def test_bad_gradients_are_refused(make: Make, gradient: Any, message: str) -> None:
    accumulator = make(2)
    with pytest.raises(ArgumentError, match=message):
        accumulator.accumulate(1, gradient)
    assert accumulator.touched_rows().size == 0


def test_the_first_bad_value_of_a_batch_is_named(make: Make) -> None:
    accumulator = make(2)
    gradients = np.ones((3, 2))
    gradients[1, 1] = gradients[2, 0] = np.nan
    with pytest.raises(NonFiniteError, match="gradients: element 3 is nan") as caught:
        accumulator.accumulate_rows([5, 5, 5], gradients)
    assert caught.value.element_index == 3
    with pytest.raises(ArgumentError, match="gradients must"):
        accumulator.accumulate_rows([1], [["a", "b"]])
    with pytest.raises(ArgumentError, match=r"gradients must have shape \(3, 2\)"):
        accumulator.accumulate_rows([1, 2, 3], np.ones((2, 3), np.float32))
    assert accumulator.touched_rows().size == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones((ROW_COUNT, 3), np.float32), "writable C-contiguous float32"),
        (np.ones((2, ROW_COUNT), np.float32), r"rows must have shape \(300, 2\); got \(2, 300\)"),
        (np.ones((ROW_COUNT, 2)), "writable C-contiguous float32"),
        (np.ones((2, ROW_COUNT), np.float32).T, "writable C-contiguous float32"),
        (np.broadcast_to(np.float32(1), (ROW_COUNT, 2)), "writable C-contiguous float32"),
        ([[1.0, 2.0]], "writable C-contiguous float32"),
    ],
)
def test_bad_rows_to_apply_to_are_refused(make: Make, rows: Any, message: str) -> None:
    accumulator = make(2)
    accumulator.accumulate(1, np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match=message):
        accumulator.apply(0.5, rows)
    assert accumulator.touched_rows().tolist() == [1]


@pytest.mark.parametrize("rate", [np.nan, np.inf, -1.0, "0.1", None, 1e39])
def test_bad_learning_rates_are_refused(make: Make, rate: Any) -> None:
    accumulator = make(2)
    accumulator.accumulate(1, np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match="learning_rate"):
        accumulator.apply(rate, np.ones((ROW_COUNT, 2), np.float32))
    assert accumulator.touched_rows().tolist() == [1]


def test_sizes_may_be_numpy_integers(make: Make) -> None:
    accumulator = make(np.int32(5), np.int64(7))
    assert (accumulator.dim, accumulator.row_count) == (5, 7)
    assert not accumulator.was_recovered


def test_what_is_closed_is_closed(make: Make) -> None:
    accumulator = make(2)
    accumulator.close()
    accumulator.close()
    weights = np.zeros((ROW_COUNT, 2), np.float32)
    calls: list[Callable[[], object]] = [
        lambda: accumulator.accumulate(1, weights[0]),
        lambda: accumulator.accumulate_rows([1], weights[:1]),
        lambda: accumulator.apply(0.1, weights),
        accumulator.zero_grad,
        lambda: accumulator.get_grad(1),
        accumulator.touched_rows,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed; open another"):
            call()


def test_the_example_runs() -> None:
    found = doctest.testmod(gradient_accumulator)
    assert found.attempted >= 5
    assert found.failed == 0


# The file of a gradient accumulator: where sums are, who may open it, what it takes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "dim must be an integer from 1 to 65536"),
        ((65537, 5), "dim must be"),
        ((2.0, 5), "dim must be"),
        ((2, 0), "max_rows must be"),
        ((2, True), "max_rows must be"),
        ((2, 5, 0), "rows_per_lock must be"),
        ((2, 5, "1"), "rows_per_lock must be"),
        ((65536, 2**40), "max_rows x dim is too large"),
    ],
)
def test_bad_sizes_are_refused(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MmapGradientAccumulator(tmp_path / "sums", *arguments)
    assert not [*tmp_path.iterdir()]


def test_where_the_file_has_a_sum(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 5, ROW_COUNT) as accumulator:
        for row in (0, 1, ROW_COUNT - 1):
            values = np.arange(5, dtype=np.float32) + row
            accumulator.accumulate(row, values)
            offset = accumulator.grad_offset(np.int32(row))
            assert offset is not None
            with path.open("rb") as file:
                file.seek(offset)
                assert file.read(20) == values.tobytes()
        assert accumulator.grad_offset(-1) is None
        assert accumulator.grad_offset(ROW_COUNT) is None
        with pytest.raises(ArgumentError, match="row_id must be an integer"):
            accumulator.grad_offset(1.0)  # type: ignore[arg-type]
    with MmapGradientAccumulator(None, 5, ROW_COUNT) as accumulator:
        assert accumulator.grad_offset(1) is None


def test_a_file_that_was_closed_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "sums")
    for count in range(1, 4):
        with MmapGradientAccumulator(path, 3, 40, recover=False) as accumulator:
            assert not accumulator.was_recovered
            accumulator.accumulate_rows([39, 7], np.ones((2, 3), np.float32))
            assert accumulator.get_grad(39).tolist() == [count] * 3
            assert accumulator.touched_rows().tolist() == [7, 39]
            assert not accumulator.get_grad(8).any()


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    MmapGradientAccumulator(path, 3, 40).close()
    before = path.read_bytes()
    for dim, max_rows in ((4, 40), (3, 41), (40, 3)):
        message = f"has 40 rows of 3 values; expected max_rows={max_rows}, dim={dim}"
        with pytest.raises(StorageError, match=message):
            MmapGradientAccumulator(path, dim, max_rows)
    assert path.read_bytes() == before


def test_a_file_is_one_accumulators_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 3, 40) as accumulator:
        with pytest.raises(StorageError, match="in use by another accumulator"):
            MmapGradientAccumulator(path, 3, 40)
        accumulator.accumulate(1, np.ones(3, np.float32))
    with MmapGradientAccumulator(path, 3, 40) as accumulator:
        assert accumulator.touched_rows().tolist() == [1]


def test_a_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing is no directory; make it first"):
        MmapGradientAccumulator(tmp_path / "missing" / "sums", 3, 40)


def test_a_large_table_takes_what_it_touches(tmp_path: Path) -> None:
    path = tmp_path / "sums"
    with MmapGradientAccumulator(path, 64, 10_000_000) as accumulator:
        accumulator.accumulate_rows(np.arange(0, 10_000_000, 1_000_000), np.ones((10, 64)))
        assert path.stat().st_size > 2**31
        assert path.stat().st_blocks * 512 < 2**21
    with MmapGradientAccumulator(path, 64, 10_000_000) as accumulator:
        assert accumulator.touched_rows().size == 10
        assert path.stat().st_blocks * 512 < 2**21

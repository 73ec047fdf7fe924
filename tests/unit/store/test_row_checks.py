"""Goal: the check of a row tells it from every row that damage could make of it.

Method: flipped bytes of every kind in drawn rows, rows alone and in batches. Oracle: the formula of
store/row_checks.py in Python's integers, and checks of an earlier day, which files have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell.numerics import native
from shardwell_server.store.contract import FREE, TableLayout
from shardwell_server.store.row_checks import RowChecks, _ArrayHash, _Words

SALT = 0x12345678


def layout(dim: int = 5, slot_widths: tuple[int, ...] = (5, 1)) -> TableLayout:
    return TableLayout(
        name="t",
        dim=dim,
        slot_widths=slot_widths,
        row_capacity=100,
        rows_per_change_max=8,
        with_sum=True,
    )


def some_rows(n: int, dim: int = 5, slot_widths: tuple[int, ...] = (5, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    ints = [rng.integers(-(2**63), 2**63 - 1, n) for _ in range(3)]
    floats = [rng.standard_normal((n, width)).astype(np.float32) for width in (dim, *slot_widths)]
    return [*ints, *floats]


@pytest.fixture(params=["native", "NumPy"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of computing: files that one of them wrote are read by the other."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "LIBRARY", None)


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("width", [1, 3, 64, 65, 8192, 8193, 20_000])
def test_products_are_exact(width: int) -> None:
    """All bytes as large as they get, too; pieces of a row are found again in its words."""
    hashed = _ArrayHash(width, _Words(SALT, "x"))
    rng = np.random.default_rng(width)
    rows = np.concatenate(
        [np.full((1, 4 * width), 255, np.uint8), rng.integers(0, 256, (3, 4 * width), np.uint8)]
    )
    expected = [0] * 4
    words = _Words(SALT, "x")
    for start in range(0, 4 * width, 1 << 15):
        size = min(1 << 15, 4 * width - start)
        factors = np.maximum(words.take(-(-4 * size // 8)).view(np.uint8)[: 4 * size], 1)
        first, second = (int(constant) for constant in words.odd(2))
        for number, row in enumerate(rows):
            part = row[start : start + size].astype(np.int64)
            d = [int(part @ column.astype(np.int64)) for column in factors.reshape(4, size)]
            x, y = d[0] + (d[1] << 32), d[2] + (d[3] << 32)
            expected[number] += first * x + second * y
    found = hashed.of(rows.view(np.float32))
    assert [int(check) for check in found] == [value % 2**64 for value in expected]


@pytest.mark.skipif(native.LIBRARY is None, reason="this process has no native code")
@pytest.mark.parametrize(
    "changed",
    [
        {"stride": 0},
        {"stride": 7},
        {"start": 9},
        {"start": 2**64 - 4},
        {"size": 9},
        {"size": 2**64 - 1},
        {"factors": np.ones(31, np.int16)},
        {"factors": np.ones(65, np.uint8)[1:]},
        {"sums": np.zeros(11, np.uint32)},
        {"sums": np.zeros(49, np.uint8)[1:]},
    ],
)
def test_native_code_refuses_rows_that_do_not_fit(changed: dict[str, Any]) -> None:
    assert native.LIBRARY is not None
    rows, factors = np.ones((3, 8), np.uint8), np.ones((4, 8), np.int16)
    fits = {"rows": rows, "stride": 8, "start": 0, "size": 8, "factors": factors,
            "sums": np.zeros((3, 4), np.uint32)}  # fmt: skip
    assert native.LIBRARY.hash_rows(*fits.values()) == 0
    assert (fits["sums"] == 8).all()
    assert native.LIBRARY.hash_rows(*{**fits, **changed}.values()) < 0


def test_checks_of_files_that_are_there() -> None:
    """A change of these needs another format version of files."""
    checks = RowChecks(layout(), SALT)
    places = np.array([3, 70])
    rows = [np.array([1, -2]), np.array([7, FREE]), np.array([9, 0])]
    weights = np.arange(10, dtype=np.float32).reshape(2, 5)
    values = checks.of_values(places, *rows, weights, -weights, weights[:, :1].copy())
    sums = checks.of_sums(places, np.array([True, False]), weights)
    keys = checks.of_keys(places, *rows[:2])
    assert [hex(check) for check in [*values, *sums, *keys]] == [
        "0x3531e0013f1e6e51",
        "0xcae5e55c6656943c",
        "0x2c1d84267663e38",
        "0x42d495edeae03c4e",
        "0x8d80dc8bb756a58",
        "0x689dbad0b7ff6d2f",
    ]


@settings(max_examples=200)
@given(data=st.data())
def test_any_damage_of_one_byte_or_of_two_is_found(data: st.DataObject) -> None:
    checks, places = RowChecks(layout(), SALT), np.array([3, 4, 90])
    rows = some_rows(3)
    before = checks.of_values(places, *rows)
    array = data.draw(st.sampled_from(rows))
    size = array[1:2].nbytes
    view = array.view(np.uint8).reshape(3, size)
    flips = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.integers(1, 255), min_size=1, max_size=2)
    )
    for offset, flip in flips.items():
        view[1, offset] ^= flip
    np.testing.assert_array_equal(
        checks.of_values(places, *rows) == before, [True, False, True], err_msg=str(flips)
    )


def test_signs_and_halves_that_change_together_are_found() -> None:
    """Sums modulo 2^64 of whole words would not see two flipped signs."""
    checks, places = RowChecks(layout(64, (64, 1)), SALT), np.arange(1)
    rows = some_rows(1, 64, (64, 1))
    found = {int(checks.of_values(places, *rows)[0])}
    count = 1
    for first in range(64):
        for second in range(first):
            rows[3][0, [first, second]] *= -1
            found.add(int(checks.of_values(places, *rows)[0]))
            rows[3][0, [first, second]] *= -1
            count += 1
    rows[3][0] = np.roll(rows[3][0], 1)
    found.add(int(checks.of_values(places, *rows)[0]))
    rows[3], rows[4] = rows[4], rows[3]
    found.add(int(checks.of_values(places, *rows)[0]))
    rows[3][:], rows[4][:] = 0, 0
    found.add(int(checks.of_values(places, *rows)[0]))
    assert len(found) == count + 3


def test_a_row_is_believed_only_in_its_place_and_table() -> None:
    rows = some_rows(8)
    places = np.arange(8)
    mine, other = RowChecks(layout(), SALT), RowChecks(layout(), SALT + 1)
    sums = rows[3]
    has_sum = np.ones(8, np.bool_)
    for of in (
        lambda checks, at: checks.of_values(at, *rows),
        lambda checks, at: checks.of_keys(at, *rows[:2]),
        lambda checks, at: checks.of_sums(at, has_sum, sums),
        lambda checks, at: checks.of_no_sums(at),
    ):
        assert (of(mine, places) != of(other, places))[1:].all()
        assert (of(mine, places) != of(mine, places + 1)).all()


def test_sums_count_where_there_are_some() -> None:
    checks, places, sums = RowChecks(layout(), SALT), np.arange(3), some_rows(3)[3]
    flags = np.array([True, False, True])
    before = checks.of_sums(places, flags, sums)
    np.testing.assert_array_equal(before == checks.of_no_sums(places), ~flags)
    sums += 1
    np.testing.assert_array_equal(checks.of_sums(places, flags, sums) == before, ~flags)
    damaged = np.array([3, 2, 1], np.uint8).view(np.bool_)
    assert (checks.of_sums(places, damaged, sums) != checks.of_sums(places, flags, sums))[:2].all()


def test_keys_and_whether_there_is_a_row() -> None:
    checks, places = RowChecks(layout(), SALT), np.zeros(4, np.int64)
    keys = np.array([5, 5, 6, -(2**63)])
    counts = np.array([1, FREE, 1, 1])
    assert len({int(check) for check in checks.of_keys(places, keys, counts)}) == 4
    np.testing.assert_array_equal(
        checks.of_keys(places, keys, counts)[0], checks.of_keys(places, keys, counts + 5)[0]
    )


@given(n=st.integers(0, 9))
def test_checks_do_not_depend_on_the_batch(n: int) -> None:
    checks, rows = RowChecks(layout(), SALT), some_rows(n)
    places = np.arange(n) * 7
    together = checks.of_values(places, *rows)
    turned = np.arange(n)[::-1].copy()
    np.testing.assert_array_equal(
        checks.of_values(places[turned], *(array[turned] for array in rows)), together[turned]
    )
    for number in range(n):
        part = slice(number, number + 1)
        alone = checks.of_values(places[part], *(array[part] for array in rows))
        assert alone[0] == together[number]

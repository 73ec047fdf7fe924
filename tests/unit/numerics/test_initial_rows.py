"""Goal: rows that do not exist yet have the values that table.proto says, and these look random.

Method: the .proto's text again, value by value, in Python's integers and floats, bit for bit;
Python's own logarithm and inverse of the normal distribution, closely; then statistics over many
rows, with bounds of five standard deviations for seeds that are fixed.
"""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell import Initializer, Normal, Uniform, Zeros
from shardwell.errors import ArgumentError
from shardwell.numerics.initial_rows import _inverse_normal, _log, initial_rows

FLOAT32_MAX = float(np.finfo(np.float32).max)
EXTREMES = [-(2**63), -1, 0, 1, 2**63 - 1]
KINDS = [
    Zeros(),
    Uniform(),
    Uniform(low=-3.0, high=7.5, seed=2**64 - 1),
    Uniform(low=0.1, high=0.1, seed=5),
    Uniform(low=-FLOAT32_MAX, high=FLOAT32_MAX, seed=1),
    Normal(),
    Normal(mean=2.0, std=3.0, seed=12345),
    Normal(mean=-1.0, std=0.0),
]

A = (3.3871327179, 50.434271938, 159.29113202, 59.109374720)
B = (1.0, 17.895169469, 78.757757664, 67.187563600)
C = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103)
D = (1.0, 0.73700164250, 0.12021132975)


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def u_of(seed: int, key: int, column: int) -> float:
    s = mix((mix((seed + 0x9E3779B97F4A7C15) % 2**64) + key) % 2**64)
    x = ((s % 2**32) + column * 0x9E3779B9) % 2**32 ^ (s >> 32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
    x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
    x = x ^ (x >> 15)
    return ((x >> 8) + 0.5) / 2**24


def polynomial(coefficients: tuple[float, ...], x: float) -> float:
    found = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        found = found * x + coefficient
    return found


def log_of(x: float) -> float:
    f, e = math.frexp(x)
    if f < 0.7071067811865476:
        f, e = 2 * f, e - 1
    t = (f - 1) / (f + 1)
    y, p = t * t, 1 / 19
    for k in range(17, 0, -2):
        p = p * y + 1 / k
    return e * 0.6931471805599453 + (2 * t) * p


def ppnd7(u: float) -> float:
    q = u - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * polynomial(A, r) / polynomial(B, r)
    r = math.sqrt(-log_of(0.5 - abs(q))) - 1.6
    return math.copysign(polynomial(C, r) / polynomial(D, r), q)


def value_of(initializer: Initializer, key: int, column: int) -> np.float32:
    match initializer:
        case Uniform() as o:
            return np.float32(o.low + (o.high - o.low) * u_of(o.seed, key, column))
        case Normal() as o:
            return np.float32(o.mean + o.std * ppnd7(u_of(o.seed, key, column)))
    return np.float32(0.0)


def expected(initializer: Initializer, keys: list[int], dim: int) -> np.ndarray:
    rows = [[value_of(initializer, key, column) for column in range(dim)] for key in keys]
    return np.array(rows, np.float32).reshape(len(keys), dim)


def inverse_normal(u: np.ndarray) -> np.ndarray:
    return _inverse_normal(u.copy(), *np.empty((2, u.size)))


@pytest.mark.parametrize("initializer", KINDS)
def test_values_are_those_of_the_proto(initializer: Initializer) -> None:
    keys = [*EXTREMES, *range(2, 60), *range(2**40, 2**40 + 20)]
    found = initial_rows(initializer, np.array(keys), 31)
    assert found.dtype == np.float32
    assert found.tobytes() == expected(initializer, keys, 31).tobytes()


@settings(deadline=None, max_examples=60)
@given(
    initializer=st.one_of(
        st.builds(Uniform, seed=st.integers(0, 2**64 - 1)),
        st.builds(Normal, seed=st.integers(0, 2**64 - 1)),
    ),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    dim=st.integers(1, 9),
)
def test_any_seed_and_key(initializer: Initializer, keys: list[int], dim: int) -> None:
    found = initial_rows(initializer, np.array(keys, np.int64), dim)
    assert found.tobytes() == expected(initializer, keys, dim).tobytes()


@pytest.mark.parametrize("initializer", KINDS)
@pytest.mark.parametrize(("row_count", "dim"), [(3000, 16), (3, 20_000), (2, 65_536)])
def test_rows_do_not_depend_on_those_beside_them(
    initializer: Initializer, row_count: int, dim: int
) -> None:
    """Beyond the blocks in which they are computed, too."""
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, row_count)
    together = initial_rows(initializer, keys, dim)
    for row in range(0, row_count, max(row_count // 40, 1)):
        alone = initial_rows(initializer, keys[row : row + 1], dim)
        assert together[row].tobytes() == alone[0].tobytes()
    assert initial_rows(initializer, keys[::-1].copy(), dim).tobytes() == together[::-1].tobytes()
    narrow = initial_rows(initializer, keys, 3)
    assert narrow.tobytes() == together[:, :3].tobytes()


@pytest.mark.parametrize("initializer", KINDS)
def test_rows_are_written_into_what_is_given(initializer: Initializer) -> None:
    keys = np.array([5, 3, 5])
    room = np.full((5, 4), np.nan, np.float32)
    assert initial_rows(initializer, keys, 4, out=room[1:4]).base is room
    assert room[1:4].tobytes() == expected(initializer, [5, 3, 5], 4).tobytes()
    assert np.isnan(room[[0, 4]]).all()
    assert keys.tolist() == [5, 3, 5]


@pytest.mark.parametrize("initializer", KINDS)
def test_no_rows_to_draw_are_no_error(initializer: Initializer) -> None:
    assert initial_rows(initializer, np.empty(0, np.int64), 4).shape == (0, 4)


def test_the_logarithm_is_the_logarithm() -> None:
    random = np.random.default_rng(1)
    x = np.concatenate(
        [np.arange(1, 2**25, 5077) / 2**25, random.uniform(0, 0.1, 5000), np.exp2(-np.arange(40.0))]
    )
    want = np.array([math.log(value) for value in x])
    np.testing.assert_allclose(_log(x), want, rtol=1e-15, atol=3e-16)
    assert _log(x).tolist() == [log_of(value) for value in x.tolist()]


def test_the_inverse_of_the_normal_distribution_is_that() -> None:
    normal = NormalDist()
    ends = np.arange(1, 4001, 2) / 2**25
    u = np.concatenate([ends, np.arange(1, 2**25, 20_002) / 2**25, 1 - ends])
    want = np.array([normal.inv_cdf(value) for value in u])
    found = inverse_normal(u)
    np.testing.assert_allclose(found, want, rtol=2e-7, atol=1e-9)
    assert found.tolist() == [ppnd7(value) for value in u.tolist()]


def test_values_stay_within_their_bounds() -> None:
    wide = initial_rows(Uniform(low=-FLOAT32_MAX, high=FLOAT32_MAX), np.arange(2000), 64)
    assert np.isfinite(wide).all()
    ends = np.array([2.0**-25, 1 - 2.0**-25])
    assert np.abs(inverse_normal(ends)).max() < 5.5
    with pytest.raises(ArgumentError, match=r"Uniform.low and high must be at most 3.40282e\+38"):
        Uniform(low=0.0, high=3.5e38)
    with pytest.raises(ArgumentError, match=r"\|mean\| \+ 6 \* std must be at most 3.40282e\+38"):
        Normal(mean=-1e38, std=1e38)


# Statistics, over these.
ROWS, DIM = 20_000, 32
COUNT = ROWS * DIM
STRIDES = [1, 2, 7, 2**16, 2**32, 2**48]


def uniform(seed: int = 0, stride: int = 1) -> np.ndarray:
    """Values in (-1, 1), as float64."""
    keys = np.arange(ROWS) * np.int64(stride)
    return initial_rows(Uniform(low=-1.0, high=1.0, seed=seed), keys, DIM).astype(np.float64)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of what independent values have."""
    return float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1] * math.sqrt(a.size))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("stride", STRIDES)
def test_uniform_values_are_uniform(seed: int, stride: int) -> None:
    values = uniform(seed, stride)
    deviation = 1 / math.sqrt(3 * COUNT)
    assert abs(values.mean()) < 5 * deviation
    assert abs(values.var() - 1 / 3) < 5 * math.sqrt(4 / 45 / COUNT)
    bins, _ = np.histogram(values, 256, (-1.0, 1.0))
    chi_square = ((bins - COUNT / 256) ** 2 / (COUNT / 256)).sum()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    assert -1.0 <= values.min() < -1 + 1e-4
    assert 1.0 >= values.max() > 1 - 1e-4
    by_column, by_row = values.mean(axis=0), values.mean(axis=1)
    assert np.abs(by_column).max() < 5.5 / math.sqrt(3 * ROWS)
    assert np.abs(by_row).max() < 6 / math.sqrt(3 * DIM)


@pytest.mark.parametrize("stride", STRIDES)
def test_neighbours_have_nothing_to_do_with_each_other(stride: int) -> None:
    values = uniform(7, stride)
    for distance in (1, 2, 3, 16):
        assert abs(correlation(values[distance:], values[:-distance])) < 5
        assert abs(correlation(values[:, distance:], values[:, :-distance])) < 5
        assert abs(correlation(values[distance:, distance:], values[:-distance, :-distance])) < 5
    columns = np.corrcoef(values, rowvar=False) * math.sqrt(ROWS)
    np.fill_diagonal(columns, 0.0)
    assert np.abs(columns).max() < 5


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.pairwise([0, 1, 2, 3, 2**32, 2**63, 2**64 - 1])]
)
def test_seeds_have_nothing_to_do_with_each_other(one: int, other: int) -> None:
    mine, theirs = uniform(one), uniform(other)
    assert abs(correlation(mine, theirs)) < 5
    assert abs(correlation(mine[1:], theirs[:-1])) < 5
    assert abs(correlation(mine[:-1], theirs[1:])) < 5


def test_values_repeat_as_seldom_as_by_chance() -> None:
    """Up to 2^23, float32 holds x + 0.5 exactly."""
    rows = initial_rows(Uniform(low=0.0, high=2.0**24), np.arange(ROWS), DIM)
    low = rows[rows < 2**23]
    repeats = low.size - np.unique(low).size
    by_chance = low.size + 2**23 * math.expm1(-low.size / 2**23)
    assert abs(repeats - by_chance) < 5 * math.sqrt(by_chance)
    assert np.unique(rows, axis=0).shape == (ROWS, DIM)


@pytest.mark.parametrize("stride", STRIDES)
def test_normal_values_are_normal(stride: int) -> None:
    keys = np.arange(ROWS) * np.int64(stride)
    values = initial_rows(Normal(mean=3.0, std=2.0, seed=9), keys, DIM).astype(np.float64)
    values = (values - 3.0) / 2.0
    assert abs(values.mean()) < 5 / math.sqrt(COUNT)
    assert abs(values.var() - 1.0) < 5 * math.sqrt(2 / COUNT)
    assert abs((values**3).mean()) < 5 * math.sqrt(15 / COUNT)
    assert abs((values**4).mean() - 3.0) < 5 * math.sqrt(96 / COUNT)
    beyond = (np.abs(values) > 3.0).mean()
    assert abs(beyond - 0.0026998) < 5 * math.sqrt(0.0027 / COUNT)
    assert 4.0 < np.abs(values).max() < 5.5

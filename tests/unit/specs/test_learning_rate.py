"""Goal: a GroupedRate is a float that knows its factors, in comparisons and copies, too."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

import shardwell
from shardwell.specs.learning_rate import RATE_GROUP_COUNT_MAX, factors_of, rate_of

RATE = shardwell.GroupedRate(0.1, [1.0, 0.3])


def test_it_is_a_float_with_factors_of_float32() -> None:
    assert float(RATE) == 0.1
    assert f"{RATE:g}" == "0.1"
    assert RATE * 2 == 0.2
    assert RATE.factors[0] == 1.0
    assert RATE.factors[1] == pytest.approx(0.3, rel=1e-7)
    assert RATE.factors[1] != 0.3
    assert factors_of(RATE) == RATE.factors
    assert factors_of(0.1) == ()
    assert factors_of(None) == ()
    assert rate_of(0.1, []) == 0.1
    assert rate_of(0.1, [1.0, 0.3]) == RATE
    assert "0.1, [1.0, 0.3" in repr(RATE)


@pytest.mark.parametrize("other", [0.1, shardwell.GroupedRate(0.1, [1.0, 0.5]), None, "0.1"])
def test_another_rate_is_another_one(other: object) -> None:
    for one, two in ((RATE, other), (other, RATE)):
        assert one != two
        assert not one == two  # noqa: SIM201 (each operator has code of its own)


def test_copies_are_equal() -> None:
    for each in (copy.deepcopy(RATE), pickle.loads(pickle.dumps(RATE))):
        assert each == RATE
        assert not each != RATE  # noqa: SIM202
        assert hash(each) == hash(RATE)
        assert each.factors == RATE.factors


@pytest.mark.parametrize(
    "factors", [[], [-1.0], [math.nan], [math.inf], [1e39], [1.0] * (RATE_GROUP_COUNT_MAX + 1)]
)
def test_what_can_be_no_factor(factors: list[float]) -> None:
    with pytest.raises(shardwell.ArgumentError, match="factor"):
        shardwell.GroupedRate(0.1, factors)

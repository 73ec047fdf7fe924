"""Goal: a caller's timeout is the time for which others are waited for, and their answer comes in.

Method: arithmetic on timeouts from the shortest to the longest, and on what is none.
"""

from __future__ import annotations

import math

import pytest

from shardwell.errors import ArgumentError
from shardwell.specs.deadlines import (
    DURATION_S_MAX,
    SHARD_MARGIN_S,
    TIMEOUT_S_MIN,
    check_duration,
    check_timeout,
    less_margin,
    wait_milliseconds,
    with_answer,
)

TIMEOUTS_S = [1e-4, 0.001, 0.02, 0.6, 1.0, 3.9, 4.0, 120.0, 30 * 86400.0]


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_others_are_waited_for_as_long_as_the_caller_says(timeout_s: float) -> None:
    """The answer that names them has two seconds more to come in, or a quarter of a short wait."""
    assert timeout_s <= wait_milliseconds(timeout_s) / 1000 < timeout_s + 0.001
    assert wait_milliseconds(timeout_s) >= 1
    assert with_answer(timeout_s) - timeout_s == pytest.approx(min(2.0, timeout_s / 4))


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_a_shard_answers_before_the_deadline_of_grpc(timeout_s: float) -> None:
    answers_after_s = less_margin(timeout_s, SHARD_MARGIN_S)
    assert timeout_s - answers_after_s == pytest.approx(min(0.25, timeout_s / 4))
    if timeout_s >= 1.0:
        assert less_margin(with_answer(timeout_s), SHARD_MARGIN_S) >= timeout_s


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S_MIN, 1, 2.5, DURATION_S_MAX])
def test_a_timeout_is_a_float(timeout_s: float) -> None:
    checked = check_timeout(timeout_s)
    assert checked == timeout_s
    assert type(checked) is float


@pytest.mark.parametrize(
    "timeout_s",
    [0, 0.0009, -1, DURATION_S_MAX + 1, math.nan, math.inf, -math.inf, True, None, "1", [1.0]],
)
def test_what_is_no_timeout(timeout_s: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"^wait must be a number of seconds from 0\.001 to 2592000;"
    ):
        check_timeout(timeout_s, "wait")


def test_a_duration_may_be_0_and_has_bounds_of_its_own() -> None:
    assert check_duration("pause", 0) == 0.0
    assert check_duration("pause", 3, 3, 3) == 3.0
    with pytest.raises(ArgumentError, match=r"from 1 to 3; got 3\.5"):
        check_duration("pause", 3.5, 1, 3)

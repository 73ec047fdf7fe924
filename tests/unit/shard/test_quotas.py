"""Goal: a token's quota holds, and what it has given back it may use again.

Method: a clock that is set by hand; sums by hand.
"""

from __future__ import annotations

import dataclasses

import pytest

from shardwell.errors import ArgumentError, LimitError
from shardwell_server.shard.quotas import ByteBudget, OwnedBytes, Quota, Usage, Usages


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def usage(clock: Clock | None = None, **quota: int) -> Usage:
    made = Usage("ci", clock or Clock())
    made.quota = Quota(**quota)
    return made


@pytest.mark.parametrize("what", ["stored_bytes", "parameters", "tables", "members", "streams"])
def test_a_count_is_bounded_and_given_back(what) -> None:
    of = usage(**{what: 3})
    of.take(what, 2)
    with pytest.raises(LimitError, match=rf"limit {what}=3: it has 2 .*2 more"):
        of.take(what, 2)
    assert of.count(what) == 2
    assert of.left(what) == 1
    of.take(what)
    of.add(what, -3)
    of.take(what, 3)
    of.quota = Quota(**{what: 1})
    assert of.left(what) == 0
    of.quota = Quota()
    of.take(what, 10**9)
    assert of.left(what) is None


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Quota)])
@pytest.mark.parametrize("value", [-1, 1.5, "5", True, 2**63])
def test_what_is_no_quota(name, value) -> None:
    with pytest.raises(ArgumentError, match=f"quota {name} must be"):
        Quota(**{name: value})


def test_a_rate_holds_over_time() -> None:
    clock = Clock()
    of = usage(clock, bytes_per_s=1000)
    assert of.delay_s(1000) == 0.0  # a second's worth at once
    assert of.delay_s(500) == pytest.approx(0.5)
    clock.now_s += 0.5
    assert of.delay_s(500) == pytest.approx(0.5)
    clock.now_s += 100.0
    assert of.delay_s(1000) == 0.0  # and no more, however long it was quiet
    assert of.delay_s(2000) == pytest.approx(2.0)


def test_what_was_done_is_owed_and_no_new_call_is_begun() -> None:
    clock = Clock()
    of = usage(clock, bytes_per_s=1000)
    assert of.delay_s(50_000) == pytest.approx(49.0)
    with pytest.raises(LimitError, match=r"limit bytes_per_s=1000: .* 49 s"):
        of.check_rate()
    clock.now_s += 40.0
    of.check_rate()
    assert of.delay_s(0) == pytest.approx(9.0)
    of.quota = Quota(bytes_per_s=10_000)
    assert of.delay_s(0) == pytest.approx(0.9)


def test_without_a_rate_no_call_waits() -> None:
    of = usage()
    assert of.delay_s(10**15) == 0.0
    of.check_rate()


def test_those_of_names() -> None:
    of = Usages(Clock())
    assert of.of("a", Quota(streams=1)) is of.of("a")
    assert of.of("a").quota.streams == 1
    of.set_quotas({"a": Quota(streams=2), "b": Quota(tables=1)})
    assert of.of("a").quota.streams == 2
    assert of.of("b").quota.tables == 1


def test_names_that_use_nothing_are_forgotten() -> None:
    clock = Clock()
    of = Usages(clock)
    kept = of.of("kept")
    kept.take("members")
    clock.now_s += 10.0
    for number in range(10_000):
        of.of(f"jwt:{number}")
        clock.now_s += 2.0
    assert of.of("kept") is kept
    assert len(of._by_name) <= 4096


def test_bytes_of_an_owner_and_of_all() -> None:
    all_, of = ByteBudget(100), usage(stored_bytes=60)
    owned, others = OwnedBytes(all_, of), OwnedBytes(all_, Usage("other"))
    owned.take(50, "it needs {}", "no")
    assert owned.left_bytes == 10
    with pytest.raises(LimitError, match="token 'ci'"):
        owned.take(11, "it needs {}", "no")
    others.take(45, "it needs {}", "no")
    assert owned.left_bytes == 5
    with pytest.raises(LimitError, match="limit stored_bytes_max=100: it needs 6 beside the 95"):
        owned.take(6, "it needs {}", "no")
    assert (all_.count, of.count("stored_bytes")) == (95, 50)
    owned.add(-50)
    assert (all_.count, of.count("stored_bytes")) == (45, 0)

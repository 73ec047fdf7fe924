"""Goal: each fragment is due once in sync_every inner steps, and the order can't deadlock.

Method: schedules of all small sizes, counted out; orders against a plain sort.
"""

from __future__ import annotations

import pytest

from shardwell import ArgumentError
from shardwell.outer.schedule import Schedule, due_fragment


def test_every_interval_has_one_offer_which_is_taken_at_its_end() -> None:
    for fragment_count in (1, 2, 3, 4):
        for interval in (1, 2, 5):
            for overlap in range(interval):
                schedule = Schedule(
                    sync_every=interval * fragment_count,
                    fragment_count=fragment_count,
                    overlap=overlap,
                )
                assert schedule.interval == interval
                offers = [n for n in range(1, 6 * interval + 1) if schedule.offers_after(n)]
                taken = [n + overlap for n in offers]
                assert taken == [interval * (n + 1) for n in range(len(offers))]


def test_fragments_are_due_in_turn() -> None:
    steps, order = [0, 0, 0], []
    for _ in range(7):
        order.append(due_fragment(steps))
        steps[order[-1]] += 1
    assert order == [0, 1, 2, 0, 1, 2, 0]


def test_a_learner_that_missed_some_gives_first_what_is_behind() -> None:
    assert due_fragment([5, 5, 4, 4]) == 2  # a newcomer goes on behind the others
    assert due_fragment([4, 5, 4, 4]) == 0
    assert due_fragment([8, 5, 5, 5]) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 10, "fragment_count": 4}, r"multiple of the 4 fragments.*8 or 12"),
        ({"sync_every": 3, "fragment_count": 4}, r"sync_every=4, or another"),
        ({"sync_every": 0, "fragment_count": 1}, r"sync_every must be"),
        ({"sync_every": 8, "fragment_count": 4, "overlap": 2}, r"overlap=2.*interval of 2 inner"),
        ({"sync_every": 8, "fragment_count": 4, "overlap": -1}, r"overlap must be"),
        ({"sync_every": 8, "fragment_count": 4, "overlap": 0.5}, r"overlap must be"),
        ({"sync_every": True, "fragment_count": 1}, r"sync_every must be"),
    ],
)
def test_impossible_schedules_are_refused_by_name(options: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Schedule(**options)

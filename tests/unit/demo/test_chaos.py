"""Plans of chaos: drawn from a seed, of each kind something, and never of a worker that is away."""

from __future__ import annotations

import pytest

from shardwell_server.demo.digits.chaos import drawn_plan


@pytest.mark.parametrize("worker_count", [3, 4, 8])
@pytest.mark.parametrize("seed", range(25))
def test_a_plan_is_of_workers_that_can_do_it(seed: int, worker_count: int) -> None:
    plan = drawn_plan(seed, worker_count, 1500)
    assert plan == drawn_plan(seed, worker_count, 1500)
    assert {event.what for event in plan} == {"comes", "leaves", "dies"}
    steps = [event.step for event in plan]
    assert steps == sorted(steps)
    assert steps[0] > 0
    assert steps[-1] < 1500
    here = set(range(worker_count))
    for event in plan:
        if event.what == "comes":
            assert event.worker_index not in here
            here.add(event.worker_index)
        else:
            here.remove(event.worker_index)
        assert 2 <= len(here) <= worker_count + 2


def test_each_seed_draws_another_plan() -> None:
    assert len({tuple(drawn_plan(seed, 4, 1500)) for seed in range(20)}) == 20

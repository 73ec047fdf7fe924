"""Goal: the schedule, and what is sent and taken by it, are those of published runs of torchft.

Method: the algorithm by hand on numbers, with the schedule that is tested. Both replicas do the
same there, so one number is both, and their mean.
"""

from __future__ import annotations

import pytest

from harness.oracles.outer_training import (
    INNER_MOVE,
    LAYERS,
    OUTER_RATE,
    RECOVERY,
    RUNS,
    SYNC_EVERY,
    golden,
)
from shardwell.outer.schedule import Schedule, due_fragment


def run_by_hand(delay: int, alpha: float, step_count: int):
    """Local weights before each inner step, and those of all after each."""
    schedule = Schedule(sync_every=SYNC_EVERY, fragment_count=2, overlap=delay)
    image, local, steps = dict.fromkeys(LAYERS, 1.0), dict.fromkeys(LAYERS, 1.0), [0, 0]
    offers: list[tuple[int, str, float]] = []
    before, shared = {}, {0: dict(image)}
    for number in range(step_count):
        before[number] = dict(local)
        local = {name: value - INNER_MOVE for name, value in local.items()}
        if schedule.offers_after(number + 1):
            fragment = due_fragment(steps)
            name = LAYERS[fragment]
            offers.append((number + 1 + delay, name, image[name] - local[name]))
            steps[fragment] += 1
        while offers and offers[0][0] == number + 1:
            _, name, moved = offers.pop(0)
            image[name] -= OUTER_RATE * moved
            local[name] = (1 - alpha) * image[name] + alpha * local[name]
            shared[number + 1] = dict(image)
    return before, shared


@pytest.mark.parametrize("run", [*RUNS, RECOVERY])
def test_a_run_by_hand_is_the_published_one(run: str) -> None:
    delay, alpha = RUNS.get(run, (0, 0.0))
    expected = golden(run)[0]
    local, shared = run_by_hand(delay, alpha, len(expected.local))
    assert len(expected.local) > 2 * SYNC_EVERY
    assert set(expected.local) == set(local)
    for step, weights in expected.local.items():
        assert local[step] == pytest.approx(weights, abs=1e-6), (run, step)
    assert expected.shared
    for step, weights in expected.shared.items():
        assert shared[step] == pytest.approx(weights, abs=1e-6), (run, step)

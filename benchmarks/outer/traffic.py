"""What a learner sends and receives, beside a synchronous exchange."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from outer.rows import Row
from peers.turns import Crew
from shardwell_server import LocalCluster

SYNC_EVERY, FRAGMENT_COUNT = 50, 2
OUTER_STEP_COUNT, EXCHANGE_COUNT = 4, 4
LEARNER_COUNT = 2
GOAL = 0.011


def learner_command(mode: str, shards: str, name: str, **flags: float) -> list[str]:
    """What starts a learner; `name` is of what it trains."""
    words = [sys.executable, str(Path(__file__).with_name("learner.py"))]
    words += ["--mode", mode, "--shards", shards, "--name", name]
    for flag, value in flags.items():
        words += [f"--{flag.replace('_', '-')}", f"{value:g}"]
    return words


def moved(before: dict[str, Any], after: dict[str, Any], key: str) -> float:
    """What a counter of a learner has counted meanwhile."""
    return float(after[key] - before[key])


def measure() -> list[Row]:
    """By two learners, on this machine; all that would go over a network is counted."""
    flags = {
        "compute_ms": 0,
        "sync_every": SYNC_EVERY,
        "fragments": FRAGMENT_COUNT,
        "overlap": 0,
    }
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(LocalCluster(2, processes=True, same_host="off")).target

        def crew(mode: str) -> Crew:
            command = learner_command(mode, target, mode, **flags)
            return stack.enter_context(Crew([command] * LEARNER_COUNT, LEARNER_COUNT))

        outer = crew("outer")
        first = outer.step(do="settle").reports[0]  # counters alone, as nothing is open
        warm = outer.step(do="train", steps=SYNC_EVERY).reports[0]
        last = outer.step(do="train", steps=SYNC_EVERY * OUTER_STEP_COUNT).reports[0]
        exchange = crew("exchange")
        before = exchange.step(do="train", steps=1).reports[0]
        after = exchange.step(do="train", steps=EXCHANGE_COUNT).reports[0]
    return rows(first, warm, last, before, after)


def rows(
    first: dict[str, Any],
    warm: dict[str, Any],
    last: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
) -> list[Row]:
    """The rows of what one learner has counted.

    Args:
        first: Outer training, after first weights were given and read.
        warm: After the first outer step.
        last: After all others.
        before: Exchanges, after the first.
        after: After all others.
    """
    step_count = SYNC_EVERY * OUTER_STEP_COUNT
    found = []
    for key, goal in (("sent", f"{GOAL:g}"), ("received", "")):
        exchange = moved(before, after, key) / EXCHANGE_COUNT
        steady = moved(warm, last, key) / step_count
        what = f"bytes {key} / synchronous fp16, H={SYNC_EVERY}, int8"
        text = f"{steady / exchange:.5f}: {steady * SYNC_EVERY / 1e6:.1f} MB an outer step"
        found.append(Row(what, goal, f"{text}, {exchange / 1e6:.1f} MB an exchange"))
        whole = last[key] / (step_count + SYNC_EVERY) / exchange
        what = f"bytes {key}, first weights counted in, {OUTER_STEP_COUNT + 1} outer steps"
        found.append(Row(what, "", f"{whole:.5f}: {first[key] / 1e6:.1f} MB before the first step"))
    return found

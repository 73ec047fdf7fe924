"""Workers that come while others make steps of two parameters, one after the other.

A newcomer may wait in one for those who wait for it in the other: the way out is given up and taken
anew, and in the end it is in step with them.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, Stopwatch
from harness.threads import together

SIZE = 200
GRADIENT = np.ones(SIZE, np.float32)


def opened(client: shardwell.Client) -> list[shardwell.Parameter]:
    nets = [
        client.parameter(
            name,
            size=SIZE,
            optimizer=shardwell.SGD(learning_rate=0.001),
            members=shardwell.Elastic(min_count=1, max_count=8),
        )
        for name in ("first", "second")
    ]
    for net in nets:
        net.init(np.zeros(SIZE, np.float32))
    return nets


@pytest.mark.parametrize("pause_s", [0.0, 0.003])
def test_newcomers_get_in_step_with_both(cluster, connect, pause_s: float) -> None:
    running = cluster(2)
    stays = opened(connect(running, "w0"))
    for net in stays:
        net.exchange(GRADIENT)
    for number in (1, 2, 3):
        comes = opened(connect(running, f"w{number}"))
        is_over = threading.Event()

        def others(until: threading.Event = is_over) -> None:
            while not until.is_set():
                for net in stays:
                    net.exchange(GRADIENT)
                until.wait(pause_s)

        def own(nets: Any = comes, until: threading.Event = is_over) -> None:
            watch, in_step = Stopwatch(), 0
            for net in nets:
                net.get_weights()
            try:
                while in_step < 5:
                    assert watch.elapsed_s < PATIENCE_S, [net.outcome for net in nets]
                    for net in nets:
                        net.exchange(GRADIENT)
                    is_whole = all(net.outcome.counted == "all" for net in nets)
                    in_step = in_step + 1 if is_whole else 0
            finally:
                until.set()
                for net in nets:
                    net.leave()

        together([others, own])

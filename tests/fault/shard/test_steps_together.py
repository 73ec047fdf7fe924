"""A loop of several parameters or tables goes on after a kill between the steps of two of them.

Goal: a worker of a fixed crew that gave its step to the first of them, and was killed before it
gave it to the next, goes on with all at that step, and the weights are those of undisturbed
training, bit for bit. Method: worker processes whose gradients depend on the weights of all; one
kills itself between two gradients, and is started again.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.programs import together_worker
from harness.programs.commands import Program
from harness.programs.together_worker import SIZE, Trained, expected

LAST_STEP = 5


def _worker(target: str, index: int, kinds: str, verb: str, *kill: int) -> Program:
    program = str(Path(together_worker.__file__))
    arguments = (str(index), kinds, verb, str(LAST_STEP), *map(str, kill))
    return Program(program, target, *arguments, is_forked=True)


@pytest.mark.parametrize(
    ("kinds", "verb", "kill"),
    [
        ("parameter,parameter", "exchange", (0, 1)),
        ("parameter,parameter", "exchange", (3, 1)),
        ("parameter,parameter", "exchange", (LAST_STEP, 1)),
        ("parameter,table", "exchange", (3, 1)),
        ("table,parameter", "exchange", (3, 1)),
        ("table,table", "exchange", (0, 1)),
        ("parameter,parameter,table", "exchange", (2, 1)),
        ("parameter,table,parameter", "exchange", (2, 2)),
        ("clipped,parameter", "exchange", (3, 1)),
        ("parameter,parameter", "put", (3, 1)),
        ("table,parameter", "put", (3, 1)),
    ],
)
def test_a_worker_killed_between_the_steps_of_two_gives_both(
    cluster, connect, kinds, verb, kill
) -> None:
    running = cluster(2, chunk_size_bytes=64)
    step = kill[0]
    with _worker(running.target, 0, kinds, verb) as steady:
        with _worker(running.target, 1, kinds, verb, *kill) as victim:
            assert victim.end() == -signal.SIGKILL
        with _worker(running.target, 1, kinds, verb) as back:
            count = len(kinds.split(","))
            assert back.read_line() == f"from {[step] * count}", back.log
            assert back.end() == 0, back.log
        assert steady.end() == 0, steady.log
    _check_weights(connect(running, "reader"), kinds)


def test_all_workers_killed_between_the_steps_of_two_give_both(cluster, connect) -> None:
    running, kinds = cluster(2, chunk_size_bytes=64), "parameter,table"
    killed = [_worker(running.target, index, kinds, "exchange", 3, 1) for index in (0, 1)]
    with killed[0], killed[1]:
        assert [each.end() for each in killed] == [-signal.SIGKILL] * 2
    back = [_worker(running.target, index, kinds, "exchange") for index in (0, 1)]
    with back[0], back[1]:
        assert [each.end() for each in back] == [0, 0], [each.log for each in back]
    _check_weights(connect(running, "reader"), kinds)


def test_steps_that_began_apart_stay_apart(cluster, connect) -> None:
    """A worker that is a step further in one by design does not repeat a step."""
    running = cluster(2)
    clients = [connect(running, f"w{index}") for index in (0, 1)]
    both = [[Trained(each, "parameter", number) for number in (0, 1)] for each in clients]
    ones = np.ones(SIZE, np.float32)
    for number in (0, 0, 1):  # the first of the steps is before the loop
        for worker in both:
            worker[number].give(ones, verb="put")
    both[0][0].give(ones, verb="put")  # waits in the first one for the worker that is killed
    back = [Trained(connect(running, "w1"), "parameter", number) for number in (0, 1)]
    assert [each.handle.next_step for each in back] == [2, 1]


def test_a_worker_that_has_given_a_step_keeps_it(cluster, connect) -> None:
    """What it opens anew between its steps of two does not take it back."""
    client = connect(cluster(2), "w0")
    pair = [Trained(client, "parameter", number) for number in (0, 1)]
    pair[0].give(np.ones(SIZE, np.float32), verb="put")
    again = [Trained(client, "parameter", number) for number in (0, 1)]
    assert [each.handle.next_step for each in again] == [1, 0]


def _check_weights(reader: shardwell.Client, kinds: str) -> None:
    found = [Trained(reader, kind, number) for number, kind in enumerate(kinds.split(","))]
    for each, weights in zip(found, expected(len(found), LAST_STEP), strict=True):
        np.testing.assert_array_equal(each.read(), weights)
        assert each.handle.next_step == LAST_STEP + 1

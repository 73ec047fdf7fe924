"""A worker that is sent SIGINT at random instants of its calls.

python interrupted_worker.py KIND TARGET SEED COUNT

Each call is made, and made again after KeyboardInterrupt as the SDK documents, until COUNT calls
were interrupted. Then one call more of each verb must work. Prints what it ends with as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import shardwell
from harness.oracles.int8 import Int8Weights, Int8Worker

SIZE = 60_003
ROW_IDS = np.arange(500)
DIM = 4
CALL_TIMEOUT_S = 30.0
AFTERWARDS_S = 20.0
"""A call after the last interrupt that takes longer than this hangs."""
HANGS_S = 100.0
"""Such a worker takes seconds, on a busy machine some ten."""
SGD = shardwell.SGD(learning_rate=1.0)


class Interrupts:
    """Sends this process SIGINT at random instants of what `during` runs."""

    def __init__(self, seed: int, delay_s_max: float) -> None:
        self.count = 0
        """Calls that were interrupted."""
        self._random = random.Random(seed)
        self._delay_s_max = delay_s_max
        self._is_armed = False
        self._begun = threading.Semaphore(0)
        signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._send, daemon=True).start()

    def during(self, call: Callable[[], object]) -> bool:
        """Whether the call was interrupted; if not, it has ended."""
        try:
            self._is_armed = True
            self._begun.release()
            call()
            self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False
            self.count += 1
            return True
        return False

    def _handle(self, _: int, __: FrameType | None) -> None:
        if self._is_armed:  # between two calls it means nothing
            self._is_armed = False
            raise KeyboardInterrupt

    def _send(self) -> None:
        while True:
            self._begun.acquire()
            time.sleep(self._random.uniform(0.0, self._delay_s_max))
            os.kill(os.getpid(), signal.SIGINT)


def gradient_of(step: int) -> float:
    """What every element of a step's gradient is: whole numbers, whose sums are exact."""
    return float(step % 7 + 1)


def parameters(client: shardwell.Client, interrupts: Interrupts, count: int) -> dict[str, Any]:
    """Steps of a parameter, by `exchange` and by `put_gradient`, and fetches between them."""
    model = client.parameter("m", size=SIZE, optimizer=SGD, codec="fp32")
    model.init(np.zeros(SIZE, np.float32))
    while interrupts.count < count:
        step = model.next_step
        gradient = np.full(SIZE, gradient_of(step), np.float32)
        verb = (model.exchange, model.put_gradient)[step % 2]
        while model.next_step == step and interrupts.during(lambda: verb(gradient)):  # noqa: B023
            pass
        interrupts.during(model.get_weights)
    model.exchange(np.full(SIZE, gradient_of(model.next_step), np.float32))
    weights = model.get_weights(min_version=model.next_step)
    expected = -sum(gradient_of(step) for step in range(model.next_step))
    return {"found": np.unique(weights).tolist(), "expected": [expected]}


def int8(client: shardwell.Client, interrupts: Interrupts, count: int) -> dict[str, Any]:
    """Steps of a parameter in int8: each has the bits of a replay, and so has what is left over."""
    model = client.parameter("m", size=SIZE, optimizer=SGD, codec="int8")
    model.init(np.zeros(SIZE, np.float32))
    worker, weights = Int8Worker(SIZE), Int8Weights(np.zeros(SIZE, np.float32))
    wrong: list[int] = []

    def is_right() -> bool:
        return bool(
            (model.residual == worker.residual).all()
            and (model.get_weights(min_version=model.next_step) == weights.image).all()
        )

    def gradient() -> np.ndarray:
        return np.random.default_rng(model.next_step).standard_normal(SIZE).astype(np.float32)

    while interrupts.count < count:
        step, given = model.next_step, gradient()
        verb = (model.exchange, model.put_gradient)[step % 2]
        while model.next_step == step and interrupts.during(lambda: verb(given)):  # noqa: B023
            pass
        weights.update(weights.weights - worker.sent(given))
        interrupts.during(model.get_weights)
        if not is_right():
            wrong.append(step)
    given = gradient()
    model.exchange(given)
    weights.update(weights.weights - worker.sent(given))
    return {"found": [*wrong, is_right()], "expected": [True]}


def tables(client: shardwell.Client, interrupts: Interrupts, count: int) -> dict[str, Any]:
    """Steps of a table, with and without rows that are fetched."""
    table = client.table(
        "t", row_count=1000, dim=DIM, optimizer=SGD, initializer=shardwell.Zeros(), codec="fp32"
    )
    while interrupts.count < count:
        step = table.next_step
        gradients = np.full((ROW_IDS.size, DIM), gradient_of(step), np.float32)
        verb = (table.exchange_rows, table.put_row_gradients)[step % 2]
        while table.next_step == step and interrupts.during(
            lambda: verb(ROW_IDS, gradients)  # noqa: B023
        ):
            pass
        interrupts.during(lambda: table.get_rows(ROW_IDS))
    table.exchange_rows(
        ROW_IDS, np.full((ROW_IDS.size, DIM), gradient_of(table.next_step), np.float32)
    )
    rows = table.get_rows(ROW_IDS, min_version=table.next_step)
    expected = -sum(gradient_of(step) for step in range(table.next_step))
    return {"found": np.unique(rows).tolist(), "expected": [expected]}


def connections(client: shardwell.Client, interrupts: Interrupts, count: int) -> dict[str, Any]:
    """Clients that are connected, open a parameter, and are closed; a group that is joined."""

    def come_and_go() -> None:
        with shardwell.connect(TARGET, timeout_s=CALL_TIMEOUT_S) as other:
            other.parameter("c", size=SIZE, optimizer=SGD)
            other.status()
        name = f"alone-{interrupts.count}"
        with shardwell.join_group(name, rank=0, size=1, rendezvous=TARGET) as group:
            group.barrier()

    while interrupts.count < count:
        interrupts.during(come_and_go)
    come_and_go()
    client.status()
    deadline_s = time.monotonic() + AFTERWARDS_S
    while (found := _client_thread_count()) > 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return {"found": [found <= 3], "expected": [True]}


def _client_thread_count() -> int:
    return sum(
        thread.name in ("shardwell-client", "shardwell-group") for thread in threading.enumerate()
    )


def checkpoints(client: shardwell.Client, interrupts: Interrupts, count: int) -> dict[str, Any]:
    """Checkpoints that are saved; each directory that exists is complete."""
    model = client.parameter("m", size=SIZE, optimizer=SGD, codec="fp32")
    model.init(np.ones(SIZE, np.float32))
    number = 0
    with tempfile.TemporaryDirectory() as folder:

        def save() -> None:
            client.save_checkpoint(Path(folder) / f"{number}")

        while interrupts.count < count:
            number += 1
            interrupts.during(save)
        number += 1
        save()
        found = [entry.name for entry in Path(folder).iterdir()]
        for name in found:
            shardwell.inspect_checkpoint(Path(folder) / name, verify=True)
        return {
            "found": [name for name in found if not name.isdecimal()],
            "expected": [],
        }


def groups(
    _: shardwell.Client, interrupts: Interrupts, count: int, size: int = 2, threads: int = 1
) -> dict[str, Any]:
    """All-reduces of two ranks, of which the other one is a thread without interrupts.

    It goes on until a sum says that it is the last.
    """
    given: dict[str, Any] = {"rendezvous": TARGET, "codec": "fp32", "threads": threads}
    sums: list[float] = []

    def other() -> None:
        with shardwell.join_group("g", rank=1, size=2, **given) as group:
            array = np.zeros(size, np.float32)
            while array[1] == 0.0:
                array[:] = 1.0
                array[1] = 0.0
                group.all_reduce(array)
                sums.extend({float(array[0]), float(array[2:].min(initial=3.0))})

    beside = threading.Thread(target=other)
    beside.start()
    with shardwell.join_group("g", rank=0, size=2, **given) as group:
        while interrupts.count < count:
            array = np.full(size, 2.0, np.float32)
            array[1] = 0.0
            interrupts.during(lambda: group.all_reduce(array))  # noqa: B023
        array = np.full(size, 2.0, np.float32)
        array[1] = 1.0
        group.all_reduce(array)
        beside.join(AFTERWARDS_S)
    return {
        "found": [array[:2].tolist(), sorted(set(sums)), beside.is_alive()],
        "expected": [[3.0, 1.0], [3.0], False],
    }


def groups_of_threads(
    client: shardwell.Client, interrupts: Interrupts, count: int
) -> dict[str, Any]:
    """The same with chunks that several threads work on."""
    return groups(client, interrupts, count, 2_000_000, 4)


KINDS = {
    "parameters": (parameters, 0.03),
    "int8": (int8, 0.03),
    "tables": (tables, 0.03),
    "connections": (connections, 0.06),
    "checkpoints": (checkpoints, 0.06),
    "groups": (groups, 0.01),
    "groups of threads": (groups_of_threads, 0.03),
}
"""The kinds of work, and the longest that a call may run before it is interrupted, in seconds."""

if __name__ == "__main__":
    KIND, TARGET, SEED, COUNT = sys.argv[1:]
    act, delay_s_max = KINDS[KIND]
    faulthandler.dump_traceback_later(HANGS_S)  # so that the test's report says where
    sender = Interrupts(int(SEED), delay_s_max)
    with shardwell.connect(TARGET, worker_id=f"w{SEED}", timeout_s=CALL_TIMEOUT_S) as connected:
        result = act(connected, sender, int(COUNT))
    print(json.dumps({"interrupts": sender.count, **result}), flush=True)

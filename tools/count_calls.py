"""Counts the functions and modules that one call of the SDK goes through, on client and shard.

SHARDWELL_NATIVE=off python tools/count_calls.py      -v names them, --json prints names alone

In the steady state: one worker, one shard with files, one chunk or message. Properties and helpers
count, on whatever threads. Two kinds are left out: what a thread also enters while nothing is
called, such as the look at files twice a second, and what fewer than half of several calls enter.
So the count is the same on each machine, busy or not, and with each version of Python; it needs
Linux, and to have native code off.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import numpy as np

import shardwell
from shardwell_server import LocalCluster

_CALL_COUNT = 9
_QUIET_S = 0.1
"""For so long nothing more is entered: the call is over, on the shard too."""
_QUIET_WITHIN_S = 10.0

_IDLE_S = 2.0

Function: TypeAlias = tuple[str, str]
"""Its module, and its name there."""
_entered: list[tuple[str, Function]] | None = None
"""With the name of the thread."""


def _note(frame: FrameType, event: str, _: Any) -> None:
    entered = _entered
    if event == "call" and entered is not None:
        code = frame.f_code
        package = frame.f_globals.get("__name__", "")
        is_ours = package.startswith("shardwell") and not package.endswith("_pb2")
        if is_ours and not code.co_name.startswith("<"):
            entered.append((threading.current_thread().name, (package, code.co_qualname)))


def _entered_by(call: Callable[[], object]) -> list[tuple[str, Function]]:
    """The functions entered until none is any more, or for ten seconds."""
    global _entered
    _entered = entered = []
    call()
    deadline_s = time.monotonic() + _QUIET_WITHIN_S
    count = -1
    while count != len(entered) and time.monotonic() < deadline_s:
        count = len(entered)
        time.sleep(_QUIET_S)
    _entered = None
    return entered


def count(call: Callable[[], object]) -> tuple[list[Function], int]:
    """The functions that a call enters, by module and name, and how often it enters one."""
    for _ in range(5):
        call()
    time.sleep(_QUIET_S)
    idle = set(_entered_by(lambda: time.sleep(_IDLE_S)))
    calls = [
        [function for thread, function in _entered_by(call) if (thread, function) not in idle]
        for _ in range(_CALL_COUNT)
    ]
    found = Counter(function for functions in calls for function in dict.fromkeys(functions))
    functions = [each for each in found if found[each] > _CALL_COUNT / 2]
    return functions, int(statistics.median(map(len, calls)))


def counts() -> dict[str, tuple[list[Function], int]]:
    """Those of an exchange, and of a gradient of rows."""
    threading.setprofile(_note)
    sys.setprofile(_note)
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(1, data_dir=directory) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
    ):
        sgd = shardwell.SGD(learning_rate=0.1)
        model = client.parameter("model", size=10, optimizer=sgd)
        model.init(np.zeros(10, np.float32))
        table = client.table("rows", row_count=1000, dim=4, optimizer=sgd)
        ids, gradients = np.arange(5), np.ones((5, 4), np.float32)
        return {
            "exchange": count(lambda: model.exchange(np.ones(10, np.float32))),
            "put_row_gradients": count(lambda: table.put_row_gradients(ids, gradients)),
        }


def main() -> None:
    """Prints them."""
    found = counts()
    if "--json" in sys.argv:
        print(json.dumps({what: functions for what, (functions, _) in found.items()}))
        return
    for what, (functions, call_count) in found.items():
        modules = {module for module, _ in functions}
        print(f"{what}: {len(functions)} functions in {len(modules)} modules, {call_count} calls")
        if "-v" in sys.argv:
            print("\n".join(f"    {module} {name}" for module, name in functions))


if __name__ == "__main__":
    main()

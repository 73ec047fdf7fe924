"""Counts the functions and modules that one call of the SDK goes through, on client and shard.

python tools/count_calls.py      -v names them

In the steady state: one worker, one shard with files, one chunk or message. Properties and helpers
count, and whatever the threads of both do meanwhile, so compare versions, and nothing else.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import shardwell
from shardwell_server import LocalCluster

_entered: list[tuple[str, str]] | None = None
_QUIET_S = 0.5


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and _entered is not None:
        code = frame.f_code
        package = frame.f_globals.get("__name__", "")
        is_ours = package.startswith("shardwell") and not package.endswith("_pb2")
        if is_ours and not code.co_name.startswith("<"):
            _entered.append((package, code.co_qualname))


def count(what: str, call: Callable[[], object]) -> None:
    """Prints what a call enters that was made before."""
    global _entered
    for _ in range(5):
        call()
    time.sleep(_QUIET_S)
    _entered = found = []
    call()
    time.sleep(_QUIET_S)
    _entered = None
    functions = list(dict.fromkeys(found))
    modules = {module for module, _ in functions}
    print(f"{what}: {len(functions)} functions in {len(modules)} modules, {len(found)} calls")
    if "-v" in sys.argv:
        print("\n".join(f"    {module} {name}" for module, name in functions))


def main() -> None:
    """An exchange, and a gradient of rows."""
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
        count("exchange", lambda: model.exchange(np.ones(10, np.float32)))
        table = client.table("rows", row_count=1000, dim=4, optimizer=sgd)
        ids, gradients = np.arange(5), np.ones((5, 4), np.float32)
        count("put_row_gradients", lambda: table.put_row_gradients(ids, gradients))


if __name__ == "__main__":
    main()

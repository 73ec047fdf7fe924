"""A replica of torchft's DiLoCo over gloo, or its lighthouse; needs torch and torchft alone.

Run as `python replica.py --worker OPTIONS`, OPTIONS being JSON: lighthouse (an address), worker_id,
gate (a file; it begins once that exists), step_s, size, sync_every, fragments, overlap. With
`serve`, a port, it is the lighthouse.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

HOST = "127.0.0.1"
LAYER_COUNT = 8
TIMEOUT_S = 10.0
"""For collectives and votes, as in torchft's own tests; its default, 60, notices later."""
QUORUM_TIMEOUT_S = 60.0


def say(**fields: Any) -> None:
    """Prints a line, with the time on a clock that all processes of a machine share."""
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


def serve(options: dict[str, Any]) -> None:
    """The lighthouse, with the settings of torchft's README."""
    from torchft.coordination import LighthouseServer

    # By its default of 100 ms, who comes later than five of eight is in no quorum, step after step.
    server = LighthouseServer(
        bind=f"{HOST}:{options['serve']}",
        min_replicas=1,
        quorum_tick_ms=100,
        join_timeout_ms=10_000,
    )
    say(kind="step", address=server.address())
    while True:
        time.sleep(60)


def work(options: dict[str, Any]) -> None:
    """Trains until it is ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = options["size"] // LAYER_COUNT
    layers = [torch.nn.Linear(size, 1, bias=False) for _ in range(LAYER_COUNT)]
    count = options["fragments"]
    fragments = [torch.nn.ModuleList(layers[index::count]) for index in range(count)]
    model = torch.nn.ModuleList(fragments)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = [
        torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for each in fragments
    ]
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=options["worker_id"],
        hostname=HOST,
        store_addr=HOST,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{options['lighthouse']}",
        timeout=timedelta(seconds=TIMEOUT_S),
        quorum_timeout=timedelta(seconds=QUORUM_TIMEOUT_S),
        connect_timeout=timedelta(seconds=TIMEOUT_S),
    )
    say(kind="opened")
    while not os.path.exists(options["gate"]):
        time.sleep(0.01)
    delay = {"fragment_sync_delay": options["overlap"]}
    with DiLoCo(manager, fragments, inner, outer, sync_every=options["sync_every"], **delay):
        step = manager.current_step()
        while True:
            began_s = time.perf_counter()
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            time.sleep(max(options["step_s"] - (time.perf_counter() - began_s), 0.0))
            inner.step()
            if manager.current_step() != step:
                step = manager.current_step()
                say(kind="step", step=step, members=manager.num_participants())


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    if "serve" in given:
        serve(given)
    else:
        work(given)

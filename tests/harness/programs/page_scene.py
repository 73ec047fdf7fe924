"""Workers for the status page: `net` lacks w2 in its step 40, while `encoder` and `users` go on.

Two parameters have ended, and the worker of one has died; their names come before all others. It
prints "ready" and ends when its input does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import sys

import numpy as np

import shardwell
from shardwell.rpc import session

TENSORS = {"embed.weight": (5000, 64), "layers.0.weight": (64, 64), "layers.0.bias": (64,)}
SGD = shardwell.SGD(learning_rate=0.1)
STEP_COUNT = 40
_PERIOD_S = 0.1
_SIZE = 50_000


def main(target: str) -> None:
    leave_some(target)
    with contextlib.ExitStack() as stack:
        clients = []
        for rank in range(3):
            session.host_name = lambda rank=rank: f"gpu-{rank + 1}"
            clients.append(stack.enter_context(shardwell.connect(target, worker_id=f"w{rank}")))
        optimizer = shardwell.Adam(learning_rate=0.001)
        nets = [
            client.parameter("net", tensors=TENSORS, optimizer=optimizer, worker_count=3)
            for client in clients
        ]
        gradient = {name: np.ones(shape, np.float32) for name, shape in TENSORS.items()}
        nets[0].init({name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()})
        for step in range(STEP_COUNT):
            nets[0].report(loss=2.0 * 0.95**step + 0.1 * (step % 3))
            for net in nets:
                net.put_gradient(gradient)
        for net in nets[:2]:
            net.put_gradient(gradient)
        users = clients[0].table("users", row_count=1000, dim=16, optimizer=SGD)
        encoders = [
            client.parameter("encoder", size=_SIZE, optimizer=SGD, worker_count=2)
            for client in clients[:2]
        ]
        encoders[0].init(np.zeros(_SIZE, np.float32))
        is_ready = False
        for step in itertools.count():
            wait_s = _PERIOD_S * (1 + 0.7 * math.sin(step / 300))
            if select.select([sys.stdin], [], [], wait_s)[0]:
                break
            encoders[0].report(loss=0.4 + 2 * math.exp(-step / 600) + 0.01 * math.sin(step / 7))
            encoders[0].put_gradient(np.ones(_SIZE, np.float32))
            select.select([sys.stdin], [], [], wait_s / 10)  # for which w0 waits for w1
            encoders[1].exchange(np.ones(_SIZE, np.float32))
            users.put_row_gradients(np.arange(10), np.ones((10, 16), np.float32))
            if not is_ready:
                print("ready", flush=True)
                is_ready = True


def leave_some(target: str) -> None:
    with shardwell.connect(target, worker_id="past") as client:
        for name in ("an-old-net", "another-old-net"):
            net = client.parameter(name, size=10, optimizer=SGD)
            net.init(np.zeros(10, np.float32))
            net.exchange(np.ones(10, np.float32))
    client = shardwell.connect(target, worker_id="dead")
    net = client.parameter("a-dead-net", size=10, optimizer=SGD, worker_count=2)
    net.init(np.zeros(10, np.float32))
    net.put_gradient(np.ones(10, np.float32))
    client._shards.close()  # as the kernel does for a process that was killed


if __name__ == "__main__":
    main(sys.argv[1])

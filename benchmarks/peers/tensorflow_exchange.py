"""TensorFlow's ParameterServerStrategy: its coordinator, which starts its workers and its servers.

Two workers, two servers, a variable on each server: a worker has a gradient in memory that does not
change, SGD runs where the variable is, and all weights come to the worker. Float32; as the strategy
is asynchronous, no worker waits for the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # unused; else it is logged
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
import tensorflow as tf

from turns import Bench, Order, cpu_s, work, worker_parser

Spec = dict[str, list[str]]
LEARNING_RATE = 0.01
WARM_UP_COUNT = 12
"""Steps that take up to three times as long as those after them."""


class TensorflowExchange(Bench):
    """One worker of a TensorFlow cluster."""

    def __init__(self, spec: Spec, pids: list[int], megabytes: int) -> None:
        self._pids = pids
        self._worker_count = len(spec["worker"])
        shard_count = len(spec["ps"])
        size = megabytes * 10**6 // 4 // shard_count
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self._variables = [tf.Variable(tf.zeros([size])) for _ in range(shard_count)]

        def gradients() -> Any:
            slices = tuple(tf.fill([size], 0.01) for _ in range(shard_count))
            return tf.data.Dataset.from_tensors(slices).repeat()

        self._gradients = iter(self._coordinator.create_per_worker_dataset(gradients))

        @tf.function
        def exchange(gradients: Any) -> Any:
            for variable, gradient in zip(self._variables, next(gradients), strict=True):
                with tf.device(variable.device):
                    tf.raw_ops.ResourceApplyGradientDescent(
                        var=variable.handle, alpha=LEARNING_RATE, delta=gradient
                    )
            return tf.stack([variable.read_value()[-1] for variable in self._variables])

        self._exchange = exchange
        self._step_count = 0
        for _ in range(WARM_UP_COUNT):
            self.act()
            self.finish()

    def prepare(self, order: Order) -> None:
        """Nothing."""

    def act(self) -> None:
        self._cpu_s = cpu_s(self._pids)
        self._last = [
            self._coordinator.schedule(self._exchange, args=(self._gradients,))
            for _ in range(self._worker_count)
        ]
        self._coordinator.join()

    def finish(self) -> dict[str, Any]:
        self._step_count += self._worker_count
        expected = -LEARNING_RATE * 0.01 * self._step_count
        furthest = np.min([one.fetch() for one in self._last], axis=0)
        assert np.allclose(furthest, expected, rtol=1e-3), (furthest, expected)
        return {"server_cpu_s": cpu_s(self._pids) - self._cpu_s}


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


def serve(spec: Spec, job: str, index: int) -> None:
    """One worker or server, until the coordinator is gone, however it went."""
    server = tf.distribute.Server(
        tf.train.ClusterSpec(spec), job_name=job, task_index=index, protocol="grpc"
    )
    print("ready", flush=True)
    sys.stdin.read()
    del server
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=json.loads)
    args, _ = parser.parse_known_args()
    if args.serve:
        serve(*args.serve)
    parser = worker_parser()
    parser.add_argument("--megabytes", type=int, required=True)
    args = parser.parse_args()
    addresses = free_addresses(4)
    spec = {"worker": addresses[:2], "ps": addresses[2:]}
    tasks = [(job, index) for job in spec for index in range(2)]
    servers = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps([spec, job, index])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for job, index in tasks
    ]
    for server in servers:
        assert server.stdout.readline() == b"ready\n"
    pids = [server.pid for server in servers]
    work(args.socket, args.rank, TensorflowExchange(spec, pids, args.megabytes))
    os._exit(0)  # its threads wait for servers that have gone


if __name__ == "__main__":
    main()

"""The systems that rows.py measures beside each other: their servers, and their workers."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

from bare_grpc import serving
from peers import redis_servers
from peers.turns import Crew, worker_command
from shardwell_server import LocalCluster

DOES = ("get", "put", "exchange")
PACKED_CODECS = ("fp16", "fp32")
TORCH_OPTIMIZERS = ("sgd", "adagrad", "adam")
REDIS_PACKAGE = "redis-py"


@dataclass(kw_only=True)
class System:
    """One line of the tables."""

    name: str
    """In JSON, and of those that are compared with."""
    label: str
    """In the table."""
    crew: Crew
    """Who does it."""
    worker_count: int
    """Of the crew."""
    order: dict[str, Any] = field(default_factory=dict)
    """The order for the crew."""
    does: tuple[str, ...] = DOES
    """What can be asked of it."""
    server_pids: list[int] = field(default_factory=list)
    """Processes that work for the crew."""
    codec: str
    """How values travel, or those of the systems that it is compared with."""
    has_rows: bool = True
    """Whether rows must be put there first."""
    distributions: tuple[str, ...] = ("uniform", "zipf")
    """Of the ids of a batch, for which it is measured."""
    all_sizes: bool = True
    """Whether it is measured with tables of all sizes, or with the smallest alone."""


def shardwell_systems(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[System]:
    """Starts a cluster for each store, and workers on all."""
    clusters = {}
    for store in args.stores:
        directory = None
        if store == "mmap":
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=args.data_dir))
        cluster = LocalCluster(args.shard_count, directory, processes=True)
        clusters[store] = stack.enter_context(cluster)
    targets = json.dumps({store: cluster.target for store, cluster in clusters.items()})
    crew = start(args, stack, "shardwell_rows.py", "--targets", targets)
    kinds = (args.optimizers, args.codecs, args.modes, args.stores)
    variants = [
        variant
        for variant in itertools.product(*kinds)
        if sum(value != kind[0] for value, kind in zip(variant, kinds, strict=True)) < 2
    ]
    return [
        System(
            name=f"{optimizer}_{codec}_{mode}_{store}",
            label=f"Shardwell {codec}, {optimizer}, {mode}, {store}",
            crew=crew,
            worker_count=args.workers,
            order={"optimizer": optimizer, "codec": codec, "mode": mode, "store": store},
            server_pids=[child.pid for child in clusters[store].children],
            codec=codec,
            all_sizes=[optimizer, codec, mode] == [kind[0] for kind in kinds[:3]],
        )
        for optimizer, codec, mode, store in variants
    ]


def redis_systems(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[System]:
    """Starts Redis servers and workers."""
    serving = redis_servers.serving(args.redis_server, args.shard_count)
    ports, pids = stack.enter_context(serving)
    words = ["--ports", *map(str, ports), "--clients", *args.redis_clients]
    crew = start(args, stack, "redis_rows.py", *words, python=args.redis_python)
    systems = []
    for client in args.redis_clients:
        codecs = [codec for codec in args.codecs if codec in PACKED_CODECS] or PACKED_CODECS[:1]
        for codec in codecs if client == args.redis_clients[0] else codecs[:1]:
            systems.append(
                System(
                    name=f"{client}_{codec}",
                    label=f"Redis {codec}, {client}",
                    crew=crew,
                    worker_count=args.workers,
                    order={"client": client, "codec": codec},
                    server_pids=pids,
                    codec=codec,
                    all_sizes=codec == args.codecs[0],
                )
            )
    first = systems[0]
    pipeline = replace(
        first,
        name=f"{first.name}_pipeline",
        label=f"{first.label}, pipeline of SET",
        order={**first.order, "pipelined": True},
        does=("put",),
        has_rows=False,
        all_sizes=False,
    )
    repeats = replace(
        first,
        name=f"{first.name}_repeats",
        label=f"{first.label}, repeats too",
        order={**first.order, "repeats": True},
        distributions=("zipf",),
        has_rows=False,
    )
    return [first, pipeline, repeats, *systems[1:]]


def torch_systems(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[System]:
    """Starts the process that has torch."""
    kinds = [name for name in args.optimizers[:1] if name in TORCH_OPTIMIZERS]
    crew = start(args, stack, "torch_rows.py", python=args.torch_python, count=1)
    return [
        System(
            name=f"torch_{kind}",
            label=f"torch EmbeddingBag, {kind}",
            crew=crew,
            worker_count=1,
            order={"optimizer": kind},
            codec=args.codecs[0],
        )
        for kind in kinds
    ]


def bare_systems(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[System]:
    """Starts servers that answer with bytes, and workers."""
    ports, pids = stack.enter_context(serving(args.shard_count, tuned=True))
    crew = start(args, stack, "bare_rows.py", "--ports", *map(str, ports))
    return [
        System(
            name=f"bare_{codec}",
            label=f"bare gRPC, bytes of {codec}",
            crew=crew,
            worker_count=args.workers,
            order={"codec": codec},
            server_pids=pids,
            codec=codec,
            has_rows=False,
            all_sizes=codec == args.codecs[0],
        )
        for codec in args.codecs
    ]


def start(
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
    file: str,
    *words: str,
    python: str = sys.executable,
    count: int = 0,
) -> Crew:
    """The workers of one kind."""
    count = count or args.workers
    flags = ("--dim", str(args.dim), "--working-set", str(args.working_set), *words)
    command = worker_command(file, *flags, python=python)
    environment = {"OMP_WAIT_POLICY": "passive"}  # torch's threads: sleep
    return stack.enter_context(Crew([command] * count, count, environment))

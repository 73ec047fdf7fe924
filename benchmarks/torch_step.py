"""A step of shardwell.torch.ServerOptimizer beside the same bytes exchanged by hand, in one run.

    python benchmarks/torch_step.py [--workers 2] [--shard-count 2] [--megabytes 64] [--steps 20]
                                    [--codec fp16] [--json FILE]

Two models: one of large layers with N MB of float32, and a ResNet-50's 161 tensors at 1/16 of its
width. Rows of each, by W worker processes: `exchange` of one vector as large, without and with
clipping of its mean by norm; `exchange` of a dict
of the model's tensors, views of one buffer, and arrays of their own; `ServerOptimizer.step` with
gradients that are there, which copies them in and the weights back out, of a model of one tensor as
large, and of the model. All rows take turns step by step, so that the machine's moods hit all
alike; ratios are of medians. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import shardwell
import shardwell.torch
from shardwell_server import LocalCluster

ROWS = {
    "flat": "exchange, one vector",
    "clipped": "exchange, one vector, clip_norm",
    "views": "exchange, dict of views",
    "apart": "exchange, dict of arrays",
    "step_flat": "ServerOptimizer.step, one tensor",
    "step": "ServerOptimizer.step",
}
RULE = shardwell.SGD(learning_rate=0.01)
CLIPPED = shardwell.SGD(learning_rate=0.01, clip_norm=1.0)


def large(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Layers of 8 MB, with biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(max(megabytes // 8, 1)):
        shapes |= {f"{layer}.weight": (2048, 1024), f"{layer}.bias": (2048,)}
    return shapes


def resnet50(width: int = 4) -> dict[str, tuple[int, ...]]:
    """Its shapes, with `width` channels in place of 64."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, into: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (out, into, kernel, kernel)
        shapes[f"{name}.norm.weight"] = shapes[f"{name}.norm.bias"] = (out,)

    convolution("stem", width, 3, 7)
    into = width
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            convolution(f"{name}.conv1", inner, into, 1)
            convolution(f"{name}.conv2", inner, inner, 3)
            convolution(f"{name}.conv3", 4 * inner, inner, 1)
            if block == 0:
                convolution(f"{name}.downsample", 4 * inner, into, 1)
            into = 4 * inner
    return shapes | {"fc.weight": (1000, into), "fc.bias": (1000,)}


def model_of(shapes: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, shape in shapes.items():
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        model.register_parameter(name.replace(".", "-"), parameter)
    return model


def calls_of(
    client: shardwell.Client, name: str, shapes: dict[str, tuple[int, ...]], **options: Any
) -> dict[str, Callable[[], object]]:
    """One step of each row."""
    layout = shardwell.TensorLayout.of(shapes)
    gradient = np.random.default_rng(1).standard_normal(layout.size).astype(np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for row, rule in (("flat", RULE), ("clipped", CLIPPED)):
        flat = client.parameter(f"{name}.{row}", size=layout.size, optimizer=rule, **options)
        flat.init(np.zeros(layout.size, np.float32))
        out = flat.get_weights()
        calls[row] = lambda flat=flat, out=out: flat.exchange(gradient, out=out)
    for row in ("views", "apart"):
        net = client.parameter(f"{name}.{row}", tensors=shapes, optimizer=RULE, **options)
        net.init({t.name: np.zeros(t.shape) for t in layout})
        given, weights = net.get_weights(), net.get_weights()
        for tensor in layout:
            given[tensor.name][...] = gradient[tensor.offset : tensor.stop].reshape(tensor.shape)
        if row == "apart":
            given = {key: array.copy() for key, array in given.items()}
            weights = {key: array.copy() for key, array in weights.items()}
        calls[row] = lambda net=net, given=given, weights=weights: net.exchange(given, out=weights)
    for row, of in (("step_flat", {"all": (layout.size,)}), ("step", shapes)):
        optimizer = shardwell.torch.ServerOptimizer(
            model_of(of), client, RULE, name=f"{name}.{row}", overlap=False, **options
        )
        calls[row] = optimizer.step
    return calls


def work(rank: int, target: str, barrier: Any, results: Any, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    models = {f"{options.megabytes} MB": large(options.megabytes), "ResNet-50/16": resnet50()}
    took: dict[str, dict[str, list[float]]] = {}
    with shardwell.connect(target, worker_id=f"w{rank}") as client:
        for number, (model, shapes) in enumerate(models.items()):
            calls = calls_of(
                client, f"m{number}", shapes, worker_count=options.workers, codec=options.codec
            )
            times: dict[str, list[float]] = {row: [] for row in calls}
            for step in range(-2, options.steps * (1 if number == 0 else 5)):
                for row, call in calls.items():
                    barrier.wait()
                    began_s = time.perf_counter()
                    call()
                    if step >= 0:
                        times[row].append(time.perf_counter() - began_s)
            took[model] = times
    results.put((rank, took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-count", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--codec", default="fp16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(options.workers), context.Queue()
    with LocalCluster(options.shard_count, processes=True) as cluster:
        workers = [
            context.Process(target=work, args=(rank, cluster.target, barrier, results, options))
            for rank in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        found = dict(results.get() for _ in workers)
        for worker in workers:
            worker.join()
    title = (
        f"{options.workers} workers, {options.shard_count} shards, {options.codec}; "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    )
    table = Table("a step", "median ms", "fastest ms", "/ one vector", title=title)
    medians: dict[str, dict[str, float]] = {}
    for model, times in found[0].items():
        for row, label in ROWS.items():
            medians.setdefault(model, {})[row] = statistics.median(times[row]) * 1e3
            ratio = medians[model][row] / medians[model]["flat"]
            fastest = f"{min(times[row]) * 1e3:.2f}"
            table.add_row(
                f"{model}: {label}", f"{medians[model][row]:.2f}", fastest, f"{ratio:.2f}"
            )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"median_ms": medians, "workers": options.workers}))


if __name__ == "__main__":
    main()

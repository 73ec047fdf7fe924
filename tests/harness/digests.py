"""Digests of what Shardwell computes, by case: the same however, and on whatever machine, it does.

    PYTHONPATH=tests .venv/bin/python -m harness.digests --write     writes them down

tests/integration/test_digests.py compares them with tests/data/digests.json in processes of many
settings. Values are made of integers, as a library's normal numbers may differ by a bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import shardwell
from harness.data.memory import at_byte
from harness.oracles import optimizers, reductions, rows
from harness.oracles.codec import decoded, encoded
from shardwell.group.schedule.arithmetic import Reduction
from shardwell.group.schedule.plan import Operation
from shardwell.numerics import native
from shardwell.numerics.codec import CODECS, SUMMED_CODECS, canonical_nans
from shardwell.numerics.initial_rows import initial_rows
from shardwell.numerics.reduction import reduce_block
from shardwell.numerics.row_batches import add_up, sort_ids
from shardwell.numerics.row_update_rules import RowUpdateRule
from shardwell.numerics.update_rules import UpdateRule, clip_factor, squared_norm
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.placement.rows import RowPlacement
from shardwell_server import LocalCluster
from shardwell_server.store.contract import TableLayout
from shardwell_server.store.row_checks import RowChecks

RECORD = Path(__file__).parents[1] / "data/digests.json"
OFFSET_VARIABLE = "SHARDWELL_DIGESTS_OFFSET"
"""Bytes by which callers' arrays miss a cache line; kernels' own miss it by whole elements."""
SIZES = (1, 255, 256, 257, 70_001)
MAGNITUDES = {"wide": (-140, 127), "near": (-12, 4), "subnormal": (-149, -126)}
"""Exponents of two, from and to."""
CODEC_NAMES = ("fp32", "fp16", "bf16+lz4", "int8")
ROW_OPTIMIZERS = {**rows.OPTIMIZERS, "ftrl, l1 0": shardwell.FTRL(learning_rate=0.5, l1=0.0)}
SAMPLE_COUNTS = {"equal": (1, 1, 1, 1, 1), "weighted": (3, 5, 0, 1, 7)}
Cases: TypeAlias = Iterator[tuple[str, tuple[npt.ArrayLike, ...]]]


def words(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Random 64-bit numbers, whose stream NumPy promises."""
    return np.random.Philox(key=seed).random_raw(count)


def placed(values: npt.NDArray[Any], *, by_bytes: bool = False) -> npt.NDArray[Any]:
    """A copy, away from a cache line's start."""
    offset = int(os.environ.get(OFFSET_VARIABLE, "0"))
    return at_byte(offset if by_bytes else offset * values.itemsize, values)


def values(count: int, seed: int = 0, magnitudes: str = "near") -> npt.NDArray[np.float32]:
    """float32 of both signs with each exponent as often, and a zero of each sign among 32."""
    low, high = MAGNITUDES[magnitudes]
    drawn = words(count, seed).astype(np.int64)
    exponent = low + ((drawn >> 24) & 0xFFFF) % (high - low + 1)
    fraction = 1 << 23 | drawn & 0x7FFFFF
    normal = exponent + 126 << 23
    bits = np.where(exponent < -126, fraction >> np.clip(-126 - exponent, 0, 24), normal + fraction)
    bits[(drawn >> 40) % 16 == 0] = 0
    return placed((bits | (drawn >> 50 & 1) << 31).astype(np.uint32).view(np.float32))


def of_codecs() -> Cases:
    for name, kind, size in itertools.product(sorted(CODECS), MAGNITUDES, SIZES):
        given = placed(values(size, size, kind), by_bytes=True)
        written = encoded(name, given)
        case = f"codec {name}, {kind}, {size}"
        yield f"{case}, written", (written,)
        yield f"{case}, read", (decoded(name, written),)
    for name in sorted(SUMMED_CODECS):
        given = values(70_001, 1, "wide")
        given.view(np.uint32)[::77] |= 0x7F800000  # NaN of many kinds
        given[5::99] = np.inf
        written = encoded(name, given, allow_non_finite=True)
        read = decoded(name, written)
        canonical_nans(read)
        yield f"codec {name}, not finite", (written, read)
        doubles = words(999, 2).view(np.float64)
        doubles[~(np.abs(doubles) < 2.0**100)] = 3
        yield f"codec {name}, of float64", (encoded(name, placed(doubles, by_bytes=True)),)
        total = values(70_001, 3)
        CODECS[name].decode_add(written, 0.3, total, 0.7, total)
        canonical_nans(total)
        yield f"codec {name}, added", (total,)
        patterns = np.arange(2**16, dtype=np.uint16)
        payload = encoded(name, np.ones(patterns.size, np.float32))
        payload[: patterns.nbytes] = patterns.view(np.uint8)
        read = decoded(name, payload)
        canonical_nans(read)
        yield f"codec {name}, all patterns", (read,)


def of_update_rules() -> Cases:
    gradients = [values(4099, seed, "near") for seed in range(5)]
    for name, optimizer in optimizers.OPTIMIZERS.items():
        weights, slots = optimizers.run(optimizer, values(4099, 9), gradients)
        yield f"rule {name}", (weights, *slots)
        rule = UpdateRule(optimizer)
        factors = [
            each.factor
            for count in (*range(1, 3000), 99_999, 12_345_678)
            for each in rule.operations(update_count=count, learning_rate=0.01)
        ]
        yield f"factors of rule {name}", (factors,)
    for size in (1, 7, 255, 4097, 70_001):
        for kind in ("near", "wide"):
            given = values(size + 3, size, kind)
            yield f"norm, {kind}, {size}", (squared_norm(given[3:]), squared_norm(given[:size]))
    norms = np.abs(values(999, 1)).tolist()
    yield "factors of clipping", ([clip_factor(norm, 1.0) for norm in norms],)


def of_row_rules() -> Cases:
    for (name, optimizer), dim in itertools.product(ROW_OPTIMIZERS.items(), (1, 3, 64, 77, 1031)):
        rule, shape = RowUpdateRule(optimizer), (200, dim)
        weights = values(200 * dim, 1).reshape(shape)
        widths = [1 if "row-wise" in name else dim for _ in rule.initial_slots]
        slots = tuple(
            placed(np.full((200, width), initial, np.float32))
            for width, initial in zip(widths, rule.initial_slots, strict=True)
        )
        for step in range(4):
            counts = 1 + (words(200, step) % np.uint64(9 + 50_000 * step)).astype(np.int64) * step
            gradients = values(200 * dim, step + 2).reshape(shape)
            rule.apply(weights, gradients, slots, counts, 0.1)
        yield f"rows by {name}, {dim}", (weights, *slots)


def of_rows() -> Cases:
    keys = placed(words(500, 1).view(np.int64))
    for dim in (1, 13, 4099):
        for initializer in (
            shardwell.Normal(std=0.02, seed=3),
            shardwell.Uniform(low=-0.1, high=0.1),
        ):
            made = initial_rows(initializer, keys, dim)
            yield f"initial rows, {type(initializer).__name__}, {dim}", (made,)
        layout = TableLayout(
            name="t",
            dim=dim,
            slot_widths=(1,),
            row_capacity=500,
            rows_per_change_max=9,
            with_sum=False,
        )
        checks, some = RowChecks(layout, 99), values(500 * dim, 2).reshape(500, dim)
        places, slot = np.arange(500), values(500, 3).reshape(500, 1)
        yield (
            f"checks of rows, {dim}",
            (checks.of_values(places, keys, places, places, some, slot),),
        )
    for count, high in ((3, 4), (900, 70), (30_000, 2000), (30_000, 2**40)):
        ids = placed((words(count, count) % np.uint64(high)).astype(np.int64))
        found = sort_ids(ids, RowPlacement(None, 3))
        yield f"sorted ids, {count} below {high}", found[:1] + found[2:]
        sums, _ = add_up(values(count * 5, 4).reshape(count, 5), found.places, found.starts)
        yield f"sums of rows, {count} below {high}", (sums,)


def of_groups() -> Cases:
    for size in (2, 3, 5):
        arrays = [np.append(values(603, rank), values(400, rank, "wide")) for rank in range(size)]
        ways = [*itertools.product(Reduction, ["equal"]), (Reduction.MEAN, "weighted")]
        found = []
        for reduction, weighting in ways:
            buffers = [array.copy() for array in arrays]
            factors = MeanFactors(SAMPLE_COUNTS[weighting][:size])
            reduce_block(buffers, reduction.value, factors, np.empty(1003, np.float32))
            found.append(buffers[0])
        yield f"threads, {size}", tuple(found)
        for strategy, codec in itertools.product(reductions.STRATEGIES, sorted(SUMMED_CODECS)):
            found = []
            for reduction, weighting in ways:
                results = reductions.run(
                    *(Operation.ALL_REDUCE, strategy, arrays),
                    codec=codec,
                    reduction=reduction,
                    sample_counts=SAMPLE_COUNTS[weighting][:size],
                    chunk=512,
                )
                found.append(reductions.one_result(results))
            yield f"group of {size}, {strategy}, {codec}", tuple(found)


def of_training() -> Cases:
    """Steps of a cluster of two shards: parameters, tables, outer training."""
    with contextlib.ExitStack() as opened:
        target = opened.enter_context(LocalCluster(2)).target
        clients = [
            opened.enter_context(shardwell.connect(target, worker_id=f"w{rank}"))
            for rank in range(5)
        ]
        crews = [(1, "weighted"), (2, "equal"), (3, "weighted"), (5, "equal")]
        for (size, weighting), codec in itertools.product(crews, CODEC_NAMES):
            yield from _trained(clients[:size], codec, SAMPLE_COUNTS[weighting])
        for name, optimizer in ROW_OPTIMIZERS.items():
            yield f"table by {name}", (_table(clients[:2], name, optimizer),)
        yield from _outer(clients[0])


def _trained(clients: list[Any], codec: str, counts: tuple[int, ...]) -> Cases:
    shapes = {"a": 3000, "b": 10_011, "c": 7}
    groups = [
        shardwell.TensorGroup("b", rate_group=1, learning_rate_factor=0.3),
        shardwell.TensorGroup("c", weight_decay=0.3),
    ]
    rate = shardwell.GroupedRate(0.01, [0.7])
    for name, optimizer in {
        "mean": shardwell.Average(),
        "momentum": shardwell.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "clipped": shardwell.AdamW(0.01, clip_norm=1.0),
    }.items():
        case = f"{name} of {len(clients)}, {codec}"
        options = {"optimizer": optimizer, "codec": codec, "worker_count": len(clients)}
        if name == "momentum":
            options["groups"] = groups
        nets = [
            each.parameter(case.replace(", ", "-").replace(" ", "-").replace("+", "-"),
                           tensors={key: (size,) for key, size in shapes.items()}, **options)
            for each in clients
        ]  # fmt: skip
        if name != "mean":
            nets[0].init({key: values(size, 99) for key, size in shapes.items()})
        for step in range(2):
            for rank, net in enumerate(nets):
                gradient = {
                    key: placed(values(size, 10 * step + rank), by_bytes=True)
                    for key, size in shapes.items()
                }
                given = {"learning_rate": rate} if name == "momentum" else {}
                net.put_gradient(gradient, sample_count=counts[rank], **given)
        yield case, tuple(nets[0].get_weights(min_version=2).values())
        for net in nets:
            net.close()


def _table(clients: list[Any], name: str, optimizer: Any) -> npt.NDArray[np.float32]:
    opened = [
        client.table(
            name.replace(", ", "-").replace(" ", "-"),
            row_count=900,
            dim=13,
            optimizer=optimizer,
            initializer=shardwell.Normal(std=0.1),
            worker_count=2,
        )
        for client in clients
    ]
    for step in range(4):
        for rank, table in enumerate(opened):
            ids = (words(300, 2 * step + rank) % np.uint64(900)).astype(np.int64)
            ids = placed(ids, by_bytes=True)
            gradients = placed(values(300 * 13, 2 * step + rank).reshape(300, 13), by_bytes=True)
            table.put_row_gradients(ids, gradients, sample_count=rank + 1)
    return opened[0].get_rows(np.arange(900), min_version=4)


def _outer(client: Any) -> Cases:
    weights = {f"layer{number}": values(3000 + number, number) for number in range(4)}
    with shardwell.Outer(
        client, "outer", tensors=weights, sync_every=4, fragments=2, overlap=1, alpha=0.3
    ) as outer:
        weights = outer.init(weights)
        for step in range(16):
            for name, array in weights.items():
                weights[name] = array - np.float32(0.01) * (array + values(array.size, step))
            weights.update(outer.after_step(weights))
        yield "outer training", tuple(outer.reload().values())


def current() -> dict[str, str]:
    """The digest of each case in this process."""
    found: dict[str, str] = {}
    for cases in (of_codecs, of_update_rules, of_row_rules, of_rows, of_groups, of_training):
        for name, results in cases():
            assert name not in found, name
            data = b"".join(np.ascontiguousarray(result).tobytes() for result in results)
            found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="to tests/data/digests.json")
    parser.add_argument("--native", type=Path, metavar="FILE", help="another build of native code")
    arguments = parser.parse_args()
    if arguments.native:
        native.LIBRARY, _ = native.load(arguments.native)
    text = json.dumps(current(), indent=0, sort_keys=True) + "\n"
    if arguments.write:
        RECORD.write_text(text)
    else:
        sys.stdout.write(text)

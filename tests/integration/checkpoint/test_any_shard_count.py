"""Goal: training that is restored into any number of shards goes on with the same bits.

Method: hypothesis draws a parameter and its workers. They train, save, and go on as new processes
would; the checkpoint goes on elsewhere, with the same gradients, cut among another number of shards
into other chunks. Weights and optimizer state of both ends are compared as bytes. Gradients depend
on the weights, and magnitudes from 2^-30 to 2^10 lie beside one another. The order of the workers'
gradients in each step is drawn; the shards' records of who contributed are compared, too.
"""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import shardwell
from shardwell import Elastic, GroupedRate, TensorGroup
from shardwell_server import LocalCluster

STEPS, STEPS_AFTER = 3, 4
RULES = {
    "sgd": partial(shardwell.SGD, 0.125, weight_decay=0.25),
    "momentum": partial(shardwell.SGD, 0.125, momentum=0.5, dampening=0.25),
    "adagrad": partial(shardwell.Adagrad, 0.125),
    "rmsprop": partial(shardwell.RMSProp, 0.0625, momentum=0.5),
    "adam": partial(shardwell.Adam, 0.0625),
    "adamw": partial(shardwell.AdamW, 0.0625, weight_decay=0.25),
    "average": shardwell.Average,
}
CREWS: dict[str, dict[str, Any]] = {
    "one": {"worker_count": 1},
    "two": {"worker_count": 2},
    "async": {"mode": "async"},
    "elastic": {"members": Elastic(max_count=2)},
    "quorum": {"worker_count": 2, "min_contributors": 1},
}


class Case(NamedTuple):
    """A training."""

    codec: str
    size: int
    rule: str
    crew: str
    clip_norm: float
    has_groups: bool
    rates: bool
    """Whether each step brings rates of its groups."""
    sample_counts: tuple[int, int]
    order: tuple[tuple[int, ...], ...]
    """Of each step: the workers that give a gradient, in turn."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        first, second = self.size // 3, self.size // 4
        return {"a": (first,), "b": (second,), "c": (self.size - first - second,)}

    def spec(self) -> dict[str, Any]:
        options = {"codec": self.codec, **CREWS[self.crew]}
        options["optimizer"] = RULES[self.rule](clip_norm=self.clip_norm)
        if not self.has_groups:
            return options | {"size": self.size}
        has_decay = "weight_decay" in options["optimizer"].__dataclass_fields__
        groups = [
            TensorGroup("a", learning_rate_factor=0.5, rate_group=1),
            TensorGroup("b", frozen=True),
            TensorGroup("c", **({"weight_decay": 0.5} if has_decay else {})),
        ]
        return options | {"tensors": self.tensors, "groups": groups}

    def shaped(self, values: np.ndarray) -> Any:
        if not self.has_groups:
            return values
        stops = np.cumsum([shape[0] for shape in self.tensors.values()])[:-1]
        return dict(zip(self.tensors, np.split(values, stops), strict=True))


def is_allowed(case: Case) -> bool:
    is_average = case.rule == "average"
    # An Average has neither rates nor groups, and no checkpoint has what int8 took off its means.
    return not is_average or not (case.has_groups or case.codec == "int8")


def cases(codec: str) -> st.SearchStrategy[Case]:
    turns = st.sampled_from([(0, 1), (1, 0)])
    return st.builds(
        Case,
        codec=st.just(codec),
        size=st.sampled_from([3001, 50_001, 1, 5, 65, 12_289]),
        rule=st.sampled_from(list(RULES)),
        crew=st.sampled_from(list(CREWS)),
        clip_norm=st.sampled_from([0.0, 1.0]),
        has_groups=st.booleans(),
        rates=st.booleans(),
        sample_counts=st.sampled_from([(1, 1), (3, 1), (5, 7)]),
        order=st.tuples(*[turns] * (STEPS + STEPS_AFTER)),
    ).filter(is_allowed)


def mixed(size: int, *seed: int) -> np.ndarray:
    """Values of all magnitudes, in stretches that end anywhere, each beside any other."""
    random = np.random.default_rng(seed)
    stretches = np.repeat(random.integers(-24, 11, size), random.integers(1, 200, size))[:size]
    exponents = stretches - random.integers(0, 7, size)
    return (random.standard_normal(size) * 2.0**exponents).astype(np.float32)


def flat(values: Any) -> np.ndarray:
    return np.concatenate([*values.values()]) if isinstance(values, dict) else values


def train(target: str, case: Case, steps: range) -> list[Any]:
    """The weights as workers have them at the end, and who contributed to what."""
    count = 1 if case.crew == "one" else 2
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(shardwell.connect(target, worker_id=f"w{i}")) for i in range(count)
        ]
        nets = [client.parameter("net", **case.spec()) for client in clients]
        if case.rule != "average" and not steps.start:
            nets[0].init(case.shaped(mixed(case.size, 99)))
        version = max(shard.parameters[0].version_max for shard in clients[0].status())
        records: list[Any] = []
        for net in nets if case.crew == "elastic" else ():
            net.join(waits=False)
        for step in steps:
            weights = [flat(net.get_weights(min_version=version)) for net in nets]
            is_joining = case.crew == "elastic" and step == steps.start  # the next awaits both
            for worker in (
                [0] if is_joining else [each for each in case.order[step] if each < count]
            ):
                gradient = mixed(case.size, worker, step)
                if case.rule != "average":  # whose weights no checkpoint has
                    gradient += np.float32(0.375) * weights[worker]
                options: dict[str, Any] = {"sample_count": case.sample_counts[worker]}
                if case.has_groups and case.rates:
                    options["learning_rate"] = GroupedRate(0.125, [(0.5, 2.0)[step % 2]])
                nets[worker].put_gradient(case.shaped(gradient), **options)
            version += count if case.crew == "async" else 1
            if case.crew in ("elastic", "quorum"):
                nets[0].get_weights(min_version=version)
                records.append(nets[0].contributions(version - 1))
        return [flat(net.get_weights(min_version=version)).tobytes() for net in nets] + [records]


def state_of(client: shardwell.Client, path: Path) -> dict[str, bytes]:
    """The arrays in a checkpoint that is taken now, read without Shardwell."""
    saved = client.save_checkpoint(path, ["net"])
    files = [load_file(saved.path / file.path) for file in saved.parameters[0].files]
    return {name: np.concatenate([each[name] for each in files]).tobytes() for name in files[0]}


def gone_on(target: str, case: Case, path: Path) -> tuple[list[Any], dict[str, bytes]]:
    """The end of a training that begins with what the shards have."""
    ends = train(target, case, range(STEPS, STEPS + STEPS_AFTER))
    with shardwell.connect(target, worker_id="saver") as client:
        return ends, state_of(client, path)


@pytest.mark.parametrize(
    "codec", ["fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4", "int8"]
)
def test_restored_training_goes_on_with_the_same_bits(codec: str) -> None:
    @settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
    @given(
        case=cases(codec),
        shard_counts=st.tuples(st.integers(1, 7), st.integers(1, 7)),
        chunk_bytes=st.tuples(*[st.sampled_from([256, 4096, 2**20])] * 2),
    )
    @example(
        case=Case(codec, 50_001, "adam", "two", 1.0, False, False, (3, 1), ((0, 1),) * 7),
        shard_counts=(2, 5),
        chunk_bytes=(2**20, 4096),
    )
    def check(case: Case, shard_counts: tuple[int, int], chunk_bytes: tuple[int, int]) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch)
            with LocalCluster(shard_counts[0], chunk_size_bytes=chunk_bytes[0]) as source:
                train(source.target, case, range(STEPS))
                with shardwell.connect(source.target, worker_id="saver") as saver:
                    saver.save_checkpoint(path / "saved")
                expected = gone_on(source.target, case, path / "expected")
            with LocalCluster(shard_counts[1], chunk_size_bytes=chunk_bytes[1]) as target:
                with shardwell.connect(target.target, worker_id="restorer") as restorer:
                    restorer.restore_checkpoint(path / "saved")
                found = gone_on(target.target, case, path / "found")
        assert found[0] == expected[0], "weights as workers have them"
        assert found[1] == expected[1], "weights and optimizer state of the shards"

    check()

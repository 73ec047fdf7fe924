"""Goal: what a program of outer training has beside its weights goes on behind the last offer that
counted, where its samples do, for a learner that is killed anywhere, and on other shards.

Method: an object counts the samples that inner steps have had. So where a learner goes on, its
count and what has counted by the account of samples are one number. Learners end as by kill -9
before and behind each move of a loop; a newcomer, and learners of a checkpoint, begin with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import vanish
from harness.threads import together

LENGTH = 96
SAMPLES = shardwell.Samples(LENGTH, 4)
ELASTIC: dict[str, Any] = {
    "members": shardwell.Elastic(
        min_count=1, max_count=4, member_return_s=0.05, member_lease_s=0.5, reference_count=1
    )
}


class KilledError(Exception):
    """Ends a loop in its middle."""


def learner(client: shardwell.Client, **options: Any) -> shardwell.Outer:
    plain: dict[str, Any] = {"sync_every": 6, "fragments": 2, "codec": "fp32"}
    tensors = {"layers.0.count": (LENGTH,), "layers.1.count": (LENGTH,)}
    rule = shardwell.SGD(1.0)
    return shardwell.Outer(client, "net", tensors=tensors, outer=rule, **{**plain, **options})


class Loop:
    """A training's loop, which ends as if killed at a place of an inner step."""

    def __init__(self, outer: shardwell.Outer, factor: float = 1.0) -> None:
        self.outer = outer
        self.factor = np.float32(factor)
        zeros = {each: np.zeros(LENGTH, np.float32) for f in outer.fragments for each in f.tensors}
        self.weights = outer.init(zeros)
        self.progress: dict[str, Any] = {"samples": 0, "tail": 0}
        self.noise = np.random.default_rng(5)
        outer.keep_state({"progress": self.progress, "noise": self.noise})
        self.began = dict(self.progress)

    def run(self, *, epochs: int = 3, place: tuple[int, str] | None = None) -> None:
        def maybe_end(where: str) -> None:
            if place == (count, where):
                raise KilledError

        for count, batch in enumerate(self.outer.batches(SAMPLES, epochs=epochs)):  # noqa: B007
            maybe_end("drawn")
            for array in self.weights.values():
                array[batch.indices] += self.factor
            self.progress["samples"] += len(batch)
            self.noise.random()
            self.weights.update(self.outer.after_step(self.weights, batch=batch))
            maybe_end("stepped")
            self.progress["tail"] += len(batch)  # what a loop does behind an inner step
            maybe_end("tail")


def counted(client: shardwell.Client) -> int:
    """The samples that have counted: with one learner all before the first that has not."""
    (found,) = (each for one in client.status()[0].parameters for each in one.samples)
    return found.epoch * LENGTH + found.done_count


def visits(client: shardwell.Client, **options: Any) -> list[list[float]]:
    found = learner(client, **options).reload()
    return [np.unique(array).tolist() for array in found.values()]


@pytest.mark.parametrize("crew", [{"worker_count": 1}, ELASTIC], ids=["fixed", "elastic"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_learner_killed_anywhere_goes_on_with_the_objects_of_its_samples(
    cluster: Any, connect: Any, crew: dict[str, Any], overlap: int
) -> None:
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    target = cluster(1)  # as a kill may leave an offer in one of several shards
    reader = connect(target, "reader")
    counts = sorted(chance.sample(range(14), 4))
    places = [(count, chance.choice(("drawn", "stepped", "tail"))) for count in counts]
    kills = [*places, (6, "stepped"), (6 - overlap, "tail"), None]
    for killed_count, place in enumerate(kills):
        client = connect(target, "w0")
        loop = Loop(learner(client, overlap=overlap, alpha=1.0, **crew))
        done = round(float(loop.outer.image()["layers.0.count"].sum()))
        why = seed, places, place
        assert loop.began["samples"] == done, why
        if overlap:  # else what the loop had not done behind the offer is lost
            assert loop.began["tail"] == done, why
        assert 0 <= loop.began["samples"] - loop.began["tail"] <= 4 * killed_count, why
        drawn = np.random.default_rng(5)
        drawn.random(loop.began["samples"] // 4)
        assert loop.noise.bit_generator.state == drawn.bit_generator.state, why
        try:
            loop.run(place=place)
        except KilledError:
            calls = [each.offer.call for each in loop.outer._fragments if each.offer is not None]
            wait(call for call in calls if call is not None)  # it has counted, or never left
            vanish(client)
    assert counted(reader) == 3 * LENGTH
    assert loop.progress["samples"] == 3 * LENGTH
    assert visits(reader, overlap=overlap, alpha=1.0, **crew)[0] == [3.0]


def test_what_is_left_at_the_end_of_the_data_is_offered(cluster: Any, connect: Any) -> None:
    """Of learners that have made different numbers of inner steps since their last offers."""
    target = cluster(2)

    def learners() -> list[Loop]:
        clients = [connect(target, f"w{i}") for i in range(2)]
        outers = [learner(client, worker_count=2, overlap=0) for client in clients]
        made: list[Callable[[], Loop]] = [partial(Loop, outer, 2.0) for outer in outers]
        return together(made)

    first, second = learners()
    with pytest.raises(KilledError):  # ahead of any offer: what it had is dealt again
        second.run(place=(1, "drawn"))
    vanish(second.outer._client)
    again = Loop(learner(connect(target, "w1"), worker_count=2, overlap=0), 2.0)
    together([first.run, again.run])
    reader = connect(target, "reader")
    assert counted(reader) == 3 * LENGTH
    assert visits(reader, worker_count=2, overlap=0) == [[3.0], [3.0]]
    assert len({each.version for each in learner(reader, worker_count=2, overlap=0).fragments}) == 1


def test_elastic_learners_end_when_all_has_counted(cluster: Any, connect: Any) -> None:
    target = cluster(2)
    clients = [connect(target, f"w{i}") for i in range(3)]
    made = [partial(Loop, learner(client, overlap=1, **ELASTIC)) for client in clients]
    loops = together(made)
    lost = loops[2]
    with pytest.raises(KilledError):
        lost.run(place=(2, "stepped"))
    vanish(lost.outer._client)
    together([each.run for each in loops[:2]])
    assert counted(connect(target, "reader")) == 3 * LENGTH


def test_a_newcomer_has_the_objects_of_the_others(cluster: Any, connect: Any) -> None:
    target = cluster(2)
    first = Loop(learner(connect(target, "w0"), **ELASTIC))
    with pytest.raises(KilledError):
        first.run(place=(9, "tail"))
    second = Loop(learner(connect(target, "w1"), **ELASTIC))
    assert second.began["samples"] == counted(connect(target, "reader")) > 0
    fresh = np.random.default_rng(5)
    assert second.noise.bit_generator.state == fresh.bit_generator.state  # each one's own


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_has_the_states_for_other_shards_and_learners(
    cluster: Any, connect: Any, tmp_path: Path, count: int
) -> None:
    client = connect(cluster(2), "w0")
    loop = Loop(learner(client))
    with pytest.raises(KilledError):
        loop.run(place=(9, "tail"))
    done = counted(client)
    saved = client.save_checkpoint(tmp_path / "saved")
    assert [len(each.states) for each in saved.parameters] == [1, 0]
    target = cluster(3)
    clients = [connect(target, f"w{i}") for i in range(count)]
    clients[0].restore_checkpoint(tmp_path / "saved", worker_count=count)
    options: dict[str, Any] = {"worker_count": count, "overlap": 0}
    loops = together([partial(Loop, learner(each, **options), float(count)) for each in clients])
    assert {each.began["samples"] for each in loops} == {done}
    together([each.run for each in loops])
    assert counted(clients[0]) == 3 * LENGTH
    assert visits(clients[0], **options)[0] == [3.0]


def test_a_state_that_is_too_large_is_refused_before_an_offer(cluster: Any, connect: Any) -> None:
    outer = learner(connect(cluster(1), "w0"))
    weights = outer.init({f"layers.{n}.count": np.zeros(LENGTH) for n in range(2)})
    large: dict[str, Any] = {}
    outer.keep_state({"large": large})
    large["values"] = np.zeros(2**24, np.float32)
    outer.after_step(weights)
    outer.after_step(weights)
    with pytest.raises(shardwell.ArgumentError, match="'large', and the shards keep 64000000"):
        outer.after_step(weights)
    assert [each.is_offered for each in outer.fragments] == [False, False]
    large.clear()
    outer.offer(0, weights)
    outer.take(0)


def test_a_state_is_of_the_first_fragment_alone(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    outer = learner(client)
    with pytest.raises(shardwell.NotInitializedError):
        outer.keep_state({"progress": {}})
    second = outer._fragments[1].parameter
    with pytest.raises(shardwell.ArgumentError, match="is not fragment 0 of family 'net'"):
        second.keep_state({"progress": {}})

"""Goal: what a program registers beside the weights is that of the step it goes on with.

Method: a program counts and draws random numbers behind and before each step, ends at a place of
its loop, and begins again; all that it saw is that of a run that nothing disturbed.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import channels_of, shards_of, vanish
from harness.polling import PATIENCE_S, eventually
from harness.threads import together
from shardwell.v1 import parameter_server_pb2 as pb

SAMPLES = shardwell.Samples(40, batch_size=4, seed=3)
SIZE = 64
PLACES = ("drawn", "given", "half")
"""Before the gradient leaves; behind the step; in the middle of what the loop does there."""


class EndedError(Exception):
    """The program is at its end, as if it was killed there."""


class Counts:
    """An object as torch's schedules are."""

    def __init__(self) -> None:
        self.sum = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "parts": [self.sum, (self.sum, None)], "bits": np.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["parts"] == [state["sum"], (state["sum"], None)]
        assert state["bits"].tolist() == [0, 1, 2]
        self.sum = state["sum"]


def opened(client: shardwell.Client, **crew: Any) -> Any:
    net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(lr=1.0), codec="fp32", **crew)
    net.init(np.zeros(SIZE))
    return net


class Training:
    """One life of a worker's program."""

    def __init__(self, client: shardwell.Client, seed: int = 0, **crew: Any) -> None:
        self.client = client
        self.net = opened(client, **crew)
        self.noise, self.dice = np.random.default_rng(seed), random.Random(seed)
        self.counts, self.facts = Counts(), {"even": 0, "of_floats": float("inf")}
        self.net.keep_state(
            {"noise": self.noise, "dice": self.dice, "counts": self.counts, "facts": self.facts}
        )
        self.seen: dict[int, Any] = {}

    def run(self, stop: int = -1, place: str = "") -> dict[int, Any]:
        """Returns what it saw in each step; at `place` of step `stop` it ends."""
        net = self.net
        for batch in net.batches(SAMPLES, epochs=2):
            step = net.next_step
            drawn = self.noise.random(), self.dice.random()
            self.seen[step] = (
                *batch.indices.tolist(),
                *drawn,
                self.counts.sum,
                *self.facts.values(),
            )
            self._end_at((step, "drawn"), stop, place)
            net.exchange(np.full(SIZE, drawn[0]), batch=batch)
            self._end_at((step, "given"), stop, place)
            self.counts.sum += step
            self._end_at((step, "half"), stop, place)
            self.facts["even"] += not step % 2
        return self.seen

    def _end_at(self, here: tuple[int, str], stop: int, place: str) -> None:
        if here == (stop, place):
            self.client.__exit__(EndedError, EndedError(), None)  # as its death would be
            raise EndedError


def made(net: Any, step: int) -> bool:
    return bool(net.next_step > step)


def lives(connect: Callable[..., Any], target: Any, ends: list[tuple[int, str]]) -> dict[int, Any]:
    seen: dict[int, Any] = {}
    for stop, place in [*ends, (-1, "")]:
        training = Training(connect(target, "w0"))
        with contextlib.suppress(EndedError):
            training.run(stop, place)
        for step, found in training.seen.items():
            assert seen.setdefault(step, found) == found, f"step {step}, that was made again"
    return seen


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_ends_anywhere_goes_on_as_if_nothing_had_been(
    cluster, connect, place
) -> None:
    undisturbed, killed = cluster(2), cluster(2)
    expected = lives(connect, undisturbed, [])
    assert sorted(expected) == list(range(20))
    assert lives(connect, killed, [(0, place), (5, place), (6, place), (19, place)]) == expected
    one, other = (
        connect(each, "r").parameter("net").get_weights() for each in (undisturbed, killed)
    )
    np.testing.assert_array_equal(one, other)


def test_a_shard_that_is_killed_keeps_it(cluster, connect, tmp_path) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    first = Training(connect(running, "w0"))
    with pytest.raises(EndedError):
        first.run(7, "half")
    for index in (0, 1):
        running.children[index].kill()
        running.start_again(index)
    second = Training(connect(running, "w0")).run()
    assert min(second) == 7, "the step is made again"
    assert second[7] == first.seen[7]


def test_workers_have_generators_of_their_own(cluster, connect) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    before = [Training(each, rank, worker_count=2) for rank, each in enumerate(clients)]
    together([lambda one=each: ended(one, 4, "drawn") for each in before])
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    after = [Training(each, 99, worker_count=2) for each in clients]
    together([lambda one=each: one.run() for each in after])
    for one, other in zip(before, after, strict=True):
        assert other.seen[4] == one.seen[4]
    assert after[0].seen[9][4] != after[1].seen[9][4]


def ended(one: Training, stop: int, place: str) -> None:
    with pytest.raises(EndedError):
        one.run(stop, place)


def test_a_member_that_comes_has_the_state_of_the_others(cluster, connect) -> None:
    """And its own generator."""
    running = cluster(2)
    members = shardwell.Elastic(min_count=1, max_count=3)
    first = Training(connect(running, "w0"), 0, members=members)
    for _ in range(3):
        first.net.note_state()
        first.net.exchange(np.ones(SIZE))
        first.counts.sum += 10
    first.net.note_state()
    eventually(
        "the state of step 3",
        lambda: Training(connect(running, "w1"), 1, members=members).counts.sum == 30,
    )
    new = Training(connect(running, "w2"), 7, members=members)
    assert new.noise.random() == np.random.default_rng(7).random()


def test_a_member_that_missed_steps_takes_the_state_of_those_who_made_them(
    cluster, connect
) -> None:
    running = cluster(2)
    members = shardwell.Elastic(min_count=1, max_count=3)
    one, other = (Training(connect(running, name), members=members) for name in ("w0", "w1"))

    is_over = threading.Event()

    def step(of: Training) -> None:
        of.net.note_state()
        if of.net.outcome is not None and of.net.outcome.counted == "all":
            assert of.counts.sum == of.net.next_step
        of.net.exchange(np.ones(SIZE))
        of.counts.sum += 1

    def go_on() -> None:
        while not is_over.is_set():
            step(one)

    def come_and_go() -> None:
        try:
            for _ in range(3):
                for _ in range(5):
                    step(other)
                other.net.leave()
                enough = one.net.next_step + 2
                eventually("steps without it", partial(made, one.net, enough))
        finally:
            is_over.set()

    together([go_on, come_and_go])
    assert one.net.next_step > 15
    assert other.net.outcome.counted == "all"


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_a_checkpoint_has_the_states_of_its_step(
    cluster, connect, tmp_path: Path, shard_count, worker_count
) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    before = [Training(each, rank, worker_count=2) for rank, each in enumerate(clients)]

    def work(of: Training) -> None:
        for batch in of.net.batches(SAMPLES, epochs=2):
            of.net.exchange(np.ones(SIZE), batch=batch)
            of.counts.sum += 1
            if of.net.next_step == 4:
                if of is before[0]:
                    of.client.save_checkpoint(tmp_path / "saved")
                else:
                    of.client.close()
                return

    together([lambda one=each: work(one) for each in before])
    saved = shardwell.inspect_checkpoint(tmp_path / "saved", verify=True)
    states = saved.parameters[0].states
    assert [(each.worker_id, each.step) for each in states] == [("w0", 4), ("w1", 4)]
    running = cluster(shard_count)
    connect(running, "operator").restore_checkpoint(tmp_path / "saved", worker_count=worker_count)
    clients = [connect(running, f"w{rank}") for rank in range(worker_count)]
    after = [Training(each, 9, worker_count=worker_count) for each in clients]
    assert [each.counts.sum for each in after] == [4] * worker_count
    assert after[0].noise.random() == before[0].noise.random()


def test_a_checkpoint_of_means_has_the_state(cluster, connect, tmp_path: Path) -> None:
    """There are no first weights, and steps are counted from 0 anew."""

    def means(client: shardwell.Client) -> tuple[Any, dict[str, int]]:
        net = client.parameter("means", size=SIZE, optimizer=shardwell.Average())
        counts = {"sum": 0}
        net.keep_state({"counts": counts})
        return net, counts

    client = connect(cluster(2), "w0")
    net, counts = means(client)
    for batch, _ in zip(net.batches(SAMPLES), range(3), strict=False):
        net.exchange(np.ones(SIZE), batch=batch)
        counts["sum"] += 1
    client.save_checkpoint(tmp_path / "saved")
    restored = connect(cluster(3), "w0")
    restored.restore_checkpoint(tmp_path / "saved")
    assert means(restored)[1] == {"sum": 3}


def test_a_damaged_state_of_a_checkpoint_is_named(cluster, connect, tmp_path: Path) -> None:
    client = connect(cluster(1), "w0")
    net = opened(client)
    net.keep_state({"counts": {"sum": 1}})
    net.exchange(np.ones(SIZE))
    state = client.save_checkpoint(tmp_path / "saved").parameters[0].states[0]
    path = tmp_path / "saved" / state.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(shardwell.StorageError, match="state-00000 was damaged"):
        connect(cluster(2), "w0").restore_checkpoint(tmp_path / "saved")
    path.write_bytes(data[:-1])
    with pytest.raises(shardwell.StorageError, match="state-00000 has"):
        shardwell.inspect_checkpoint(tmp_path / "saved")


def averaged(step: int, rank: int = 0) -> dict[str, Any]:
    """A moving average that all ranks have alike, and a large array of each rank's own."""
    return {
        "average": np.arange(300_000, dtype=np.float64) * (1 + step),
        "unchanged": np.ones(300_000),
        "own": np.full(200_000, rank, np.int64),
        "step": step,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[key], other[key]) for key in {*one, *other})


@pytest.mark.parametrize("place", ["begun", "in pages", "kept"])
def test_a_large_state_is_that_of_a_step_wherever_shards_and_worker_are_killed(
    cluster, connect, tmp_path, place
) -> None:
    """Before its first page, behind some of these, and behind all; the shard with them."""
    running = cluster(2, data_dir=tmp_path, processes=True)
    client = connect(running, "w0")
    net = opened(client)
    large: dict[str, Any] = {}
    net.keep_state({"large": large})
    for step in range(3):
        large.update(averaged(step))
        net.exchange(np.ones(SIZE))
    large.update(averaged(3))
    if place == "kept":
        net.note_state()
        client.save_checkpoint(tmp_path / "saved")  # which ends when it is
    elif place == "in pages":
        channel = channels_of(client)[0]
        for start in range(3):
            request = pb.KeepStateRequest(
                shard=channel.identity,
                parameter="net",
                stage=pb.KeepStateRequest.STAGE_PUT_PAGE,
                worker_id="w0",
                step=3,
                state=large["average"].tobytes()[start * 10**6 : (start + 1) * 10**6],
            )
            channel.call("KeepState", request, pb.KeepStateResponse, timeout_s=PATIENCE_S)
    running.children[0].kill()
    vanish(client)
    running.start_again(0)
    again = opened(connect(running, "w0"))
    found: dict[str, Any] = {}
    again.keep_state({"large": found})
    step = 3 if place == "kept" else 2
    assert again.next_step == step, "the last one is made again, unless its state is kept"
    assert same(found, averaged(step))
    for again_step in range(step, 6):
        found.update(averaged(again_step))
        again.exchange(np.ones(SIZE))
    assert again.get_weights()[0] == -6


@pytest.mark.parametrize("shard_count", [1, 3])
def test_a_checkpoint_has_large_states_for_another_crew(
    cluster, connect, tmp_path: Path, shard_count
) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    nets = [opened(each, worker_count=2) for each in clients]
    objects = [averaged(0, rank) for rank in range(2)]
    for net, large in zip(nets, objects, strict=True):
        net.keep_state({"large": large})

    def train(rank: int) -> None:
        for step in range(3):
            objects[rank].update(averaged(step, rank))
            nets[rank].exchange(np.ones(SIZE))
        objects[rank].update(averaged(3, rank))
        nets[rank].note_state()

    together([partial(train, rank) for rank in range(2)])
    kept_bytes = sum(each.nbytes for each in averaged(0).values() if isinstance(each, np.ndarray))
    stored = running.servers[0].shard.stored_bytes
    assert stored < 2.6 * kept_bytes, "what both have alike, of two steps, is there once"
    saved = clients[0].save_checkpoint(tmp_path / "saved")
    sizes = [each.size_bytes for each in saved.parameters[0].states]
    assert min(sizes) > kept_bytes
    running = cluster(shard_count)
    connect(running, "operator").restore_checkpoint(tmp_path / "saved", worker_count=3)
    for rank in range(3):
        found: dict[str, Any] = {}
        net = opened(connect(running, f"w{rank}"), worker_count=3)
        net.keep_state({"large": found})
        assert net.next_step == 3
        assert same(found, averaged(3, rank if rank < 2 else 0))


def test_a_member_that_comes_has_the_large_state_of_the_others(cluster, connect) -> None:
    running = cluster(2)
    members = shardwell.Elastic(min_count=1, max_count=3)
    net = opened(connect(running, "w0"), members=members)
    large: dict[str, Any] = averaged(0)
    net.keep_state({"large": large})
    for step in range(3):
        large.update(averaged(step))
        net.note_state()
        net.exchange(np.ones(SIZE))
    other = opened(connect(running, "w1"), members=members)
    found: dict[str, Any] = {}
    other.keep_state({"large": found})
    assert same(found, averaged(2))


def test_what_can_not_be_kept_is_refused_by_name(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    net = opened(client)
    with pytest.raises(shardwell.ArgumentError, match="'it' is a list, whose state can't be kept"):
        net.keep_state({"it": [1]})
    with pytest.raises(shardwell.ArgumentError, match="give objects by name"):
        net.keep_state([1])
    large = {"weights": np.zeros(9_000_000)}
    net.keep_state({"large": large, "small": {}})
    with pytest.raises(
        shardwell.ArgumentError, match=r"72000\d\d\d bytes, 72\d* of them of 'large'"
    ):
        net.exchange(np.ones(SIZE))
    large["weights"] = object()
    with pytest.raises(
        shardwell.ArgumentError, match=r"\['large'\]\['weights'\] is a builtins.obj"
    ):
        net.exchange(np.ones(SIZE))
    large.clear()
    net.exchange(np.ones(SIZE))
    lone = client.parameter("lone", size=3, optimizer=shardwell.SGD(0.1), mode="async")
    with pytest.raises(shardwell.ArgumentError, match="asynchronous steps"):
        lone.keep_state({"it": {}})


def test_an_object_that_refuses_its_state_is_named(cluster, connect, caplog) -> None:
    running = cluster(1)
    net = opened(connect(running, "w0"))
    net.keep_state({"counts": {"sum": 1}, "gone": {}})
    net.exchange(np.ones(SIZE))
    again = opened(connect(running, "w0"))
    with pytest.raises(shardwell.ArgumentError, match="'counts' refuses the state of step"):
        again.keep_state({"counts": Counts()})
    again.keep_state({"new": {}})
    again.exchange(np.ones(SIZE))
    assert "has no 'new'" in caplog.text
    assert "has 'counts', 'gone', which this program does not give" in caplog.text


class Opened:
    """A parameter as another thread opens it."""


def test_parameters_are_counted_while_other_threads_open_some(cluster, connect) -> None:
    shards = shards_of(connect(cluster(1), "w0"))
    held = [Opened() for _ in range(30_000)]
    is_over = threading.Event()

    def open_them() -> int:
        try:
            for each in held:
                shards.note_handle(each)
        finally:
            is_over.set()
        return len(held)

    def count_them() -> int:
        while not is_over.is_set():
            assert all(isinstance(each, Opened) for each in shards.handles)
        return len(shards.handles)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert together([open_them, count_them, count_them]) == [len(held)] * 3
    finally:
        sys.setswitchinterval(interval_s)
    held.clear()
    assert not shards.handles


def test_objects_go_back_to_a_step_that_a_member_makes_again(cluster, connect) -> None:
    """Its tenure was over, and the step is still open: the loop has run behind nothing."""
    running = cluster(1)
    net = opened(connect(running, "w0"), members=shardwell.Elastic())
    ops = connect(running, "ops")
    progress = {"steps": 0}
    net.keep_state({"progress": progress})
    dealt = net.batches(SAMPLES)
    for number in range(4):
        batch = next(dealt)
        assert progress["steps"] == net.next_step
        if number == 2:
            ops.remove_member("w0")
        net.exchange(np.ones(SIZE), batch=batch)
        progress["steps"] += 1
    assert next(dealt)
    assert progress["steps"] == net.next_step == 3

"""The contribution log against real kills: a replay of what it has gives the weights' bits."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest

import shardwell
from harness.inside import incarnation_of
from harness.oracles.contribution_sets import replayed, sets_of
from harness.polling import eventually
from harness.programs.elastic_worker import NAME, ElasticWorker, opened

SIZE = 1000
KILL_COUNT = 6


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 6))]
)
def test_a_replay_of_the_sets_gives_the_weights(cluster, connect, tmp_path, seed) -> None:
    """Shards and workers are killed at any moment; sums of other orders have other bits."""
    chance = random.Random(seed)
    running = cluster(
        2,
        data_dir=tmp_path / "data",
        contribution_dir=tmp_path / "log",
        processes=True,
        chunk_size_bytes=256,
    )
    options = {"is_inexact": True, "min_contributors": 2, "grace_s": 0.02}
    with ExitStack() as stack:

        def started(number: int) -> ElasticWorker:
            return stack.enter_context(
                ElasticWorker(running.target, f"w{number}", size=SIZE, **options)
            )

        workers = [started(number) for number in range(3)]
        for number in range(KILL_COUNT):
            workers[number % 3].read_outcome()
            threading.Event().wait(chance.uniform(0, 0.1))
            if number % 3 == 2:
                victim = chance.randrange(3)
                workers[victim].close()
                workers[victim] = started(victim)
            else:
                shard = chance.randrange(2)
                running.children[shard].kill()
                running.start_again(shard)
        for worker in workers:
            worker.read_outcome()

        def has_step_of_three() -> bool:
            """Two gradients have one sum, in either order."""
            for worker in workers:
                worker.read_outcome()
            return any(len(one["contributors"]) > 2 for one in sets_of(tmp_path / "log").values())

        eventually("a step has the gradients of three", has_step_of_three)
    net = connect(running, "reader").parameter(NAME)

    def is_replayed() -> bool:
        """A step may close between the two looks, once the last members are lost."""
        return bool((replayed(sets_of(tmp_path / "log"), SIZE) == net.get_weights()).all())

    eventually(f"a replay has the weights' bits, seed {seed}", is_replayed)
    sets = sets_of(tmp_path / "log")
    assert len({tuple(line["contributors"]) for line in sets.values()}) > 3
    for line in sets.values():
        line["contributors"].reverse()
    assert (
        replayed(sets, SIZE) != net.get_weights()
    ).any()  # so the order is a part of what is tested


def test_what_a_kill_kept_from_the_log_is_restored(cluster, connect, tmp_path) -> None:
    """As after a kill between a step and its line: the log begins with the last step of each."""
    first = cluster(2, data_dir=tmp_path / "data", chunk_size_bytes=256)
    model = opened(connect(first, "w0"), size=SIZE)
    for _ in range(3):
        model.exchange(np.ones(SIZE, np.float32))
    incarnation = f"{incarnation_of(model):x}"
    first.close()
    running = cluster(
        2, data_dir=tmp_path / "data", contribution_dir=tmp_path / "log", chunk_size_bytes=256
    )
    opened(connect(running, "w1"), size=SIZE).exchange(np.ones(SIZE, np.float32))
    found = list(sets_of(tmp_path / "log").values())
    assert {line["incarnation"] for line in found} == {incarnation}
    by_step = {step: [x for x in found if x["step"] == step] for step in (2, 3)}
    for step, worker_id in ((2, "w0"), (3, "w1")):
        assert {tuple(line["contributors"]) for line in by_step[step]} == {(worker_id,)}
        ranges = sorted((line["offset"], line["size"]) for line in by_step[step])
        assert sum(size for _, size in ranges) == SIZE
        assert len({offset for offset, _ in ranges}) == 16
    assert all(line["restored"] for line in by_step[2])
    assert not any("restored" in line for line in by_step[3])


def test_a_full_disk_stops_no_step(cluster, connect, tmp_path) -> None:
    (tmp_path / "shard-0.jsonl").symlink_to("/dev/full")
    client = connect(cluster(1, contribution_dir=tmp_path), "w0")
    model = opened(client, size=SIZE)
    assert not client.status()[0].troubles
    weights = model.exchange(np.ones(SIZE, np.float32))
    np.testing.assert_array_equal(weights, -1)
    (trouble,) = client.status()[0].troubles
    assert "shard-0.jsonl lacks 16 sets" in str(trouble)


def test_a_log_that_can_t_be_written_is_an_error_at_start(cluster, tmp_path) -> None:
    (tmp_path / "shard-1.jsonl").write_text("my notes\n")
    with pytest.raises(shardwell.ArgumentError, match=r"shard-1\.jsonl is no contribution log"):
        cluster(2, contribution_dir=tmp_path)
    assert (tmp_path / "shard-1.jsonl").read_text() == "my notes\n"

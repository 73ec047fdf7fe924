"""Goal: kill -9 of any shard or learner, at any moment, changes nothing of what outer steps are.

Method: real processes and a seed. What each learner offers is known by its name, the fragment and
the outer step (harness/programs/outer_worker.py), in whole numbers, so that the sums are exact.
A fixed crew must end with the weights of an undisturbed run. Where learners come and go, the shards
record who is in each chunk of each step, and a replay of that by NumPy must have the weights' bits.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.polling import PATIENCE_S, eventually
from harness.programs.outer_worker import (
    FRAGMENT_COUNT,
    LARGEST,
    NAME,
    SIZE,
    OuterWorker,
    outer_gradient,
)

BLOW_COUNT = 12
"""In each test."""


def weights_of(client: Any) -> list[tuple[np.ndarray, int]]:
    """Each fragment's, flat, and their version."""
    fragments = [client.parameter(f"{NAME}.fragment-{n}") for n in range(FRAGMENT_COUNT)]
    return [
        (next(iter(each.get_weights().values())).reshape(-1), each.version) for each in fragments
    ]


def kill_shard(running: Any, chance: random.Random) -> None:
    shard = chance.randrange(len(running.children))
    running.children[shard].kill()
    running.start_again(shard)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"overlap": 0}),
        (2, {"overlap": 2}),
        (3, {"overdue": "later"}),
        (4, {"overlap": 1, "codec": "int8"}),
    ],
)
def test_a_fixed_crew_ends_as_if_nothing_had_been(
    cluster, connect, tmp_path, seed: int, options: dict
) -> None:
    running = cluster(2, data_dir=tmp_path, processes=True)
    chance, stop_version = random.Random(seed), 60
    given = {"crew": 2, "stop_version": stop_version, "pause_s": 0.005, **options}
    with ExitStack() as stack:
        learners = {
            name: stack.enter_context(OuterWorker(running.target, name, **given))
            for name in ("w0", "w1")
        }
        deaths = 0
        for _ in range(BLOW_COUNT):
            time.sleep(chance.uniform(0.05, 0.6))
            name = chance.choice(["shard", "w0", "w1"])
            if name == "shard":
                kill_shard(running, chance)
            elif learners[name].process.poll() is None:
                learners[name].close()
                learners[name] = stack.enter_context(OuterWorker(running.target, name, **given))
                deaths += 1
        assert deaths > 1
        for learner in learners.values():
            assert learner.process.wait(2 * PATIENCE_S) == 0, learner.log
    for fragment, (weights, version) in enumerate(weights_of(connect(running, "reader"))):
        expected = np.zeros(SIZE)
        # A fragment that is taken later may be a step behind another.
        assert stop_version <= version <= stop_version + (options.get("overdue") == "later")
        for step in range(version):
            both = [outer_gradient(name, fragment, step) for name in ("w0", "w1")]
            expected -= np.mean(both, axis=0)
        # A learner that dies takes with it what int8 has rounded off its last offer, and no more;
        # so it is at the end, with what an image lacks.
        lost = 0.5 * LARGEST / 127 * (deaths + 3) if options.get("codec") == "int8" else 0.0
        assert np.abs(weights - expected).max() <= lost, (seed, fragment)


def replayed(directory: Path) -> list[np.ndarray]:
    """Each fragment's weights, as the recorded sets lead to them."""
    lines: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for path in directory.glob("shard-*.jsonl"):
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # a kill has cut it off
            key = line["parameter"], line["shard"], line["chunk"], line["step"]
            if not line.get("restored") or key not in lines:
                lines[key] = line
    weights = [np.zeros(SIZE, np.float32) for _ in range(FRAGMENT_COUNT)]
    versions: dict[tuple[str, int, int], int] = {}
    for (name, shard, chunk, step), line in sorted(lines.items()):
        assert step == versions.get((name, shard, chunk), 0), f"a step is missing before {line}"
        versions[name, shard, chunk] = step + 1
        assert len(set(line["contributors"])) == len(line["contributors"])
        fragment = int(name.rpartition("-")[2])
        where = slice(line["offset"], line["offset"] + line["size"])
        own = [outer_gradient(each, fragment, step)[where] for each in line["contributors"]]
        weights[fragment][where] -= np.sum(own, axis=0) / np.float32(len(own))
    return weights


@pytest.mark.parametrize(("seed", "overlap"), [(1, 0), (2, 2)])
def test_learners_come_go_and_die_and_a_replay_has_the_bits(
    cluster, connect, tmp_path, seed: int, overlap: int
) -> None:
    """Each life of a learner has a name of its own, so a name offers once in an outer step."""
    running = cluster(
        2, data_dir=tmp_path / "data", contribution_dir=tmp_path / "log", processes=True
    )
    chance, count = random.Random(seed), 0
    given = {"crew": 0, "pause_s": 0.01, "overlap": overlap}
    with ExitStack() as stack:

        def start() -> OuterWorker:
            nonlocal count
            count += 1
            return stack.enter_context(OuterWorker(running.target, f"w{count}", **given))

        learners = [start() for _ in range(3)]
        for _ in range(BLOW_COUNT):
            time.sleep(chance.uniform(0.1, 0.7))
            if chance.random() < 0.4:
                kill_shard(running, chance)
            else:
                learners.pop(chance.randrange(len(learners))).close()
                learners.append(start())
        for learner in learners:
            before = learner.versions
            eventually(
                f"{learner.worker_id} goes on",
                lambda learner=learner, before=before: (
                    learner.versions and (not before or min(learner.versions) > min(before) + 1)
                ),
            )
    reader = connect(running, "reader")

    def is_replayed() -> bool:
        """A step may close between the two looks, once the last members are lost."""
        found, expected = weights_of(reader), replayed(tmp_path / "log")
        return all(np.array_equal(a, b) for (a, _), b in zip(found, expected, strict=True))

    eventually(f"a replay has the weights' bits, seed {seed}", is_replayed)
    assert count > 5

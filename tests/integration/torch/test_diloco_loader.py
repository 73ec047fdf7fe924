"""Goal: a loop of DiLoCo with a loader is one state: each sample counts once an epoch, and what the
loop has beside the weights goes on with its samples.

Method: weights count visits, as sample i's gradient is 1 at place i, with inner and outer rates of
1. Programs kill themselves at places of the loop, and are started again; or are ended, and go on
from a checkpoint, on other shards, as other numbers of learners.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

import shardwell
from harness.programs.commands import Program
from harness.programs.reported import COUNT, ended, started

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

pytestmark = pytest.mark.extras
PROGRAM = """
import json
given = json.loads(sys.argv[2])
place, factor = given.get("place"), given.get("learners", 1)
crew = {"worker_count": factor}
if given.get("elastic"):
    crew = {
        "members": shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0, reference_count=1)
    }
client = shardwell.connect(worker_id=given.get("id", "w0"))
schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0)
facts = {"seen": 0, "steps": 0}
training = shardwell.torch.DiLoCo(
    model, plain, client, name="net", outer=shardwell.SGD(1.0), codec="fp32", sync_every=3,
    fragments=1, overlap=given.get("overlap", 0), alpha=float(given.get("overlap", 0) > 0),
    loader=torch.utils.data.DataLoader(data, batch_size=given.get("size", 4), shuffle=True),
    schedule=schedule, state={"facts": facts}, resume=given.get("resume"), **crew,
)
count = 0

def maybe_end(where):
    if place == [count, where]:
        os.kill(os.getpid(), signal.SIGKILL)

with training:
    print("BEGAN", facts["seen"], facts["steps"], schedule.last_epoch,
          int(model.visits.sum()), flush=True)
    for epoch in training.loader.epochs(3):
        for indices, in training.loader:
            maybe_end("drawn")
            (factor * model(indices)).backward()
            maybe_end("backward")
            plain.step()
            maybe_end("stepped")
            schedule.step()
            facts["seen"] += len(indices)
            facts["steps"] += 1
            plain.zero_grad()
            count += 1
            maybe_end("tail")
            if count == given.get("save"):
                training.save(given["path"])
                sys.exit(0)
    print("ENDED", facts["seen"], facts["steps"], schedule.last_epoch,
          *sorted(set(model.visits.tolist())), flush=True)
"""


def start(target: str, **given: Any) -> Program:
    return started(target, PROGRAM, json.dumps(given))


def line(program: Program, word: str) -> list[float]:
    (found,) = (each.split()[1:] for each in program.lines if each.startswith(word))
    return [float(each) for each in found]


def run(target: str, **given: Any) -> Program:
    with start(target, **given) as program:
        ended(program)
        return program


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_loop_that_is_killed_anywhere_goes_on_with_its_samples_and_objects(
    cluster, elastic: bool
) -> None:
    target = cluster(1).target  # as a kill may leave an offer in one of several shards
    places = [(1, "drawn"), (2, "stepped"), (3, "tail"), (5, "backward"), (6, "tail"), None]
    for place in places:
        program = run(target, overlap=1, place=place, elastic=elastic)
        seen, steps, epoch, visits = line(program, "BEGAN")
        assert (seen, epoch) == (visits, steps), place
    seen, steps, epoch, *visits = line(program, "ENDED")
    assert (seen, epoch, visits) == (3 * COUNT, steps, [3.0])


def test_without_overlap_only_what_follows_the_step_of_an_offer_is_lost(cluster) -> None:
    target = cluster(1).target
    run(target, place=(2, "stepped"))
    program = run(target, place=(4, "tail"))
    seen, _, _, visits = line(program, "BEGAN")
    assert visits - seen == 4  # of the inner step whose offer counted
    program = run(target)
    assert line(program, "ENDED")[3:] == [3.0]


def test_two_learners_end_together_after_one_was_killed(cluster) -> None:
    target = cluster(1).target
    with start(target, learners=2) as first:
        run(target, learners=2, id="w1", place=(4, "backward"))
        again = run(target, learners=2, id="w1")
        ended(first)
    for each in (first, again):
        assert line(each, "ENDED")[3:] == [3.0], each.lines


@pytest.mark.parametrize("learners", [1, 2])
def test_a_checkpoint_goes_on_with_other_shards_learners_and_batches(
    cluster, tmp_path, learners: int
) -> None:
    path = str(tmp_path / "saved")
    run(cluster(2).target, save=7, path=path)
    target = cluster(3).target
    given = {"learners": learners, "size": 5, "resume": path}
    with start(target, id="w0", **given) as first:
        others = [run(target, id=f"w{i}", **given) for i in range(1, learners)]
        ended(first)
    for each in (first, *others):
        assert line(each, "BEGAN") == [24.0, 6.0, 6.0, 24.0]  # of two offers
        assert line(each, "ENDED")[3:] == [3.0]


def test_what_a_scaler_skips_or_a_program_throws_away_is_dealt_again(cluster, connect) -> None:
    weights = torch.nn.Parameter(torch.zeros(8))
    model = torch.nn.Module()
    model.visits = weights
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
    with shardwell.torch.DiLoCo(
        model,
        inner,
        connect(cluster(1), "w0"),
        name="skips",
        outer=shardwell.SGD(1.0),
        codec="fp32",
        sync_every=2,
        fragments=1,
        overlap=0,
        loader=loader,
    ) as training:
        assert training.loader is not None
        turns = itertools.count()
        for _ in training.loader.epochs(2):
            for indices in training.loader:
                (-weights[indices].sum()).backward()
                if next(turns) not in (1, 4):
                    inner.step()
                inner.zero_grad()
        assert weights.tolist() == [2.0] * 8
    assert "zero_grad" not in vars(inner)


def test_a_loader_that_cannot_be_dealt_is_refused_before_anything_is_made(cluster, connect) -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    client = connect(cluster(1), "w0")
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 4, 4)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), sampler=sampler)
    with pytest.raises(shardwell.ArgumentError, match="WeightedRandomSampler of its own"):
        shardwell.torch.DiLoCo(model, inner, client, name="refused", loader=loader)
    with pytest.raises(shardwell.ArgumentError, match="schedule must be a scheduler"):
        shardwell.torch.DiLoCo(model, inner, client, name="refused", schedule=3)
    assert client.status()[0].parameters == ()

"""Goal: a torch training goes on while workers come, die, stand still and come back.

Method: worker processes with models of their own first weights and batches of their own, and a
user's loop: accumulation, clipping, a GradScaler. Replicas that have counted one step must have the
same bits after it; the loss falls; and who comes later never brings its weights.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shardwell
from harness.polling import PATIENCE_S, Stopwatch
from harness.programs.elastic_training import ElasticTraining, counted_by
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402
from harness.programs.elastic_torch_worker import PATH as PROGRAM  # noqa: E402
from harness.programs.elastic_torch_worker import net  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1)
ELASTIC = shardwell.Elastic(max_count=4)
BOUNDS = {"member_return_s": 0.3, "member_lease_s": 1.0}


@pytest.fixture
def training(tmp_path) -> Iterator[Callable[..., ElasticTraining]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: ElasticTraining(stack, tmp_path, PROGRAM, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"skips_every": 7},
        {"scales": False, "overlap": True},
        {"scales": False, "clip_norm": 1.0, "late": "carry"},
    ],
    ids=["scaler", "overlap", "clip_norm"],
)
def test_one_of_three_is_killed_and_started_again(training, options) -> None:
    run = training(**options)
    first, second, third = (run.start(f"w{n}", seed=n) for n in range(3))
    first.until(counted_by("w0", "w1", "w2"))
    third.process.kill()
    lost = first.until(counted_by("w0", "w1"))
    second.until(counted_by("w0", "w1"))
    again = run.start("w2", seed=9)
    assert again.found[0]["opened"] >= lost["version"]
    again.until(counted_by("w0", "w1", "w2"))
    first.until(counted_by("w0", "w1", "w2"))
    for _ in range(20):
        again.read()
    assert run.finish() > lost["version"]


def test_one_that_joins_at_half_has_the_cluster_s_weights_and_not_its_own(training) -> None:
    run = training()
    first = run.start("w0", seed=0)
    for _ in range(20):
        half = first.read()
    newcomer = run.start("w1", seed=1)
    opened = newcomer.found[0]
    assert opened["opened"] >= half["version"]
    first.until(lambda line: line["version"] > opened["opened"])
    digests = {line["version"]: line["digest"] for line in first.found if "version" in line}
    assert opened["digest"] == digests[opened["opened"]]
    joined = newcomer.until(counted_by("w0", "w1"))
    assert joined["loss"] < first.found[1]["loss"]
    for _ in range(20):
        newcomer.read()
    run.finish()


def test_one_that_stands_still_for_longer_than_its_lease_comes_back(training) -> None:
    run = training(**BOUNDS)
    first, second = (run.start(f"w{n}", seed=n) for n in range(2))
    first.until(counted_by("w0", "w1"))
    second.send(signal.SIGSTOP)
    first.until(counted_by("w0"))
    second.send(signal.SIGCONT)
    second.until(lambda line: line.get("counted") in ("part", "none"))
    second.until(counted_by("w0", "w1"))
    for _ in range(10):
        second.read()
    run.finish()
    assert any("takes part again" in line for line in second.log)


def test_a_quorum_goes_on_without_the_slow_one_which_ends_with_its_weights(training) -> None:
    run = training(min_contributors=1, grace_s=0.02)
    fast = run.start("w0", seed=0)
    slow = run.start("w1", seed=1, pause_s=0.3)
    fast.until(counted_by("w0"))
    late = slow.until(lambda line: line.get("counted") == "none")
    assert late["version"] > late["step"]
    fast.until(lambda line: line["version"] > late["version"])
    for _ in range(10):
        slow.read()
    run.finish(has_shared_steps=False)


# In one process.


def opened(client, model=None, **options: Any) -> Any:
    given = {"members": ELASTIC, "codec": "fp32", "timeout_s": 20.0, **options}
    return shardwell.torch.ServerOptimizer(net(3) if model is None else model, client, SGD, **given)


def train(model: Any, optimizer: Any) -> None:
    model(torch.ones(4, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(shardwell.ArgumentError, match=text):
        call()


def test_who_makes_a_step_is_given_once(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    refused(lambda: opened(client, worker_count=2), "worker_count= and members= both")
    refused(lambda: opened(client, members=4), "members must be shardwell.Elastic; got 4")
    refused(lambda: opened(client, mode="async"), "members= needs mode='sync'")
    refused(lambda: opened(client, late="never"), "late must be 'drop' or 'carry'")
    refused(
        lambda: opened(client, min_contributors=5), "min_contributors must be at most max_count"
    )
    refused(lambda: opened(client, grace_s=1.0), "give min_contributors, too")
    assert opened(client).outcome is None
    fixed = shardwell.torch.ServerOptimizer(net(3), client, SGD, name="fixed")
    assert fixed.parameter.spec.crew == "1 worker"


def test_a_newcomer_takes_the_first_worker_s_buffers_at_once(cluster, connect) -> None:
    running = cluster(2)

    def model_of(value: float) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(20, 3), torch.nn.BatchNorm1d(3))
        model[1].running_mean.fill_(value)
        model[1].num_batches_tracked.fill_(int(value))
        return model

    first = model_of(5.0)
    optimizer = opened(connect(running, "w0"), first)
    first.eval()
    for _ in range(3):
        train(first, optimizer)
    model = model_of(7.0)
    newcomer = opened(connect(running, "w1"), model)
    assert newcomer.next_step == 3
    assert model[1].running_mean.tolist() == [5.0] * 3
    assert int(model[1].num_batches_tracked) == 5
    assert torch.equal(model[0].weight, first[0].weight)
    refused(newcomer.average_buffers, "with members= these are not known")
    opened(connect(running, "w2"), net(1), name="no-buffers").average_buffers()  # nothing to do


def test_frozen_tensors_of_a_newcomer_are_compared(cluster, connect) -> None:
    running = cluster(1)

    def model_of(seed: int) -> Any:
        model = net(seed)
        model[0].requires_grad_(False)
        return model

    opened(connect(running, "w0"), model_of(1), broadcast_frozen=True)
    model = model_of(2)
    opened(connect(running, "w1"), model, broadcast_frozen=True)
    assert torch.equal(model[0].weight, net(1)[0].weight)
    with pytest.raises(shardwell.SpecMismatchError, match="frozen tensor"):
        opened(connect(running, "w2"), model_of(3))


def test_nobody_pushes_weights_where_workers_come_and_go(cluster, connect) -> None:
    model = net(3)
    optimizer = opened(connect(cluster(1), "w0"), model)
    train(model, optimizer)
    before = optimizer.parameter.get_weights()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    refused(optimizer.push_weights, r"push_weights\(\) waits until all workers call it")
    optimizer.saves_values = True
    refused(optimizer.state_dict, "saves_values is for a fixed worker_count")
    assert optimizer.next_step == 1
    for name, array in optimizer.parameter.get_weights().items():
        assert (array == before[name]).all()


def test_a_state_of_an_earlier_step_is_taken_and_one_of_a_later_is_not(cluster, connect) -> None:
    running = cluster(1)
    first, second = net(1), net(2)
    optimizer = opened(connect(running, "w0"), first)
    optimizer.param_groups[0]["lr"] = 0.05
    train(first, optimizer)
    state = optimizer.state_dict()
    for _ in range(2):
        train(first, optimizer)
    newcomer = opened(connect(running, "w1"), second)
    newcomer.load_state_dict(state)
    assert newcomer.param_groups[0]["lr"] == 0.05
    assert newcomer.next_step == 3
    assert torch.equal(first[0].weight, second[0].weight)
    other = opened(connect(running, "w2"), net(1), name="another")
    renamed = {**state, "shardwell": {**state["shardwell"], "name": "another"}}
    refused(lambda: other.load_state_dict(renamed), "the cluster is at step 0")
    values = {**renamed, "shardwell_values": {}}
    refused(lambda: other.load_state_dict(values), "state with values waits until all workers")
    refused(lambda: other.load_state_dict(state), "make it with name='model'")


def test_a_table_in_the_model_that_waits_for_its_workers_is_refused(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    table = client.table("rows", row_count=100, dim=4, optimizer=shardwell.SGD(0.1))
    model = torch.nn.ModuleList([shardwell.torch.Embedding(table), torch.nn.Linear(4, 1)])
    refused(lambda: opened(client, model), "table 'rows' of the model has 1 worker for good")
    free = client.table("free", row_count=100, dim=4, optimizer=shardwell.SGD(0.1), mode="async")
    opened(client, torch.nn.ModuleList([shardwell.torch.Embedding(free), torch.nn.Linear(4, 1)]))


def test_tables_in_the_model_have_members_that_come_and_go(cluster, connect) -> None:
    running = cluster(2)

    def made(worker_id: str, seed: int) -> tuple[Any, Any]:
        client = connect(running, worker_id)
        table = client.table(
            "rows", row_count=50, dim=4, optimizer=shardwell.SGD(0.1), codec="fp32", members=ELASTIC
        )
        torch.manual_seed(seed)
        layers = (shardwell.torch.Embedding(table), torch.nn.Flatten(), torch.nn.Linear(12, 3))
        model = torch.nn.Sequential(*layers)
        return model, opened(client, model)

    ids = torch.arange(48).reshape(16, 3)

    def step(model: Any, optimizer: Any) -> None:
        torch.nn.functional.cross_entropy(model(ids), ids[:, 0] % 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    def leave(model: Any, optimizer: Any) -> None:
        optimizer.parameter.leave()
        model[0].table.leave()

    stays = made("w0", 0)
    step(*stays)
    for number in (1, 2):
        comes = made(f"w{number}", number)
        has_counted = threading.Event()

        def others(until: threading.Event = has_counted) -> None:
            while not until.is_set():
                step(*stays)

        def own(comes: Any = comes, until: threading.Event = has_counted) -> None:
            (model, optimizer), watch = comes, Stopwatch()
            try:
                while not optimizer.outcome or optimizer.outcome.counted != "all":
                    assert watch.elapsed_s < PATIENCE_S, optimizer.outcome
                    step(model, optimizer)
                assert model[0].table.outcome.counted == "all"
            finally:
                until.set()
                leave(model, optimizer)

        together([others, own])
        assert comes[1].outcome.contributors == ("w0", f"w{number}")
        for _ in range(2):  # what it gave last may be in the next step of one of them
            step(*stays)
        assert stays[1].outcome.contributors == ("w0",)
        assert stays[0][0].table.outcome.contributors == ("w0",)


def test_a_scaler_leaves_scaling_back_to_an_elastic_member_that_is_alone(cluster, connect) -> None:
    model = net(3)
    optimizer = opened(connect(cluster(1), "w0"), model, members=shardwell.Elastic(max_count=1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [each.detach().clone() for each in model.parameters()]
    for factor in (float("inf"), 1.0):
        scaler.scale(factor * model(torch.ones(4, 20)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (factor != 1.0)
    assert optimizer.next_step == 2

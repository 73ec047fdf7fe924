"""Goal: what a program saves and loads with torch's means goes on as without a break, or says what
it needs; never with an optimizer that begins anew without a word.

Method: Adam with large gradients first, so that its arrays matter; torch.save and torch.load as
frameworks use them; the same training without a break beside it. Skipped where torch is not
installed (`make test-extras`).
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.torch_models import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402
from shardwell.torch.optimizer_state import Meeting, PushedValues  # noqa: E402

ADAM = shardwell.Adam(learning_rate=0.05)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 3)


def train(model: Any, optimizer: Any, first: int, stop: int) -> None:
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(step)
        loss = (model(torch.randn(8, 6, generator=generator)) - 1).square().mean()
        (loss * (10.0 if step < 5 else 0.1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(model: Any, client: shardwell.Client, **options: Any) -> Any:
    return shardwell.torch.ServerOptimizer(model, client, ADAM, codec="fp32", **options)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved(model: Any, optimizer: Any) -> dict[str, Any]:
    return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def test_a_program_that_loads_what_it_saved_last_goes_on(cluster, connect) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    model = net()
    optimizer = made(model, client)
    train(model, optimizer, 0, 5)
    found = saved(model, optimizer)
    client.close()
    again = net(seed=1)
    optimizer = made(again, connect(running, "w0"))
    again.load_state_dict(found["model"])  # after the optimizer was made, as frameworks do
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.05
    train(again, optimizer, optimizer.next_step, 10)
    whole = net()
    train(whole, made(whole, connect(cluster(2), "w0")), 0, 10)
    assert_same(again, whole)


def test_a_new_cluster_needs_the_checkpoint(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    model = net()
    optimizer = made(model, client)
    train(model, optimizer, 0, 5)
    found = saved(model, optimizer)
    client.save_checkpoint(tmp_path / "ckpt")
    train(model, optimizer, 5, 10)

    new = connect(cluster(3), "w0")
    again = net()
    again.load_state_dict(found["model"])
    bare = made(again, new)
    words = r"of step 5 of parameter 'model', and the cluster is at step 0.*restore_checkpoint\(\)"
    with pytest.raises(shardwell.ArgumentError, match=words):
        bare.load_state_dict(found["optimizer"])

    restored = connect(cluster(3), "w0")
    restored.restore_checkpoint(tmp_path / "ckpt")
    again = net()
    optimizer = made(again, restored)
    again.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    train(again, optimizer, optimizer.next_step, 10)
    assert_same(again, model)


def test_a_cluster_that_went_on_says_where_it_is(cluster, connect) -> None:
    model = net()
    optimizer = made(model, connect(cluster(2), "w0"))
    train(model, optimizer, 0, 3)
    found = saved(model, optimizer)
    train(model, optimizer, 3, 5)
    words = r"of step 3 of .* the cluster is at step 5; to go on there, load no state.*next_step"
    with pytest.raises(shardwell.ArgumentError, match=words):
        optimizer.load_state_dict(found["optimizer"])
    model.load_state_dict(found["model"])
    with pytest.raises(shardwell.ArgumentError, match="the shards, at step 5, do not have them"):
        train(model, optimizer, 5, 6)
    assert optimizer.next_step == 5


@pytest.mark.parametrize("shard_count", [1, 3])
def test_a_state_with_values_goes_on_on_a_new_cluster(cluster, connect, shard_count) -> None:
    model = net()
    optimizer = made(model, connect(cluster(2), "w0"))
    train(model, optimizer, 0, 5)
    optimizer.saves_values = True
    found = saved(model, optimizer)
    train(model, optimizer, 5, 10)
    again = net(seed=1)
    optimizer = made(again, connect(cluster(shard_count), "w0"))
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.next_step == 5
    train(again, optimizer, 5, 10)
    assert_same(again, model)


def test_workers_go_back_together(cluster, connect) -> None:
    """To a step before, of which all load the state; then the same steps lead to the same bits."""
    running = cluster(2)
    models = [net(), net()]
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    optimizers = [
        made(model, client, worker_count=2) for model, client in zip(models, clients, strict=True)
    ]

    def steps(first: int, stop: int) -> None:
        together([lambda r=r: train(models[r], optimizers[r], first, stop) for r in range(2)])

    steps(0, 3)
    for optimizer in optimizers:
        optimizer.saves_values = True
    states = [saved(*each) for each in zip(models, optimizers, strict=True)]
    steps(3, 6)
    expected = [each.detach().clone() for each in models[0].parameters()]
    together([lambda r=r: optimizers[r].load_state_dict(states[r]["optimizer"]) for r in range(2)])
    for model in models:
        for mine, its in zip(model.parameters(), states[0]["model"].values(), strict=True):
            assert torch.equal(mine, its)
    steps(3, 6)
    for model in models:
        assert all(torch.equal(*each) for each in zip(model.parameters(), expected, strict=True))


def test_weights_are_pushed_by_all_or_not_at_all(cluster, connect) -> None:
    running = cluster(2)
    models, alone = [net(), net()], net(seed=5)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    optimizers = [
        made(model, client, worker_count=2) for model, client in zip(models, clients, strict=True)
    ]

    def steps(first: int, stop: int) -> None:
        together([lambda r=r: train(models[r], optimizers[r], first, stop) for r in range(2)])

    steps(0, 2)
    kept = {name: each.clone() for name, each in models[0].state_dict().items()}

    others = {seed: net(seed).state_dict() for seed in (5, 6)}

    def push(seed: int, rank: int) -> None:
        models[rank].load_state_dict(others[seed])
        optimizers[rank].push_weights()

    def refused(seed: int, rank: int) -> None:
        with pytest.raises(shardwell.ArgumentError, match=r"push different values .* nothing was"):
            push(seed, rank)

    optimizers[0].timeout_s = 3.0
    models[0].load_state_dict(others[5])
    with pytest.raises(shardwell.WorkersMissingError, match=r"'model.pushed': .* missing of 2 w"):
        optimizers[0].push_weights()
    optimizers[0].timeout_s = None
    together([lambda: refused(5, 0), lambda: refused(6, 1)])
    assert [optimizer.next_step for optimizer in optimizers] == [2, 2]
    for model in models:
        model.load_state_dict(kept)
    steps(2, 3)

    together([lambda: push(5, 0), lambda: push(5, 1)])
    assert [optimizer.next_step for optimizer in optimizers] == [0, 0]
    steps(0, 3)
    train(alone, torch.optim.Adam(alone.parameters(), 0.05), 0, 3)
    for model in models:
        assert_same(model, alone, rtol=1e-4, atol=1e-5)


def test_a_push_that_was_given_up_for_another(cluster, connect) -> None:
    """What it brought was counted: the others get an error once, and then all agree."""
    running = cluster(2)
    models = [net(), net()]
    optimizers = [
        made(model, connect(running, f"w{rank}"), worker_count=2)
        for rank, model in enumerate(models)
    ]
    others = {seed: net(seed).state_dict() for seed in (5, 6)}
    optimizers[0].timeout_s = 3.0
    models[0].load_state_dict(others[5])
    with pytest.raises(shardwell.WorkersMissingError):
        optimizers[0].push_weights()
    optimizers[0].timeout_s = None
    for model in models:
        model.load_state_dict(others[6])

    def second() -> None:
        with pytest.raises(shardwell.ArgumentError, match="nothing was changed"):
            optimizers[1].push_weights()
        optimizers[1].push_weights()

    together([optimizers[0].push_weights, second])
    together([lambda r=r: train(models[r], optimizers[r], 0, 2) for r in range(2)])
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_worker_that_starts_again_in_the_middle_of_a_push(cluster, connect) -> None:
    """No worker goes on with the weights that it made the parameter with: all push once more."""
    running = cluster(2)
    models = [net(), net()]
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    optimizers = [
        made(model, client, worker_count=2) for model, client in zip(models, clients, strict=True)
    ]
    pushed = net(seed=5).state_dict()
    for model in models:
        model.load_state_dict(pushed)
    weights = np.concatenate(
        [
            models[1].get_parameter(t.name).detach().reshape(-1)
            for t in optimizers[1].parameter.spec.layout
        ]
    )
    meeting = Meeting(clients[1], "model", 2)
    first = in_background(optimizers[0].push_weights)
    assert meeting.agrees(PushedValues({"weights": weights}).digest, 60.0)
    clients[1].close()  # as a process that ends before it has shown that it deleted
    eventually(
        "the other has deleted it",
        lambda: all(each.spec.name != "model" for each in clients[0].status()[0].parameters),
    )
    models[1] = net(seed=9)
    optimizers[1] = made(models[1], connect(running, "w1"), worker_count=2)
    with pytest.raises(shardwell.ArgumentError, match="different values"):
        optimizers[1].push_weights()
    with pytest.raises(shardwell.ArgumentError, match=r"was started again while .* push once more"):
        first.result(PATIENCE_S)
    optimizers[0] = made(models[0], clients[0], worker_count=2)
    for model in models:
        model.load_state_dict(pushed)
    together([optimizers[0].push_weights, optimizers[1].push_weights])
    for model in models:
        assert torch.equal(model.weight, pushed["weight"])


def test_values_that_do_not_fit_are_refused_by_name(cluster, connect) -> None:
    model = net()
    optimizer = made(model, connect(cluster(2), "w0"))
    train(model, optimizer, 0, 2)
    optimizer.saves_values = True
    state = through_a_file(optimizer.state_dict())
    train(model, optimizer, 2, 3)
    values = state["shardwell_values"]
    weights = {**values["weights"], "bias": torch.zeros(4)}
    for found, words in (
        ({}, r"values of \[\]; expected \['weights', 'exp_avg', 'exp_avg_sq'\] of Adam"),
        ({**values, "weights": weights}, r"'weights' of tensor 'bias' has shape \(4,\), expected"),
        ({**values, "exp_avg": {}}, r"'exp_avg' of tensor '.*' has shape None, expected"),
        ([], "values of 'list'"),
    ):
        with pytest.raises(shardwell.ArgumentError, match=words):
            optimizer.load_state_dict({**state, "shardwell_values": found})
    assert optimizer.next_step == 3
    train(model, optimizer, 3, 4)


def test_states_of_other_trainings_are_refused_by_name(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    model, other = net(), net(seed=1)
    optimizer = made(model, client)
    second = made(other, client, name="second")
    for each, of in ((model, optimizer), (other, second)):
        train(each, of, 0, 3)
    state = through_a_file(optimizer.state_dict())
    theirs = torch.optim.AdamW(other.parameters(), 0.01)
    own = net()
    plain = torch.optim.SGD(own.parameters(), 0.01)
    train(own, plain, 0, 1)
    (other(torch.ones(2, 6)).sum()).backward()
    theirs.step()
    groups = [{**state["param_groups"][0], "betas": (0.5, 0.5)}]
    another = net(seed=2)
    elsewhere = made(another, connect(cluster(2), "w0"))
    train(another, elsewhere, 0, 3)
    for to, found, words in (
        (optimizer, theirs.state_dict(), r"another optimizer's state, of 2 tensors with \['exp_av"),
        (optimizer, plain.state_dict(), "no state of a ServerOptimizer|another optimizer's state"),
        (optimizer, [], "got list"),
        (optimizer, {**state, "shardwell": {"name": "model"}}, "must have a name, a version and"),
        (optimizer, {**state, "shardwell": {**state["shardwell"], "version": -1}}, "must have a n"),
        (second, state, "is of parameter 'model', and this ServerOptimizer has 'second'"),
        (elsewhere, state, "of another training: its weights at step 3 of parameter 'model'"),
        (optimizer, {**state, "param_groups": groups}, r"param_groups\[0\] has .*'betas'"),
        (optimizer, {**state, "param_groups": []}, "different number of parameter groups"),
    ):
        before = [dict(group) for group in to.param_groups]
        with pytest.raises(shardwell.ArgumentError, match=words):
            to.load_state_dict(found)
        assert [dict(group) for group in to.param_groups] == before
    train(model, optimizer, 3, 4)


def test_no_state_in_the_middle_of_a_step(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(8)])
    optimizer = made(model, client, overlap=True)
    model(torch.randn(2, 20)).sum().backward()
    with pytest.raises(shardwell.ArgumentError, match="in the middle of a step"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["shardwell"]["version"] == 1

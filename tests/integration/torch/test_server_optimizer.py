"""Goal: ServerOptimizer trains as torch's own optimizer would, and says what it can't.

Method: the same model, data and seeds by torch alone and on a cluster with small chunks, fp32;
losses agree within float tolerance. Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background, together
from harness.torch_models import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

STEPS = 100
SGD = shardwell.SGD(learning_rate=0.1, momentum=0.9)
ADAM_W = shardwell.AdamW(learning_rate=1e-2, weight_decay=0.1)


def net(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 30), torch.nn.Linear(30, 3)
    )


def deep(seed: int = 1) -> Any:
    """Of many layers, of which the last leave while backward is at the first."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 40),
        *[torch.nn.Linear(40, 40) for _ in range(8)],
        torch.nn.Linear(40, 3),
    )


def wide(seed: int = 1) -> Any:
    """With a layer that is worth sending from where it lies."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 13200), torch.nn.Tanh(), torch.nn.Linear(13200, 3)
    )


def batches(count: int = STEPS, size: int = 16) -> list[tuple[Any, Any]]:
    torch.manual_seed(7)
    return [(torch.randn(size, 20), torch.randint(0, 3, (size,))) for _ in range(count)]


def train(model: Any, optimizer: Any, data: list[Any], after: Callable[[], Any] | None = None):
    """The losses."""
    losses = []
    for inputs, targets in data:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
        losses.append(loss.item())
    return losses


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What workers have logged; shards of the same process have a logger of their own."""
    return [each.getMessage() for each in caplog.records if each.name == "shardwell"]


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2, chunk_size_bytes=256), "w0")


def server(model: Any, client: shardwell.Client, rule: Any = SGD, **options: Any) -> Any:
    given = {"codec": "fp32", "overlap": True, **options}
    return shardwell.torch.ServerOptimizer(model, client, rule, **given)


@pytest.mark.parametrize("overlap", [True, False, "auto"])
@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (ADAM_W, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    ],
)
def test_losses_are_torchs(client, rule, theirs, overlap) -> None:
    model, alone = net(), net()
    with_schedule = server(model, client, rule, overlap=overlap)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(with_schedule, STEPS)
    found = train(model, with_schedule, batches(), schedule.step)
    reference = theirs(alone.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(reference, STEPS)
    expected = train(alone, reference, batches(), schedule.step)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert_same(model, alone, rtol=1e-3, atol=1e-4)


def test_workers_train_as_one_with_all_their_samples(cluster, connect) -> None:
    running, data = cluster(2, chunk_size_bytes=256), batches(30, 24)
    models = [net(seed=1), net(seed=2)]  # of which the first one's weights count

    def work(rank: int) -> Any:
        model = models[rank]
        client = connect(running, f"w{rank}")
        if rank:
            eventually(
                "the first has set them",
                lambda: any(entry.initialized for entry in client.status()[0].parameters),
            )
        optimizer = server(model, client, worker_count=2)
        rows = slice(0, 16) if rank == 0 else slice(16, 24)
        optimizer.sample_count = 16 if rank == 0 else 8
        return train(model, optimizer, [(x[rows], y[rows]) for x, y in data]), model

    (first, model), (second, _) = together([lambda: work(0), lambda: work(1)])
    alone = net(seed=1)
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), data)
    means = (16 * np.array(first) + 8 * np.array(second)) / 24
    np.testing.assert_allclose(means, expected, rtol=1e-3, atol=1e-5)
    assert_same(model, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("worker_count", [1, 2])
def test_a_gradients_norm_is_clipped_as_torchs(cluster, connect, worker_count) -> None:
    running, data = cluster(2, chunk_size_bytes=256), batches(30, 16)
    rule = shardwell.AdamW(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.3)
    share = 16 // worker_count
    models = [net() for _ in range(worker_count)]  # torch's generator is for one thread at a time

    def work(rank: int) -> Any:
        model = models[rank]
        optimizer = server(model, connect(running, f"w{rank}"), rule, worker_count=worker_count)
        own = slice(rank * share, (rank + 1) * share)
        train(model, optimizer, [(inputs[own], targets[own]) for inputs, targets in data])
        return model

    found = together([lambda rank=rank: work(rank) for rank in range(worker_count)])[0]
    alone, norms = net(), []
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.1)
    for inputs, targets in data:
        torch.nn.functional.cross_entropy(alone(inputs), targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)))
        reference.step()
        reference.zero_grad()
    assert max(norms) > 0.3
    assert_same(found, alone, rtol=1e-3, atol=1e-4)


def test_groups_have_rates_and_decays_of_their_own(client) -> None:
    model, alone = net(), net()

    def groups(of: Any) -> list[dict[str, Any]]:
        weights = [p for p in of.parameters() if p.ndim > 1]
        biases = [p for p in of.parameters() if p.ndim == 1]
        return [{"params": weights}, {"params": biases, "lr": 0.05, "weight_decay": 0.0}]

    mine = server(model, client, ADAM_W, param_groups=groups(model))
    theirs = torch.optim.AdamW(groups(alone), lr=1e-2, weight_decay=0.1)
    losses = []
    for of, optimizer in ((model, mine), (alone, theirs)):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        losses.append(train(of, optimizer, batches(40), schedule.step))
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-5)
    bias = client.parameter("model").spec.layout.by_name["0.bias"]
    assert bias.options == shardwell.TensorOptions(
        learning_rate_factor=5.0, weight_decay=0.0, rate_group=2
    )


def test_gradients_leave_while_backward_goes_on(cluster, connect) -> None:
    client = connect(cluster(2, chunk_size_bytes=1024), "w0")
    model = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(12)])
    optimizer = server(model, client)
    before = client.traffic.sent_bytes
    loss = model(torch.randn(4, 60)).sum()
    loss.backward()
    eventually("some have left", lambda: client.traffic.sent_bytes > before + 10_000)
    assert optimizer.parameter.next_step == 0
    optimizer.step()
    assert optimizer.parameter.next_step == 1
    first, *_, last = client.parameter("model").spec.layout
    assert (first.name, last.name) == ("11.bias", "0.weight")


@pytest.mark.parametrize("overlap", [True, False, "auto"])
def test_batches_accumulate_under_no_sync(client, overlap, caplog) -> None:
    model, alone = net(), net()
    optimizer = server(model, client, overlap=overlap)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for first, second in zip(batches(10)[::2], batches(10)[1::2], strict=True):
        for of in (model, alone):
            with optimizer.no_sync():
                torch.nn.functional.cross_entropy(of(first[0]), first[1]).backward()
            torch.nn.functional.cross_entropy(of(second[0]), second[1]).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    assert_same(model, alone, rtol=1e-4, atol=1e-5)
    assert not logged(caplog)  # overlap goes on


def test_a_second_backward_is_told_how_to_accumulate(client) -> None:
    model = deep()
    optimizer = server(model, client)
    model(torch.randn(2, 20)).sum().backward()
    words = r"tensor '9.bias' has a second gradient in one step.*no_sync\(\)"
    with pytest.raises(shardwell.ArgumentError, match=words):
        model(torch.randn(2, 20)).sum().backward()
    with pytest.raises(shardwell.ArgumentError, match=r"zero_grad\(\) after a backward .*no_sync"):
        optimizer.zero_grad()
    train(model, optimizer, batches(2))
    assert optimizer.parameter.next_step == 3  # the one that had left in part, and two


def test_gradients_for_no_step(client) -> None:
    """Another loss through the same model, as of a GAN's generator."""
    model, alone = net(), net()
    optimizer = server(model, client)
    with optimizer.no_sync():
        model(torch.randn(2, 20)).sum().backward()
    optimizer.zero_grad()
    train(model, optimizer, batches(3))
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), batches(3))
    assert_same(model, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["learning_rate", "sample_count"])
def test_what_is_set_after_gradients_began_to_leave(client, what) -> None:
    model = deep()
    optimizer = server(model, client)
    model(torch.randn(2, 20)).sum().backward()
    if what == "sample_count":
        optimizer.sample_count = 2
    else:
        optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(shardwell.ArgumentError, match=rf"{what} was .* when gradients began to"):
        optimizer.step()


def test_a_scaler_needs_gradients_that_have_not_left(client) -> None:
    model, alone = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = server(model, client)
    scaler.scale(model(torch.randn(2, 20)).sum()).backward()
    with pytest.raises(shardwell.ArgumentError, match=r"GradScaler .*overlap=False"):
        scaler.step(optimizer)
    optimizer.step()  # without it, scaled as they were
    optimizer.close()
    model.zero_grad()
    model.load_state_dict(alone.state_dict())
    late = server(model, client, overlap=False, name="late")
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(3):
        for of, each in ((model, late), (alone, theirs)):
            own = torch.amp.GradScaler("cpu", init_scale=1024.0)
            own.scale(torch.nn.functional.cross_entropy(of(inputs), targets)).backward()
            own.step(each)
            each.zero_grad()
    assert_same(model, alone, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives(client) -> None:
    model = net()
    optimizer = server(model, client)
    for _ in range(2):
        model(torch.randn(2, 20)).sum().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.parameter.next_step == 2


def test_a_step_that_failed_is_made_good_by_the_next(cluster, connect) -> None:
    running, data = cluster(2, chunk_size_bytes=256), batches(4)
    models = [net(), net()]
    optimizers = [
        server(model, connect(running, f"w{rank}"), worker_count=2)
        for rank, model in enumerate(models)
    ]
    optimizers[0].timeout_s = 3.0
    for again in ("step", "batch"):
        torch.nn.functional.cross_entropy(models[0](data[0][0]), data[0][1]).backward()
        with pytest.raises(shardwell.WorkersMissingError, match="w1"):
            optimizers[0].step()
        optimizers[0].timeout_s = 60.0

        def first(again: str = again) -> None:
            if again == "batch":
                optimizers[0].zero_grad()
                torch.nn.functional.cross_entropy(models[0](data[1][0]), data[1][1]).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()

        def second(again: str = again) -> None:
            train(models[1], optimizers[1], data[: 1 if again == "step" else 2])

        together([first, second])
        assert optimizers[0].parameter.next_step == (1 if again == "step" else 3)
        assert_same(*models)
        optimizers[0].timeout_s = 3.0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_failed_counts_with_the_gradients_that_it_had(
    cluster, connect, overlap
) -> None:
    """Also where they were sent from the model's own memory, which is written to since."""
    running, data = cluster(2, chunk_size_bytes=1 << 16), batches(2)
    models, alone = [wide(), wide()], wide()
    optimizers = [
        server(model, connect(running, f"w{rank}"), worker_count=2, overlap=overlap)
        for rank, model in enumerate(models)
    ]
    expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def backward(model: Any, number: int) -> None:
        torch.nn.functional.cross_entropy(model(data[number][0]), data[number][1]).backward()

    backward(models[0], 0)
    optimizers[0].timeout_s = 3.0
    with pytest.raises(shardwell.WorkersMissingError, match="w1"):
        optimizers[0].step()
    optimizers[0].timeout_s = 60.0
    optimizers[0].zero_grad(set_to_none=False)
    backward(models[0], 1)
    together([optimizers[0].step, lambda: train(models[1], optimizers[1], data)])

    backward(alone, 1)
    stale = [each.grad.clone() for each in alone.parameters()]
    alone.zero_grad()
    train(alone, expected, data[:1])
    backward(alone, 1)
    for each, other in zip(alone.parameters(), stale, strict=True):
        each.grad.add_(other).div_(2)
    expected.step()
    for model in models:
        assert_same(model, alone, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_clipped_after_they_left(client) -> None:
    model, alone = deep(), deep()
    optimizer = server(model, client)
    model(torch.randn(2, 20)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(shardwell.ArgumentError, match=r"gradient of tensor '.*' was changed after"):
        optimizer.step()
    optimizer.close()
    model.load_state_dict(alone.state_dict())
    late = server(model, client, overlap=False, name="clipped")
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(5):
        for of, each in ((model, late), (alone, theirs)):
            torch.nn.functional.cross_entropy(of(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(of.parameters(), 0.01)
            each.step()
            each.zero_grad()
    assert_same(model, alone, rtol=1e-3, atol=1e-5)


def _clipped(model: Any, optimizer: Any, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _accumulated(model: Any, optimizer: Any, number: int) -> None:
    inputs, targets = batches(STEPS)[-number]
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()


def _scaled(model: Any, optimizer: Any, number: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)


@pytest.mark.parametrize("change", [_clipped, _accumulated, _scaled])
@pytest.mark.parametrize("from_step", [1, 4])
@pytest.mark.parametrize("of", [net, deep])
def test_gradients_that_change_after_backward_as_it_comes(
    cluster, connect, change, from_step, of, caplog
) -> None:
    """From the first step on nothing leaves before `step`; later, nothing has left of a small
    model, and a large one says what to do."""
    caplog.set_level("DEBUG", "shardwell")
    size = 256 if of is deep else 1 << 20
    client = connect(cluster(2, chunk_size_bytes=size), "w0")
    model, alone = of(), of()
    mine = server(model, client, overlap="auto")
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number, (inputs, targets) in enumerate(batches(6), 1):
        for each, optimizer in ((alone, theirs), (model, mine)):
            torch.nn.functional.cross_entropy(each(inputs), targets).backward()
            if number >= from_step:
                if optimizer is mine and of is deep and number == from_step == 4:

                    def changed(of: Any = each, number: int = number) -> None:
                        change(of, mine, number)
                        mine.step()

                    with pytest.raises(shardwell.ArgumentError, match="overlap=False"):
                        changed()
                    return
                change(each, optimizer, number)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, alone, rtol=1e-4, atol=1e-6)
    told = [each for each in caplog.records if "leave in step()" in each.getMessage()]
    assert [each.levelname for each in told] == ["DEBUG"]


def test_gradients_that_stay_leave_from_the_second_step_on(cluster, connect, caplog) -> None:
    client = connect(cluster(2, chunk_size_bytes=256), "w0")
    model = deep()
    optimizer = server(model, client, overlap="auto")
    for number in range(2):
        before = client.traffic.sent_bytes
        torch.nn.functional.cross_entropy(model(batches(1)[0][0]), batches(1)[0][1]).backward()
        if number:
            eventually("some leave", lambda sent=before: client.traffic.sent_bytes > sent)
        else:
            assert client.traffic.sent_bytes == before
        optimizer.step()
        optimizer.zero_grad()
    assert not logged(caplog)


def test_a_scaler_as_it_comes(client) -> None:
    model, alone = net(), net()
    mine = server(model, client, overlap="auto")
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for of, each in ((model, mine), (alone, theirs)):
        own = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # too large for the first step
        for inputs, targets in batches(30):
            loss = 1000 * torch.nn.functional.cross_entropy(of(inputs), targets)
            own.scale(loss).backward()
            own.unscale_(each)
            torch.nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            own.step(each)
            own.update()
            each.zero_grad()
    assert 0 < mine.next_step < 30
    assert_same(model, alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False, "auto"])
def test_a_step_without_a_new_gradient_does_not_count(client, overlap) -> None:
    model = net()
    optimizer = server(model, client, overlap=overlap)
    optimizer.step()  # as torch's, it does nothing
    inputs, targets = batches(1)[0]
    for number in range(1, 4):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(shardwell.ArgumentError, match=r"without a backward pass since the la"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=number == 1)
        if number == 1:
            optimizer.step()
        else:
            with pytest.raises(shardwell.ArgumentError, match="without a backward pass"):
                optimizer.step()
        assert optimizer.next_step == number
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    for each in model.parameters():
        each.grad = torch.ones_like(each)  # made by hand
    optimizer.step()
    assert optimizer.next_step == 4


def test_a_worker_without_a_batch_counts_nothing_for_it(cluster, connect) -> None:
    running = cluster(2)
    models, alone = [net(), net()], net()
    optimizers = [
        server(model, connect(running, f"w{rank}"), worker_count=2)
        for rank, model in enumerate(models)
    ]
    optimizers[1].sample_count = 0
    together([lambda: train(models[0], optimizers[0], batches(1)), optimizers[1].step])
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), batches(1))
    for model in models:
        assert_same(model, alone, rtol=1e-4, atol=1e-6)


def test_weights_that_were_put_back_are_no_change(client) -> None:
    """As of an average of the weights that an evaluation used."""
    model = net()
    optimizer = server(model, client)
    train(model, optimizer, batches(2))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(net(seed=3).state_dict())
    model.load_state_dict(kept)
    train(model, optimizer, batches(1))
    assert optimizer.next_step == 3


@pytest.mark.parametrize("overlap", [True, False, "auto"])
def test_a_cell_that_runs_twice_trains_the_same_model_on(client, caplog, overlap) -> None:
    model, alone = deep(), deep()
    for _ in range(3):  # the earlier optimizers live on in their hooks
        train(model, server(model, client, overlap=overlap), batches(3))
    assert sum("was closed: another one" in each for each in logged(caplog)) == 2
    expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    train(alone, expected, batches(3) * 3)
    assert_same(model, alone, rtol=1e-4, atol=1e-5)


def test_a_training_that_goes_on_is_in_the_log(client, caplog) -> None:
    model = net()
    train(model, server(model, client), batches(3))
    assert not logged(caplog)
    optimizer = server(net(seed=2), client)
    (line,) = logged(caplog)
    assert "'w0' goes on with parameter 'model' at step 3" in line
    assert "while schedule.last_epoch < optimizer.next_step: schedule.step()" in line
    assert optimizer.next_step == 3


def _another_shape(model: Any) -> None:
    model[2] = torch.nn.Linear(64, 31)


def _one_more(model: Any) -> None:
    model.append(torch.nn.Linear(3, 3))


def _one_gone(model: Any) -> None:
    del model[3]


def _loaded(model: Any) -> None:
    model.load_state_dict(net(seed=3).state_dict())


def _resized(model: Any) -> None:
    model[0].bias.data = torch.zeros(65)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _another_shape,
            r"tensor '2.weight' of the model was replaced .* \(31, 64\), expected \(30",
        ),
        (_one_more, "tensor '4.weight' was added to the model, or unfrozen, after the start"),
        (_one_gone, "tensor '3.bias' of the model is gone since the start"),
        (_loaded, "weights of tensor '0.weight' were changed by something else than step"),
        (_resized, r"tensor '0.bias' of the model was replaced .* \(65,\), expected \(64,\)"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False, "auto"])
def test_a_model_that_has_changed_sends_nothing(client, change, words, overlap) -> None:
    model = net()
    optimizer = server(model, client, overlap=overlap)
    change(model)
    sent = client.traffic.sent_bytes
    with pytest.raises(shardwell.ArgumentError, match=words):
        optimizer.step()
    assert client.traffic.sent_bytes == sent
    assert optimizer.parameter.next_step == 0


def test_another_model_is_refused_by_tensor(cluster, connect) -> None:
    running = cluster(2)
    server(net(), connect(running, "w0"))
    for other, words in (
        (torch.nn.Sequential(torch.nn.Linear(20, 64)), "only the cluster's has a tensor '3.bias'"),
        (net().append(torch.nn.Linear(3, 1)), "only the worker's has a tensor '4.weight'"),
        (
            torch.nn.Sequential(torch.nn.Linear(19, 64), *list(net())[1:]),
            r"tensor '0.weight' has shape \(64, 20\); \(64, 19\) was asked for",
        ),
    ):
        client = connect(running, "w1")
        with pytest.raises(shardwell.SpecMismatchError, match=words):
            server(other, client)
        client.close()


def test_a_layer_that_is_unfrozen_later(client) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = server(model, client)
    model[0].requires_grad_(True)
    with pytest.raises(shardwell.ArgumentError, match=r"'0.weight' was added to the model, or"):
        optimizer.step()


def test_what_can_not_be_trained(client) -> None:
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model, unfilled = net(), torch.nn.Linear(2, 2)
    unfilled.register_buffer("mask", torch.zeros(2, device="meta"))
    for of, rule, options, words in (
        (empty, SGD, {}, "tensor 'weight' is on device 'meta'"),
        (torch.nn.Linear(2, 2, dtype=torch.complex64), SGD, {}, "tensor 'weight' is torch.complex"),
        (frozen, SGD, {}, "no parameter that requires a gradient"),
        (model, shardwell.Average(), {}, r"must be an update rule, .*; got shardwell\.Average"),
        (model, torch.optim.SGD(model.parameters()), {}, "must be an update rule"),
        (model, SGD, {"param_groups": [{"params": [torch.zeros(1)]}]}, "the model does not have"),
        (model, SGD, {"param_groups": [{"params": [], "eps": 1}]}, "has 'eps' 1, and SGD has none"),
        (model, SGD, {"param_groups": [{"lr": 1}]}, "dicts with 'params'; got dict"),
        (model, SGD, {"param_groups": [model, model]}, "or dicts with 'params'; got Sequential"),
        (torch.nn.LazyLinear(2), SGD, {}, "tensor 'weight' has no shape yet"),
        (unfilled, SGD, {}, "tensor 'mask' is on device 'meta'"),
    ):
        with pytest.raises(shardwell.ArgumentError, match=words):
            server(of, client, rule, **options)
    optimizer = server(model, client)
    with pytest.raises(shardwell.ArgumentError, match="can't be added after the start"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    optimizer.param_groups[0]["momentum"] = 0.5
    with optimizer.no_sync():
        model(torch.randn(2, 20)).sum().backward()
    with pytest.raises(shardwell.ArgumentError, match=r"'momentum': 0.5.*only lr may change"):
        optimizer.step()


def test_sparse_gradients_are_named(client) -> None:
    words = r"gradients of tensor '0.weight' are sparse; .*sparse=False"
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1))
    with pytest.raises(shardwell.ArgumentError, match=words):
        server(model, client)
    model[0].sparse = False
    for overlap in (True, False):
        optimizer = server(model, client, overlap=overlap, name=f"overlap-{overlap}")
        model[0].sparse = True  # too late to be seen beforehand
        loss = model(torch.tensor([1, 2])).sum()
        if not overlap:
            loss.backward()
        with pytest.raises(shardwell.ArgumentError, match=words):
            (loss.backward if overlap else optimizer.step)()
        assert optimizer.parameter.next_step == 0
        optimizer.close()
        model.zero_grad()
        model[0].sparse = False


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_not_finite_is_named_and_the_next_batch_goes_on(client, overlap) -> None:
    """With overlap a piece was begun, and refused: the step is over, for others to go on."""
    model = net()
    optimizer = server(model, client, overlap=overlap)
    model(torch.full((2, 20), float("nan"))).sum().backward()
    with pytest.raises(shardwell.NonFiniteError, match=r"of tensor '.*' is nan") as caught:
        optimizer.step()
    assert caught.value.parameter == "model"
    assert optimizer.parameter.next_step == overlap
    optimizer.zero_grad()
    assert all(np.isfinite(train(model, optimizer, batches(3))))
    assert optimizer.parameter.next_step == 3 + overlap


def test_what_is_not_finite_at_the_end_of_backward_counts_as_zeros(client) -> None:
    """What had left by then counts, and the step is over."""
    model = deep()
    optimizer = server(model, client)
    first = model[0].weight.detach().clone()
    loss = model(torch.randn(2, 20)).sum()
    model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    loss.backward()
    with pytest.raises(shardwell.NonFiniteError, match=r"of tensor '0.weight' is nan"):
        optimizer.step()
    assert optimizer.parameter.next_step == 1
    assert torch.isfinite(model[0].weight).all()
    assert not torch.equal(model[9].bias, deep()[9].bias)
    torch.testing.assert_close(model[0].weight.detach()[-1], first[-1])


def test_what_is_not_finite_from_the_start_of_backward_holds_nobody_up(cluster, connect) -> None:
    """The piece that was begun and refused counts as zeros: others end the step, too."""
    running = cluster(2, chunk_size_bytes=256)
    models = [deep(), deep()]
    optimizers = [
        server(model, connect(running, f"w{rank}"), worker_count=2)
        for rank, model in enumerate(models)
    ]

    def broken() -> None:
        (models[0](torch.randn(2, 20)).sum() * float("nan")).backward()
        with pytest.raises(shardwell.NonFiniteError, match=r"of tensor '.*' is nan"):
            optimizers[0].step()
        optimizers[0].zero_grad()
        train(models[0], optimizers[0], batches(2))

    together([broken, lambda: train(models[1], optimizers[1], batches(3))])
    assert [optimizer.next_step for optimizer in optimizers] == [3, 3]
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, its)


def test_a_worker_that_starts_again_goes_on(cluster, connect) -> None:
    running = cluster(2)
    first = connect(running, "w0")
    model = net()
    train(model, server(model, first), batches(5))
    first.close()
    again = net(seed=9)
    optimizer = server(again, connect(running, "w0"))
    assert optimizer.parameter.next_step == 5
    assert_same(again, model)


def test_a_worker_that_starts_again_waits_for_the_step_that_it_had_ended(cluster, connect) -> None:
    """Others have still to end it: the weights of the step before are not those to go on with."""
    running, data = cluster(2, chunk_size_bytes=256), batches(2)
    models = [net(), net()]
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    optimizers = [
        server(model, client, worker_count=2) for model, client in zip(models, clients, strict=True)
    ]
    together([lambda rank=rank: train(models[rank], optimizers[rank], data[:1]) for rank in (0, 1)])
    torch.nn.functional.cross_entropy(models[0](data[1][0]), data[1][1]).backward()
    optimizers[0].timeout_s = 2.0
    with pytest.raises(shardwell.WorkersMissingError):
        optimizers[0].step()
    clients[0].close()
    again = net(seed=9)
    starting = in_background(lambda: server(again, connect(running, "w0"), worker_count=2))
    with pytest.raises(TimeoutError):
        starting.result(1.0)
    train(models[1], optimizers[1], data[1:])
    assert starting.result(PATIENCE_S).next_step == 2
    assert_same(again, models[1])


def test_a_worker_killed_between_the_steps_of_two_optimizers_steps_both(cluster, connect) -> None:
    """The model of the first one gets the weights back from before that step."""
    running, (batch,) = cluster(2), batches(1)

    def pair(worker_id: str, seed: int = 1) -> list[tuple[Any, Any]]:
        worker, models = connect(running, worker_id), (net(seed), net(seed))
        named = zip(("first", "second"), models, strict=True)
        return [(model, server(model, worker, name=name, worker_count=2)) for name, model in named]

    both = [pair(f"w{rank}") for rank in (0, 1)]
    before = copy.deepcopy(both[0][0][0])
    together([lambda of=of: train(*of[0], [batch]) for of in both])
    other = in_background(lambda: train(*both[0][1], [batch]))
    back = pair("w1", seed=9)  # in place of the one that trained the first alone
    assert [optimizer.next_step for _, optimizer in back] == [0, 0]
    assert_same(back[0][0], before)
    for model, optimizer in back:
        train(model, optimizer, [batch])
    other.result(PATIENCE_S)
    for (mine, _), (its, _) in zip(back, both[0], strict=True):
        assert_same(mine, its)


def test_tensors_of_groups_that_are_frozen_are_left_alone(client) -> None:
    model, alone = net(), net()
    for each in (model, alone):
        each[0].requires_grad_(False)
    optimizer = server(model, client, param_groups=model.parameters(), overlap=False)
    assert "0.weight" not in optimizer.parameter.spec.layout.by_name
    expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    np.testing.assert_allclose(
        train(model, optimizer, batches(5)), train(alone, expected, batches(5)), rtol=1e-5
    )


def test_what_is_not_trained_is_the_first_workers(cluster, connect) -> None:
    def normed(seed: int) -> Any:
        torch.manual_seed(seed)
        # What something else trains, and is in no group.
        other = torch.nn.Linear(20, 8)
        return torch.nn.Sequential(other, torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    running = cluster(2)
    models = [normed(1), normed(2)]
    for model in models:
        model.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    models[0](torch.randn(64, 20))
    start = copy.deepcopy(models[0].state_dict())

    def started(model: Any, worker_id: str) -> Any:
        own = [*model[1].parameters(), *model[2].parameters()]
        client = connect(running, worker_id)
        return server(model, client, worker_count=2, param_groups=own)

    optimizers = [started(model, f"w{rank}") for rank, model in enumerate(models)]
    for name, tensor in models[1].state_dict().items():
        assert torch.equal(tensor, start[name]), name
    for rank, model in enumerate(models):
        model(torch.randn(64, 20) + 5 * rank)
    own = [model[1].running_mean.clone() for model in models]
    counts = [int(model[1].num_batches_tracked) for model in models]
    together([optimizer.average_buffers for optimizer in optimizers])
    optimizers[0].close()
    again = normed(3)
    again.register_buffer("mask", torch.zeros(2))
    started(again, "w2")
    models.append(again)  # which has what was averaged last
    for model in models:
        torch.testing.assert_close(model[1].running_mean, (own[0] + own[1]) / 2)
    assert [int(model[1].num_batches_tracked) for model in models] == [*counts, 1]
    for model in models:
        assert torch.equal(model[0].weight, start["0.weight"])


def test_other_dtypes_and_layers_without_gradients(client) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(torch.bfloat16)
    unused = torch.nn.Linear(3, 3, dtype=torch.float64)
    model.add_module("unused", unused)
    before = unused.weight.detach().clone()
    optimizer = server(model, client)
    (model[1](model[0](torch.randn(2, 4, dtype=torch.bfloat16)))).sum().backward()
    optimizer.step()
    assert model[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(unused.weight.detach(), before)  # float32 has been between


def test_asynchronous_mode_and_closures(client) -> None:
    model = net()
    optimizer = server(model, client, mode="async", worker_count=1)
    inputs, targets = batches(1)[0]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2


def test_its_state_is_torchs_and_the_weights_load_without_us(client, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = net()
    optimizer = server(model, client)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, batches(5), schedule.step)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    client.save_checkpoint(tmp_path / "{step}")
    shardwell.export_checkpoint(tmp_path / "{step}", tmp_path / "model.safetensors", "model")
    fresh = net(seed=5)
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(fresh, model)


@pytest.mark.parametrize("as_default", [True, False])
def test_a_program_has_another_default_device(cluster, connect, as_default: bool) -> None:
    """Tensors of ours that named no device would be on "meta", and have no values."""
    running = cluster(2, chunk_size_bytes=256)
    client = connect(running, "w0")
    table = client.table("users", row_count=10, dim=20, optimizer=shardwell.SGD(0.5))
    layers = [torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)]
    model = torch.nn.Sequential(shardwell.torch.Embedding(table), *layers)
    model[3].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    ids, ones = torch.tensor([1, 2, 3]), torch.ones(3, 3)
    bags = shardwell.torch.EmbeddingBag(table)

    def work() -> None:
        optimizer = server(model, client)
        for _ in range(2):
            (model(ids) * ones).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.average_buffers()
        bags(ids[None]).sum().backward()
        other = shardwell.torch.ServerOptimizer(
            copy.deepcopy(model[1:]), client, SGD, name="other", overlap=False, mode="async"
        )
        other.step()
        options = {"rendezvous": running.target, "codec": "fp32"}
        with shardwell.join_group("g", rank=0, size=1, **options) as group:
            shardwell.torch.broadcast_state(model, group)

    if as_default:
        torch.set_default_device("meta")
        try:
            work()
        finally:
            torch.set_default_device(None)
    else:
        with torch.device("meta"):
            work()
    assert all(tensor.device.type == "cpu" for tensor in model.state_dict().values())
    assert not torch.equal(model[1].weight, before["1.weight"])

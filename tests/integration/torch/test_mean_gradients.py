"""Goal: any torch optimizer trains on several workers as it would on one with all their samples,
and all of them make the same steps, or none.

Method: two workers on threads, each with half of each batch, average through a group or through the
shards; torch alone with the whole batches is the oracle. Skipped where torch is not installed
(`make test-extras`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import shardwell
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

STEPS, SIZE = 6, 8
INPUTS = torch.linspace(-2, 2, STEPS * SIZE * 3).reshape(STEPS, SIZE, 3).sin()
TARGETS = INPUTS.prod(-1, keepdim=True)
Loop = Callable[[Any, Any, Any, slice], Any]


def net() -> Any:
    generator = torch.Generator().manual_seed(1)  # threads share torch's own
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
    return model


def loss_of(model: Any, step: int, rows: slice) -> Any:
    return (model(INPUTS[step, rows]) - TARGETS[step, rows]).square().mean()


def plain(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(STEPS):
        loss_of(model, step, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def clipped(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    for step in range(STEPS):
        loss_of(model, step, rows).backward()
        if means is not None:
            means.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    for step in range(0, STEPS, 2):
        loss_of(model, step, rows).backward()
        loss_of(model, step + 1, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_closure(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    for step in range(2):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, step, rows)
            loss.backward()
            return loss

        optimizer.step(closure)


def with_group_added(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    head = torch.nn.Parameter(torch.ones(1))
    for step in range(STEPS):
        if step == 3:
            optimizer.add_param_group({"params": [head], "lr": 0.01})
        (loss_of(model, step, rows) * (head if step >= 3 else 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: Any, optimizer: Any, means: Any, rows: slice) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, rows)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def results(model: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in model.parameters()]


class Pair:
    """Two workers, each with something to average through."""

    def __init__(self, running: Any, connect: Any, kind: str) -> None:
        self._running, self._connect, self._kind = running, connect, kind

    def train(self, make: Any, loop: Loop) -> list[Any]:
        return together([partial(self._work, rank, make, loop) for rank in range(2)])

    def _work(self, rank: int, make: Any, loop: Loop) -> Any:
        model = net()
        optimizer = make(model.parameters())
        rows = slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)
        if self._kind == "client":
            client = self._connect(self._running, f"w{rank}")
            options = {"worker_count": 2, "codec": "fp32"}
            means = shardwell.torch.mean_gradients(optimizer, client, **options)
            return loop(model, optimizer, means, rows) or results(model)
        place = {"rank": rank, "size": 2, "rendezvous": self._running.target}
        with shardwell.join_group("pair", codec="fp32", **place) as group:
            means = shardwell.torch.mean_gradients(optimizer, group)
            found = loop(model, optimizer, means, rows) or results(model)
            group.barrier()
            return found


@pytest.fixture(params=["group", "client"])
def pair(request, cluster, connect) -> Pair:
    return Pair(cluster(2), connect, request.param)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CASES: dict[str, tuple[Any, Loop]] = {
    "a rule that shards lack": (partial(torch.optim.NAdam, lr=0.05), plain),
    "clipping the mean": (MOMENTUM, clipped),
    "two backward passes": (MOMENTUM, accumulated),
    "LBFGS": (partial(torch.optim.LBFGS, line_search_fn="strong_wolfe", max_iter=8), by_closure),
    "LBFGS without a search": (partial(torch.optim.LBFGS, lr=0.1, max_iter=8), by_closure),
    "a GradScaler": (MOMENTUM, scaled),
}


@pytest.mark.parametrize("name", CASES)
def test_two_workers_train_as_one(pair, name) -> None:
    make, loop = CASES[name]
    alone = net()
    loop(alone, make(alone.parameters()), None, slice(0, SIZE))
    first, second = pair.train(make, loop)
    for own, other, its in zip(first, second, results(alone), strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, its, rtol=1e-3, atol=1e-5)


def test_a_group_that_is_added_later_is_averaged_too(cluster, connect) -> None:
    alone = net()
    with_group_added(alone, MOMENTUM(alone.parameters()), None, slice(0, SIZE))
    first, second = Pair(cluster(1), connect, "group").train(MOMENTUM, with_group_added)
    for own, other, its in zip(first, second, results(alone), strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, its, rtol=1e-3, atol=1e-5)


def test_an_overflow_on_one_worker_skips_the_step_on_all(pair) -> None:
    def loop(model: Any, optimizer: Any, means: Any, rows: slice) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        found = []
        for step in range(4):
            loss = loss_of(model, step, rows)
            if step in (1, 3) and rows.start:
                loss = loss * float("inf")
            before = results(model)
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(optimizer)
                means.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(all(map(torch.equal, before, results(model))))
        assert found == [False, True, False, True]
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 2
        return results(model)

    first, second = pair.train(partial(torch.optim.Adam, lr=0.1), loop)
    assert all(map(torch.equal, first, second))


def test_what_is_not_finite_is_an_error_on_all(pair) -> None:
    def loop(model: Any, optimizer: Any, means: Any, rows: slice) -> Any:
        before = results(model)

        def backward(factor: float) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0, rows) * (factor if rows.start else 1.0)
            loss.backward()
            return loss

        for step in (
            lambda: (backward(float("nan")), optimizer.step()),
            lambda: (backward(float("inf")), means.synchronize(), optimizer.step()),
            lambda: optimizer.step(lambda: backward(float("nan"))),
        ):
            with pytest.raises(shardwell.NonFiniteError, match="all workers get this"):
                step()
        assert all(map(torch.equal, before, results(model)))
        backward(1.0)
        optimizer.step()
        return results(model)

    first, second = pair.train(MOMENTUM, loop)
    assert all(map(torch.equal, first, second))


def with_head(parameters: Any) -> Any:
    own = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.5} for _ in range(2)]
    return torch.optim.SGD([{"params": parameters}, *own], lr=0.5)


def test_gradients_that_are_missing(pair) -> None:
    """On one worker they count as zeros; on all, the optimizer leaves the tensor alone."""

    def loop(model: Any, optimizer: Any, means: Any, rows: slice) -> Any:
        head, idle = (group["params"][0] for group in optimizer.param_groups[1:])
        means.sample_count = 3 if rows.start else 1
        (head * 2.0 if rows.start else loss_of(model, 0, rows)).sum().backward()
        optimizer.step()
        first = 1 - 0.5 * (0.75 * 2.0 + 0.5 * 1)
        assert (head.item(), idle.item(), idle.grad) == (first, 1.0, None)
        optimizer.zero_grad()
        means.sample_count = 0 if rows.start else 1  # one has no batch
        if not rows.start:
            (head * 4.0).sum().backward()
        optimizer.step()
        assert head.item() == first - 0.5 * (4.0 + 0.5 * first)
        return results(model)

    first, second = pair.train(with_head, loop)
    assert all(map(torch.equal, first, second))


def test_what_cannot_be_averaged_is_refused(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    model = net()
    optimizer = MOMENTUM(model.parameters())

    def refuse(words: str, *given: Any, **options: Any) -> None:
        with pytest.raises(shardwell.ArgumentError, match=words):
            shardwell.torch.mean_gradients(*given, **options)

    refuse("needs a group", optimizer, "127.0.0.1:7070")
    refuse(r"got shardwell\.SGD", shardwell.SGD(0.1), client)
    refuse("int8", optimizer, client, name="eighths", codec="int8")
    small = client.parameter("small", size=3, optimizer=shardwell.Average())
    refuse(r"has 3 elements, and 47 are exchanged", optimizer, small)
    trained = client.parameter("trained", size=47, optimizer=shardwell.SGD(0.1))
    refuse("ServerSync needs a parameter with", optimizer, trained)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    refuse("no tensor that requires", MOMENTUM(frozen.parameters()), client)
    table = torch.nn.Embedding(5, 2, sparse=True)
    sparse = torch.optim.SparseAdam(table.parameters())
    shardwell.torch.mean_gradients(sparse, client, name="sparse")
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(shardwell.ArgumentError, match=r"tensor 0 .*\(5, 2\), is sparse"):
        sparse.step()


def test_a_cell_that_runs_again_averages_once(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    model = net()
    optimizer = MOMENTUM(model.parameters())
    kept = [shardwell.torch.mean_gradients(optimizer, client) for _ in range(2)]
    loss_of(model, 0, slice(0, SIZE)).backward()
    optimizer.step()
    parameter = client.parameter("gradients")
    assert parameter.next_step == 1
    kept[1].close()
    assert optimizer._step_supports_amp_scaling is False
    optimizer.step()
    assert parameter.next_step == 1


def test_prepare_keeps_an_optimizer_that_shards_lack(cluster, connect) -> None:
    running = cluster(2)
    make = partial(torch.optim.NAdam, lr=0.05)
    data = torch.utils.data.TensorDataset(INPUTS[0], TARGETS[0])

    def work(worker_id: str) -> Any:
        model = net()
        if worker_id == "w1":
            with torch.no_grad():
                model[0].weight.add_(1.0)  # the first worker's weights count
        loader = torch.utils.data.DataLoader(data, SIZE // 2)
        client = connect(running, worker_id)
        model, optimizer, loader = shardwell.torch.prepare(
            model, make(model.parameters()), loader, client=client, worker_count=2, codec="fp32"
        )
        for _ in loader.epochs(3):
            for inputs, targets in loader:
                (model(inputs) - targets).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(optimizer, torch.optim.NAdam)
        assert optimizer.client is client
        return results(model)

    found = together([partial(work, "w0"), partial(work, "w1")])
    assert all(map(torch.equal, *found))
    with pytest.raises(shardwell.ArgumentError, match=r"is at step 3, and the shards have no"):
        work("w0")
    model = net()
    with pytest.raises(shardwell.ArgumentError, match=r"no update rule for NAdam.*fixed number"):
        shardwell.torch.prepare(
            model, make(model.parameters()), client=connect(running, "w2"), overlap=False
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_clipped_by_its_exact_norm(dtype: Any) -> None:
    """Not by torch's, whose last bits depend on the device, its kernels and threads."""
    sizes, generator = (1, 300, 70_001), torch.Generator().manual_seed(3)
    tensors = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]
    given = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    optimizer = torch.optim.SGD(tensors, lr=1.0)
    with shardwell.torch.mean_gradients(optimizer, shardwell.LocalSync(), clip_norm=0.5):
        for tensor, gradient in zip(tensors, given, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()
    norm = math.sqrt(math.fsum(each**2 for gradient in given for each in gradient.tolist()))
    factor = torch.tensor(0.5 / (norm + 1e-6), dtype=torch.float32)
    for tensor, gradient in zip(tensors, given, strict=True):
        assert torch.equal(tensor, -(gradient.float() * factor).to(dtype))

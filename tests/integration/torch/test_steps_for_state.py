"""Goal: a call of `step` that only makes an optimizer's state is no step of the training.

Method: torch's own `get_optimizer_state_dict`, which makes zeros, sets rates to 0 and calls `step`,
between all steps of a loop; beside it torch alone with the same calls. A gradient of zeros that a
backward pass made is a step, at rate 0, too, for which the other worker waits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import shardwell
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402

import shardwell.torch  # noqa: E402
from harness.torch_seeds import seeded  # noqa: E402

STEPS = 4
RULE = shardwell.AdamW(learning_rate=0.05)


@seeded(3)
def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "lr": 0.02},
        {"params": list(model[2].parameters()), "lr": 0.05},
    ]


def backward(model: Any, step: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    (model(torch.randn(8, 6, generator=draw)).square().mean() * factor).backward()


def save_between_steps(model: Any, optimizers: Any, schedule: Any = None) -> Any:
    """A loop that asks for states before, between, and after a batch that was dropped."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for step in range(STEPS):
        get_optimizer_state_dict(model, optimizers)
        backward(model, 100 + step)
        model.zero_grad()  # a batch that was dropped
        get_optimizer_state_dict(model, optimizers)
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    get_optimizer_state_dict(model, optimizers)
    return list(model.parameters())


def assert_close(found: Any, expected: Any) -> None:
    for own, its in zip(found, expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-5)


def plain(model: Any, optimizer: Any, schedule: Any = None) -> Any:
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return list(model.parameters())


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("overlap", [False, "auto"])
def test_a_server_optimizer_makes_no_step_for_its_state(cluster, connect, grouped, overlap) -> None:
    model, alone = net(), net()
    own = groups(model) if grouped else None
    theirs = groups(alone) if grouped else alone.parameters()
    optimizer = shardwell.torch.ServerOptimizer(
        model, connect(cluster(2), "w0"), RULE, param_groups=own, codec="fp32", overlap=overlap
    )
    expected = torch.optim.AdamW(theirs, lr=0.05)
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    assert_close(
        save_between_steps(model, optimizer, halving(optimizer)),
        plain(alone, expected, halving(expected)),
    )
    assert optimizer.next_step == STEPS


def test_zeros_of_a_backward_pass_are_a_step_at_rate_0(cluster, connect) -> None:
    running = cluster(2)

    def work(rank: int) -> Any:
        model = net()
        optimizer = shardwell.torch.ServerOptimizer(
            model, connect(running, f"w{rank}"), RULE, worker_count=2, codec="fp32"
        )
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
        for step in range(STEPS):
            if rank == 0:
                get_optimizer_state_dict(model, optimizer)  # and no worker waits for it
            backward(model, step, 0.0 if rank == 0 and step < 2 else 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=rank == 1)
            warmup.step()
        assert optimizer.next_step == STEPS
        return list(model.parameters())

    assert_close(*together([partial(work, rank) for rank in range(2)]))


def test_diloco_counts_no_inner_step_for_a_state(cluster, connect) -> None:
    def optimizers(model: Any) -> list[Any]:
        return [
            torch.optim.Adagrad(model[0].parameters(), 0.05),
            torch.optim.SGD(model[2].parameters(), 0.1),
        ]

    model, alone = net(), net()
    inner = optimizers(model)
    options = {"sync_every": 2, "fragments": 1, "overlap": 0, "codec": "fp32"}
    outer = shardwell.SGD(learning_rate=1.0)
    client = connect(cluster(2), "w0")
    with shardwell.torch.DiLoCo(model, inner, client, outer=outer, **options) as training:
        found = save_between_steps(model, inner)
        assert training.inner_step == STEPS
        backward(model, 9, 0.0)
        for optimizer in inner:
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
        assert training.inner_step == STEPS + 1
    assert_close(found, save_between_steps(alone, optimizers(alone)))


@pytest.mark.parametrize("is_prepared", [False, True])
def test_means_are_not_made_for_a_state(cluster, connect, is_prepared) -> None:
    running = cluster(2)

    def work(rank: int) -> Any:
        model = net()
        optimizer = torch.optim.Adadelta(model.parameters(), 0.5)
        options = {"worker_count": 2, "codec": "fp32"}
        client = connect(running, f"w{rank}")
        if is_prepared:
            given = {"client": client, **options}
            model, optimizer, _ = shardwell.torch.prepare(model, optimizer, **given)
        else:
            means = shardwell.torch.mean_gradients(optimizer, client, **options)
        found = save_between_steps(model, optimizer) if rank == 0 else plain(model, optimizer)
        backward(model, 9, 0.0)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()  # which the other worker's step waits for
        assert is_prepared or means.sync.parameter.next_step == STEPS + 1
        return found

    found = together([partial(work, rank) for rank in range(2)])
    alone = net()
    expected = plain(alone, torch.optim.Adadelta(alone.parameters(), 0.5))
    assert_close(found[0], expected)
    assert_close(found[1], expected)

"""Goal: groups of parameters are torch's: keys of one's own, schedules whose ratios change.

Method: the same model, groups and schedule by torch alone and on a cluster with small chunks, in
fp32; weights agree within float tolerance after each step. Skipped where torch is not installed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

import shardwell
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

SCHEDULES = torch.optim.lr_scheduler
RULES = {
    "sgd": (
        shardwell.SGD(learning_rate=0.1, momentum=0.9),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ),
    "adamw": (
        shardwell.AdamW(learning_rate=0.1, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    ),
    "clipped": (
        shardwell.SGD(learning_rate=0.1, clip_norm=1e9),
        lambda groups: torch.optim.SGD(groups, lr=0.1),
    ),
}


def net() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def grouped(model: Any, **more: Any) -> list[dict[str, Any]]:
    """Weights, biases, and a group without a rate of its own."""
    return [
        {"params": [model[0].weight], "lr": 0.05, **more},
        {"params": [model[0].bias, model[2].bias], "lr": 0.001, "weight_decay": 0.0},
        {"params": [model[2].weight]},
    ]


def backward(model: Any, step: int) -> None:
    model.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(8, 6)).square().mean().backward()


def assert_same_weights(model: Any, alone: Any) -> None:
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-5)


def server(model: Any, client: shardwell.Client, rule: Any, **options: Any) -> Any:
    return shardwell.torch.ServerOptimizer(model, client, rule, codec="fp32", **options)


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2, chunk_size_bytes=64), "w0")


MADE = {
    "cosine with a floor": lambda o: SCHEDULES.CosineAnnealingLR(o, 6, eta_min=0.0009),
    "a function for each": lambda o: SCHEDULES.LambdaLR(
        o, [lambda n: 0.5**n, lambda n: n / 3, lambda n: 1.0 if n < 2 else 0.0]
    ),
    "cyclic": lambda o: SCHEDULES.CyclicLR(
        o, [0.0, 0.0, 0.0], [0.1, 0.01, 0.2], step_size_up=2, cycle_momentum=False
    ),
    "one cycle": lambda o: SCHEDULES.OneCycleLR(
        o, [0.1, 0.01, 0.2], total_steps=8, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("schedule", MADE)
@pytest.mark.parametrize(("rule", "overlap"), [("sgd", True), ("adamw", False)])
def test_schedules_whose_ratios_change_are_torchs(
    client, schedule: str, rule: str, overlap: bool
) -> None:
    model, alone = net(), net()
    mine, its = RULES[rule]
    optimizer = server(model, client, mine, param_groups=grouped(model), overlap=overlap)
    reference = its(grouped(alone))
    schedules = MADE[schedule](optimizer), MADE[schedule](reference)
    for step in range(7):
        for each in (model, alone):
            backward(each, step)
        optimizer.step()
        reference.step()
        assert_same_weights(model, alone)
        for each in schedules:
            each.step()
        rates = [[group["lr"] for group in o.param_groups] for o in (optimizer, reference)]
        assert rates[0] == pytest.approx(rates[1])


def test_a_plateau_with_a_floor_for_each_group(client) -> None:
    model, alone = net(), net()
    mine, its = RULES["sgd"]
    optimizer, reference = (
        server(model, client, mine, param_groups=grouped(model)),
        its(grouped(alone)),
    )
    floors = [0.02, 0.0009, 0.0]
    schedules = [
        SCHEDULES.ReduceLROnPlateau(o, patience=0, factor=0.5, min_lr=floors)
        for o in (optimizer, reference)
    ]
    for step in range(6):
        for each in (model, alone):
            backward(each, step)
        optimizer.step()
        reference.step()
        for each in schedules:
            each.step(1.0)
    assert_same_weights(model, alone)
    assert optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("rule", ["adamw", "clipped"])
def test_workers_bring_the_same_rates(cluster, connect, rule: str) -> None:
    running = cluster(2, chunk_size_bytes=64)
    alone, models = net(), [net(), net()]
    mine, its = RULES[rule]
    reference = its(grouped(alone))
    optimizers = [
        server(
            model,
            connect(running, f"w{rank}", timeout_s=20.0),
            mine,
            worker_count=2,
            param_groups=grouped(model),
            overlap=False,
        )
        for rank, model in enumerate(models)
    ]
    for step in range(4):
        for each in (*models, alone):
            backward(each, step)
        for o in (*optimizers, reference):
            for number, group in enumerate(o.param_groups):
                group["lr"] = 0.01 * (1 + (step + number) % 3)
        together([optimizer.step for optimizer in optimizers])
        reference.step()
        for model in models:
            assert_same_weights(model, alone)
    for model in models:
        backward(model, 9)
    optimizers[0].param_groups[1]["lr"] = 0.5
    optimizers[1].param_groups[1]["lr"] = 0.6
    errors: list[shardwell.ShardwellError] = []

    def refused_or_waiting(optimizer: shardwell.torch.ServerOptimizer) -> None:
        with pytest.raises(shardwell.ShardwellError) as caught:
            optimizer.step()
        errors.append(caught.value)

    # Whichever comes second on a shard is refused; the other one waits for it.
    together([partial(refused_or_waiting, optimizer) for optimizer in optimizers])
    refusals = [each for each in errors if isinstance(each, shardwell.StepOrderError)]
    assert refusals
    assert all(re.search(r"step 4.*GroupedRate.*GroupedRate", str(each)) for each in refusals)


def test_keys_of_ones_own_stay_ones_own(client) -> None:
    model = net()
    own = {"name": "first", "lr_scale": 0.5, "initial_lr": 0.05, "fused": None, "layers": [1, 2]}
    optimizer = server(model, client, RULES["sgd"][0], param_groups=grouped(model, **own))
    backward(model, 0)
    optimizer.step()
    assert {key: optimizer.param_groups[0][key] for key in own} == own
    optimizer.param_groups[0]["lr_scale"] = 2.0  # as a schedule of timm's does
    optimizer.param_groups[1]["name"] = "biases"
    backward(model, 1)
    optimizer.step()
    assert optimizer.next_step == 2


def test_pairs_of_names_and_tensors(client) -> None:
    model = net()
    optimizer = server(model, client, RULES["sgd"][0], param_groups=model.named_parameters())
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names
    backward(model, 0)
    optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 0.5), ("betas", (0.5, 0.9)), ("amsgrad", True), ("maximize", True)],
)
def test_options_that_the_shards_can_not_have_are_named(client, key: str, value: Any) -> None:
    model = net()
    groups = grouped(model, **{key: value})
    with pytest.raises(shardwell.ArgumentError, match=rf"param_groups\[0\] has '{key}'"):
        server(model, client, RULES["sgd"][0], param_groups=groups)


def test_options_as_the_optimizer_has_them_are_taken(client) -> None:
    model = net()
    groups = grouped(model, momentum=0.9, nesterov=False, maximize=False)
    optimizer = server(model, client, RULES["sgd"][0], param_groups=groups)
    backward(model, 0)
    optimizer.step()
    optimizer.close()
    backward(model, 1)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(shardwell.ArgumentError, match=r"param_groups\[0\] has .*momentum"):
        optimizer.step()

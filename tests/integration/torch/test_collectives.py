"""Goal: a group serves DDP's gradients and first weights, exactly, and its errors reach all ranks.

Method: real DDP in processes of their own, with gloo beside the group; its losses are those of one
process with all the samples.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.programs.commands import Program
from harness.programs.ports import free_port
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

DDP = """
import sys, torch, shardwell, shardwell.torch
import torch.distributed as dist

rank, size, rendezvous, port, codec = int(sys.argv[1]), 2, sys.argv[2], sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
with shardwell.join_group("ddp", rank=rank, size=size, rendezvous=rendezvous, codec=codec) as group:
    ddp.register_comm_hook(group, shardwell.torch.all_reduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    for step in range(20):
        inputs, targets = torch.randn(16, 20), torch.randint(0, 3, (16,))
        rows = slice(8 * rank, 8 * rank + 8)
        loss = torch.nn.functional.cross_entropy(ddp(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.9f}", flush=True)
    if rank == 1:
        group.close()
        dist.destroy_process_group()
        sys.exit(0)
    try:
        ddp(inputs).sum().backward()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


def alone() -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(20):
        inputs, targets = torch.randn(16, 20), torch.randint(0, 3, (16,))
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-5), ("fp16", 1e-2)])
def test_ddp_trains_through_the_group(cluster, codec, tolerance) -> None:
    running, port = cluster(1), str(free_port())
    rendezvous = running.target
    with (
        Program("-c", DDP, "0", rendezvous, port, codec, is_forked=True) as first,
        Program("-c", DDP, "1", rendezvous, port, codec, is_forked=True) as second,
    ):
        assert second.end(150.0) == 0, second.log
        assert first.end(150.0) == 0, first.log
    losses = [[float(line) for line in each.lines[:20]] for each in (first, second)]
    np.testing.assert_allclose(np.mean(losses, axis=0), alone(), rtol=tolerance)
    # The error came out of backward, with its name, and says who is gone.
    assert re.search(r"RuntimeError .*WorkerLostError: rank 1", first.lines[20])


def states() -> list[Any]:
    """Models of all kinds of values, which differ."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
        model.register_buffer("mask", torch.tensor([float("inf"), float("nan"), -0.0]) * (seed + 1))
        model.register_buffer("ids", torch.randint(-(2**62), 2**62, (3,)))
        model.register_buffer("flags", torch.rand(5) > 0.5)
        model.register_buffer("halves", torch.randn(3).bfloat16())
        model.register_buffer("doubles", torch.randn(3, dtype=torch.float64))
        model.register_buffer("nothing", torch.empty(0))
        model.register_buffer("one", torch.tensor(seed))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        models.append(model)
    return models


def test_the_state_of_one_rank_is_everyones_bit_for_bit(cluster) -> None:
    rendezvous, models = cluster(1).target, states()
    expected = copy.deepcopy(models[1].state_dict())

    def work(rank: int) -> None:
        with shardwell.join_group("g", rank=rank, size=3, rendezvous=rendezvous) as group:
            wrapped = models[rank] if rank else torch.nn.DataParallel(models[rank])
            shardwell.torch.broadcast_state(wrapped, group, root=1)

    together([lambda rank=rank: work(rank) for rank in range(3)])
    for model in models:
        for name, tensor in model.state_dict().items():
            found, wanted = tensor.contiguous(), expected[name].contiguous()
            assert (
                found.numpy(force=True).tobytes() == wanted.numpy(force=True).tobytes()
                if (tensor.dtype != torch.bfloat16)
                else torch.equal(found, wanted)
            ), name


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: torch.nn.Linear(5, 7), "models differ at tensor 0, here weight"),
        (lambda: torch.nn.Linear(7, 5, bias=False), "models differ at tensor 1, here (none|bias)"),
        (lambda: torch.nn.Linear(7, 5, dtype=torch.float64), "models differ at tensor 0"),
        (lambda: torch.nn.Linear(7, 5, device="meta"), "models differ at tensor 0, here weight"),
    ],
)
def test_a_rank_with_another_model_is_told_to_all(cluster, other, words) -> None:
    rendezvous = cluster(1).target
    models = [torch.nn.Linear(7, 5), other()]
    before = [copy.deepcopy(model.state_dict()) for model in models]

    def work(rank: int) -> shardwell.ShardwellError:
        with (
            shardwell.join_group("g", rank=rank, size=2, rendezvous=rendezvous) as group,
            pytest.raises(shardwell.ShardwellError, match=words) as caught,
        ):
            shardwell.torch.broadcast_state(models[rank], group)
        return caught.value

    errors = together([lambda: work(0), lambda: work(1)])
    assert all(isinstance(error, shardwell.GroupMismatchError) for error in errors)
    for model, state in zip(models, before, strict=True):
        for name, tensor in model.state_dict().items():
            assert tensor.is_meta or torch.equal(tensor, state[name])


def test_a_model_without_values_is_told_by_tensor(cluster) -> None:
    model = torch.nn.Linear(7, 5, device="meta")
    with (
        shardwell.join_group("g", rank=0, size=1, rendezvous=cluster(1).target) as group,
        pytest.raises(shardwell.ArgumentError, match="tensor 'weight' is on device 'meta'"),
    ):
        shardwell.torch.broadcast_state(model, group)

"""Goal: what users get wrong with a ServerOptimizer is named, with advice that they can follow."""

from __future__ import annotations

from typing import Any

import pytest

import shardwell
from harness.programs.commands import Program

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402


def test_a_target_is_no_client() -> None:
    with pytest.raises(shardwell.ArgumentError, match=r"made by shardwell\.connect.*; got '127\."):
        shardwell.torch.ServerOptimizer(torch.nn.Linear(2, 1), "127.0.0.1:7070", shardwell.SGD(0.1))


def test_what_is_not_finite_advises_what_a_server_optimizer_has(cluster, connect) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = shardwell.torch.ServerOptimizer(
        model, connect(cluster(2), "w0"), shardwell.SGD(lr=0.1), overlap=False
    )
    (model(torch.ones(1, 2)).sum() * float("nan")).backward()
    with pytest.raises(shardwell.NonFiniteError, match=r"tensor '.*; zero_grad\(\) and") as caught:
        optimizer.step()
    assert "allow_non_finite" not in caught.value.message


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_shard_refuses_advises_what_a_server_optimizer_has(
    cluster, connect, overlap: bool
) -> None:
    """A finite gradient whose square is not; then the advice is followed."""
    model = torch.nn.Linear(2, 1)
    optimizer = shardwell.torch.ServerOptimizer(
        model, connect(cluster(2), "w0"), shardwell.Adagrad(0.5), overlap=overlap
    )
    (model(torch.ones(1, 2)).sum() * 1e30).backward()
    with pytest.raises(
        shardwell.NonFiniteError, match=r"'sum' of .*infinite for good.*; zero_grad\(\) and"
    ) as caught:
        optimizer.step()
    for lacking in ("allow_non_finite", "abandon_step", "clip_value"):
        assert lacking not in caught.value.message
    optimizer.zero_grad()
    before = model.bias.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moved = (model.bias.detach() - before).abs().item()
    assert moved == pytest.approx(0.5, abs=1e-3)  # Adagrad's first step, whatever its size


def test_weights_that_diverged_advise_what_everybody_has(cluster, connect) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = shardwell.torch.ServerOptimizer(
        model, connect(cluster(2), "w0"), shardwell.SGD(lr=3e38)
    )
    (model(torch.ones(1, 2)).sum() * 100).backward()
    with pytest.raises(shardwell.DivergedError, match="restore a checkpoint from before") as caught:
        optimizer.step()
    assert "allow_non_finite" not in caught.value.message


IN_PARTS = """
import sys
import shardwell, torch, torch.distributed as dist
import shardwell.torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
inner = torch.optim.SGD(model.parameters(), lr=0.1)
with shardwell.connect(sys.argv[1], worker_id="w0") as client:
    for make in (
        lambda: shardwell.torch.ServerOptimizer(model, client, shardwell.SGD(lr=0.1)),
        lambda: shardwell.torch.DiLoCo(model, inner, client),
    ):
        try:
            make()
        except shardwell.ArgumentError as error:
            print(error.message)
dist.destroy_process_group()
"""


def test_a_model_in_parts_is_refused_by_name(cluster) -> None:
    with Program("-c", IN_PARTS, cluster(1).target) as program:
        assert program.end(120.0) == 0, program.log
    assert len(program.lines) == 2
    words = "tensor 'weight' is a DTensor, as of FSDP"
    assert all(line.startswith(words) for line in program.lines), program.lines


CALL = r"expected shardwell\.torch\.ServerOptimizer\(model, client, shardwell\.AdamW\(3e-4\)"
WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "parameters": (lambda of, m, c, rule: of(m.parameters(), c, rule), "got generator; " + CALL),
    "a list": (lambda of, m, c, rule: of(list(m.parameters()), c, rule), "got list; " + CALL),
    "as torch's": (
        lambda of, m, c, rule: of(m.parameters(), lr=1e-3),
        "missing a required argument: 'client'; lr= is an option of the update rule.*" + CALL,
    ),
    "token": (
        lambda of, m, c, rule: of(m, c, rule, token="t"),
        "'token'; it is of shardwell.connect.*'token_file'.*" + CALL,
    ),
    "clip_norm": (
        lambda of, m, c, rule: of(m, c, rule, clip_norm=1.0),
        "clip_norm= is an option of the update rule, as of shardwell.AdamW.*" + CALL,
    ),
    "misspelt": (lambda of, m, c, rule: of(m, c, rule, workers=2), "'worker_count'.*" + CALL),
    "torch's class": (
        lambda of, m, c, rule: of(m, c, torch.optim.AdamW),
        f"got the class torch.optim.adamw.AdamW; {CALL}.*prepare",
    ),
    "torch's optimizer": (
        lambda of, m, c, rule: of(m, c, torch.optim.AdamW(m.parameters())),
        f"got torch.optim.adamw.AdamW; {CALL}.*prepare",
    ),
    "a class of ours": (
        lambda of, m, c, rule: of(m, c, shardwell.AdamW),
        "as shardwell.AdamW.3e-4.; got the class shardwell.AdamW; " + CALL,
    ),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_a_call_as_of_torchs_optimizers_names_the_line_that_is_meant(
    wrong, cluster, connect
) -> None:
    call, words = WRONG_CALLS[wrong]
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=words) as caught:
        call(shardwell.torch.ServerOptimizer, torch.nn.Linear(2, 1), client, shardwell.AdamW(1e-3))
    assert "\n" not in str(caught.value)
    assert not client.status()[0].parameters


def test_diloco_and_prepare_name_what_they_take(cluster, connect) -> None:
    client, model = connect(cluster(1), "w0"), torch.nn.Linear(2, 1)
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(shardwell.ArgumentError, match=r"got generator; expected.*DiLoCo\(model, "):
        shardwell.torch.DiLoCo(model.parameters(), inner, client)
    with pytest.raises(shardwell.ArgumentError, match=r"'token_file'.*expected.*DiLoCo\(model, "):
        shardwell.torch.DiLoCo(model, inner, client, token="t")
    with pytest.raises(shardwell.ArgumentError, match=r"got the class torch.optim.adamw.AdamW"):
        shardwell.torch.DiLoCo(model, torch.optim.AdamW, client)
    with pytest.raises(shardwell.ArgumentError, match=r"got generator; expected.*prepare\(model, "):
        shardwell.torch.prepare(model.parameters(), inner, client=client)
    with pytest.raises(shardwell.ArgumentError, match="'token_file'"):
        shardwell.torch.prepare(model, inner, client=client, token="t")
    assert not client.status()[0].parameters

"""Goal: a tensor has one name on the cluster, whatever its worker wraps the model in.

Method: workers with the plain model, a compiled and a parallel one train together; the export is
loaded into the plain model, strictly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardwell

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1)


def plain() -> Any:
    torch.manual_seed(0)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    return torch.nn.Sequential(frozen, torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


class OwnModule(torch.nn.Module):
    """A user's, whose child has a wrapper's name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)


def inner_compiled() -> Any:
    model = plain()
    model[2] = torch.compile(model[2], backend="eager")
    return model


WRAPPED = {
    "compiled": lambda: torch.compile(plain(), backend="eager"),
    "parallel": lambda: torch.nn.DataParallel(plain()),
    "both": lambda: torch.nn.DataParallel(torch.compile(plain(), backend="eager")),
    "a compiled layer": inner_compiled,
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrapped_models_and_plain_ones_train_together(
    cluster, connect, tmp_path: Path, wrapper: str
) -> None:
    from safetensors.torch import load_file

    running = cluster(1)
    client = connect(running, "w0")
    optimizer = shardwell.torch.ServerOptimizer(
        WRAPPED[wrapper](), client, SGD, name="net", mode="async", codec="fp32"
    )
    expected = {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert set(optimizer.parameter.spec.layout.by_name) == expected
    shardwell.torch.ServerOptimizer(
        plain(), connect(running, "w1"), SGD, name="net", mode="async", codec="fp32"
    )
    sum(p.sum() for p in optimizer._model.model.parameters() if p.requires_grad).backward()
    optimizer.step()
    client.save_checkpoint(tmp_path / "one", ["net"])
    shardwell.export_checkpoint(tmp_path / "one", tmp_path / "net.safetensors")
    found = load_file(tmp_path / "net.safetensors")
    fitted = plain().load_state_dict(found, strict=False)
    assert not fitted.unexpected_keys
    assert {key.split(".")[0] for key in fitted.missing_keys} == {"0", "1"}  # frozen, and buffers


def test_a_users_own_module_keeps_its_name(cluster, connect) -> None:
    optimizer = shardwell.torch.ServerOptimizer(OwnModule(), connect(cluster(1), "w0"), SGD)
    assert set(optimizer.parameter.spec.layout.by_name) == {"module.weight", "module.bias"}


def test_names_that_would_be_one_are_refused(cluster, connect) -> None:
    model = torch.nn.Module()
    model.add_module("_orig_mod", torch.nn.Linear(2, 2))
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(
        shardwell.ArgumentError, match=r"'weight' and '_orig_mod\.weight'.*both be 'weight'"
    ):
        shardwell.torch.ServerOptimizer(model, connect(cluster(1), "w0"), SGD)

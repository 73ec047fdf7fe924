"""Goal: what users get wrong with a ServerOptimizer is named, with advice that they can follow."""

from __future__ import annotations

import pytest

import shardwell

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

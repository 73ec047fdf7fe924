"""Goal: training moves to Shardwell from torch without changing its numbers.

Method: each optimizer beside torch.optim's of the same name, in float64 on torch's side; skipped
where torch is not installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.oracles.optimizers import gradients_of, run
from shardwell import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
pytestmark = pytest.mark.extras

SIZE, STEP_COUNT = 101, 30
PAIRS: list[tuple[Optimizer, str, dict[str, Any]]] = [
    (SGD(learning_rate=0.1), "SGD", {"lr": 0.1}),
    (
        SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.05),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    ),
    (
        SGD(learning_rate=0.1, momentum=0.6, dampening=0.3),
        "SGD",
        {"lr": 0.1, "momentum": 0.6, "dampening": 0.3},
    ),
    (
        SGD(learning_rate=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    (Adagrad(learning_rate=0.1), "Adagrad", {"lr": 0.1}),
    (
        Adagrad(learning_rate=0.1, epsilon=1e-4, initial_accumulator=0.3, weight_decay=0.1),
        "Adagrad",
        {"lr": 0.1, "eps": 1e-4, "initial_accumulator_value": 0.3, "weight_decay": 0.1},
    ),
    (RMSProp(learning_rate=0.01), "RMSprop", {"lr": 0.01}),
    (
        RMSProp(learning_rate=0.01, decay=0.9, momentum=0.7, epsilon=1e-5, weight_decay=0.1),
        "RMSprop",
        {"lr": 0.01, "alpha": 0.9, "momentum": 0.7, "eps": 1e-5, "weight_decay": 0.1},
    ),
    (Adam(), "Adam", {}),
    (
        Adam(learning_rate=0.02, beta1=0.8, beta2=0.95, epsilon=1e-5, weight_decay=0.1),
        "Adam",
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1},
    ),
    (AdamW(), "AdamW", {}),
    (
        AdamW(learning_rate=0.02, beta1=0.8, beta2=0.95, weight_decay=0.2),
        "AdamW",
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.2},
    ),
]


@pytest.mark.parametrize(("optimizer", "torchs", "options"), PAIRS)
def test_as_torch_does(optimizer: Optimizer, torchs: str, options: dict[str, Any]) -> None:
    start = np.random.default_rng(8).standard_normal(SIZE).astype(np.float32)
    gradients = gradients_of(STEP_COUNT, SIZE, seed=3)
    parameter = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    theirs = getattr(torch.optim, torchs)([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        theirs.step()
    weights, _ = run(optimizer, start, gradients)
    np.testing.assert_allclose(weights, parameter.detach().numpy(), rtol=2e-5, atol=2e-5)

"""Goal: ServerOptimizer makes of each two options what a parameter makes of them.

Those of a parameter are held against NumPy in tests/fault/shard/test_option_pairs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.data.covering import Row
from harness.data.one_worker_options import (
    ROWS,
    STEPS,
    of_a_parameter,
    options_of,
    rule_of,
    tensors,
)

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(map(str, row.values())))
def test_two_options_of_an_optimizer_together(cluster: Any, connect: Any, row: Row) -> None:
    running = cluster(2, chunk_size_bytes=64)
    expected = of_a_parameter(connect(running, "w0"), row)
    model, rule = torch.nn.Linear(3, 3), rule_of(row)
    named = {name: torch.from_numpy(values) for name, values in tensors(99).items()}
    model.load_state_dict(named)
    own = {"lr": rule.learning_rate / 2, "weight_decay": 0.125} if row["is_grouped"] else {}
    groups = [{"params": [model.weight], **own}, {"params": [model.bias]}]
    optimizer = shardwell.torch.ServerOptimizer(
        model,
        connect(running, "w1"),
        rule,
        param_groups=groups,
        overlap=row["overlap"],
        **options_of(row),
    )
    for step in range(STEPS):
        given = tensors(step)
        optimizer.zero_grad()
        loss = sum((p * torch.from_numpy(given[n])).sum() for n, p in model.named_parameters())
        loss.backward()
        optimizer.step()
        for name, values in model.named_parameters():
            found = values.detach().numpy()
            np.testing.assert_allclose(found, expected[step][name], rtol=1e-5, atol=2e-6)

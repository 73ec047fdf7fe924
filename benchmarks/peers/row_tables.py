"""The tables that are measured, their rows uniform at first."""

from __future__ import annotations

from typing import Any

import shardwell

OPTIMIZERS: dict[str, Any] = {
    "adagrad": shardwell.Adagrad(learning_rate=0.01),
    "sgd": shardwell.SGD(learning_rate=0.01),
    "row_wise_adagrad": shardwell.RowWiseAdagrad(learning_rate=0.01),
    "adam": shardwell.Adam(learning_rate=0.001),
    "ftrl": shardwell.FTRL(learning_rate=0.01),
}


def open_table(
    client: shardwell.Client,
    row_count: int,
    dim: int,
    optimizer: str,
    codec: str,
    mode: Any = "async",
    worker_count: int = 1,
) -> shardwell.Table:
    """The table; the same arguments are the same table."""
    return client.table(
        f"{optimizer}-{codec}-{mode}-{row_count}",
        row_count=row_count,
        dim=dim,
        optimizer=OPTIMIZERS[optimizer],
        initializer=shardwell.Uniform(low=-0.05, high=0.05, seed=1),
        worker_count=worker_count,
        codec=codec,
        mode=mode,
    )

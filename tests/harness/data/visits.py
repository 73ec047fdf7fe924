"""A training whose weights count how often each sample was in a gradient that counted."""

from __future__ import annotations

from typing import Any

import torch

import shardwell
import shardwell.torch

LENGTH = 50
BATCH_SIZE = 4


class Visits:
    """The gradient of sample i is 1 at place i, and the rate is 1: a weight falls by each visit.

    Args:
        client: The worker's.
        factor: The workers of a fixed crew, over which the shards take the mean.
        batch_size: Samples of a batch.
        kept: Options of the DataLoader.
        named: The samples are {"batch": ...}, as a Trainer has them.
        optimizer: Made of the parameters; default: SGD.
        crew: Options of `prepare`.
    """

    def __init__(
        self,
        client: shardwell.Client,
        *,
        factor: int = 1,
        batch_size: int = BATCH_SIZE,
        kept: dict[str, Any] | None = None,
        named: bool = False,
        optimizer: Any = None,
        **crew: Any,
    ) -> None:
        self.factor = factor
        self.model: Any = torch.nn.Linear(LENGTH, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        made = optimizer or (lambda tensors: torch.optim.SGD(tensors, 1.0))
        numbers = torch.arange(LENGTH)
        data: Any = [{"batch": each} for each in numbers]
        if not named:
            data = torch.utils.data.TensorDataset(numbers)
        whole: Any = torch.utils.data.DataLoader(
            data, batch_size, **{"shuffle": True, **(kept or {})}
        )
        self.model, self.optimizer, self.loader = shardwell.torch.prepare(
            self.model,
            made(self.model.parameters()),
            whole,
            client=client,
            **{"name": "visits", "codec": "fp32", **crew},
        )

    def loss(self, batch: Any) -> Any:
        """The loss whose gradient counts a batch."""
        inputs = torch.nn.functional.one_hot(batch, LENGTH).float()
        return self.factor * self.model(inputs).sum()

    def step(self, batch: Any) -> None:
        """Makes a step of one batch."""
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self) -> list[list[int]]:
        """Makes a step of each batch of one `for`; their numbers."""
        found = []
        for (batch,) in self.loader:
            found.append(batch.tolist())
            self.step(batch)
        return found

    @property
    def counts(self) -> list[int]:
        """How often each sample has counted."""
        found: list[int] = (-self.model.weight.detach()[0]).round().int().tolist()
        return found


def counts_at(client: shardwell.Client) -> list[int]:
    """How often each sample has counted, as the shards have it."""
    weights: Any = client.parameter("visits").get_weights()["weight"]
    found: list[int] = (-weights[0]).round().astype(int).tolist()
    return found

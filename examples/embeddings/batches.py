"""Batches of facts and of entities to tell them from, the same in every process.

Everything is a function of the batch's number and fixed seeds. So workers that share nothing but
their numbers deal the batches among themselves, and one process that takes all batches in their
order sees just what they see together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embeddings.knowledge_graph import Facts, Ids
from shardwell.errors import ArgumentError


@dataclass(frozen=True)
class Batch:
    """What one gradient is made of."""

    facts: Facts
    """(n, 3): true ones."""
    negatives: Ids
    """(k,): entities, of which nearly none would make such a fact true; shared by the facts."""

    @property
    def entity_ids(self) -> Ids:
        """(2 n + k,): heads, tails, negatives: the rows of entities that the gradient needs."""
        return np.concatenate([self.facts[:, 0], self.facts[:, 2], self.negatives])

    @property
    def relation_ids(self) -> Ids:
        """(n,): the rows of relations that it needs."""
        return self.facts[:, 1]


class Batches:
    """`batches[number]`, the same whenever and wherever it is asked for.

    Each pass over the facts is in another order; what is left over after the last full batch waits
    for the next pass. Negatives are drawn uniformly, with replacement.
    """

    def __init__(
        self,
        facts: Facts,
        *,
        entity_count: int,
        batch_size: int,
        negative_count: int,
        seed: int,
    ) -> None:
        if not 1 <= batch_size <= len(facts):
            raise ArgumentError(
                f"batch_size must be 1 to {len(facts)}, the number of facts; got {batch_size}"
            )
        self._facts = facts
        self._entity_count = entity_count
        self._batch_size = batch_size
        self._negative_count = negative_count
        self._seed = seed
        self._pass = -1
        self._order: Ids

    @property
    def count_per_pass(self) -> int:
        """Batches of one pass over all facts."""
        return len(self._facts) // self._batch_size

    def __getitem__(self, number: int) -> Batch:
        turn, place = divmod(number, self.count_per_pass)
        if turn != self._pass:
            random = np.random.default_rng((self._seed, 0, turn))
            self._order = random.permutation(len(self._facts))
            self._pass = turn
        chosen = self._order[place * self._batch_size :][: self._batch_size]
        random = np.random.default_rng((self._seed, 1, number))
        return Batch(
            self._facts[chosen],
            random.integers(0, self._entity_count, self._negative_count),
        )

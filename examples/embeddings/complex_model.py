"""The model: ComplEx (Trouillon et al., 2016), with gradients by rows.

An entity and a relation is a row of dim float32: dim / 2 complex numbers. The score of a fact is
the real part of sum(h * r * conj(t)): as in DistMult, but a relation need not be symmetric. Pure
functions of rows, as a table gives them; they compute in the rows' own dtype, float64 being for
tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from embeddings.knowledge_graph import Ids
from shardwell.errors import ArgumentError

Rows: TypeAlias = npt.NDArray[np.floating[Any]]
"""(n, dim), C-contiguous: real and imaginary parts in turns."""
_Complex: TypeAlias = npt.NDArray[np.complexfloating[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class ComplEx:
    """The model's size, and how its rows are kept small."""

    dim: int
    """Values of a row; even."""
    regularization: float
    """Factor of the sum of |z|^3 over the complex numbers of a fact's three rows (N3: Lacroix et
    al., 2018), which keeps them from learning facts by heart."""

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ArgumentError(f"dim must be even, two values a complex number; got {self.dim}")

    def tail_queries(self, heads: Rows, relations: Rows) -> Rows:
        """(n, dim): their dot products with entities are the scores of those as tails."""
        return _values(_numbers(heads) * _numbers(relations))

    def head_queries(self, tails: Rows, relations: Rows) -> Rows:
        """(n, dim): their dot products with entities are the scores of those as heads."""
        return _values(_numbers(tails) * _numbers(relations).conj())

    def loss_and_gradients(
        self, entities: Rows, relations: Rows, entity_ids: Ids
    ) -> tuple[float, Rows, Rows]:
        """The loss of true facts against false ones, and the gradients by the rows.

        Each fact asks two questions, which tail and which head, and the answer is to score above
        the negatives: softmax cross-entropy, the mean over all questions. A negative that is the
        answer is left out. To that the regularization is added, the mean over facts.

        Args:
            entities: (2 n + k, dim): the rows of n heads, of n tails, of k negatives.
            relations: (n, dim): the rows of n relations.
            entity_ids: (2 n + k,): which entities those are.

        Returns:
            The loss, and the gradients by `entities` and by `relations`: new, of their shapes. Rows
            of an entity that occurs more than once are to be added up.
        """
        count = len(relations)
        heads, tails, negatives = np.split(entities, [count, 2 * count])
        head_ids, tail_ids, negative_ids = np.split(entity_ids, [count, 2 * count])
        gradients = np.empty_like(entities)
        by_heads, by_tails, by_negatives = np.split(gradients, [count, 2 * count])

        loss, by_queries, by_tails[...], by_negatives[...] = _loss_of_answers(
            self.tail_queries(heads, relations), tails, negatives, tail_ids[:, None] == negative_ids
        )
        _numbers(by_heads)[...] = _numbers(by_queries) * _numbers(relations).conj()
        by_relations = _values(_numbers(by_queries) * _numbers(heads).conj())

        more, by_queries, by_answers, by_others = _loss_of_answers(
            self.head_queries(tails, relations), heads, negatives, head_ids[:, None] == negative_ids
        )
        by_heads += by_answers
        by_negatives += by_others
        _numbers(by_tails)[...] += _numbers(by_queries) * _numbers(relations)
        _numbers(by_relations)[...] += _numbers(by_queries).conj() * _numbers(tails)

        loss += more
        for rows, by_rows in ((heads, by_heads), (relations, by_relations), (tails, by_tails)):
            loss += self._regularize(rows, by_rows)
        return loss, gradients, by_relations

    def _regularize(self, rows: Rows, gradients: Rows) -> float:
        """Adds the gradient of the regularization to `gradients`; returns its value."""
        factor = self.regularization / max(len(rows), 1)
        sizes = np.abs(_numbers(rows))
        _numbers(gradients)[...] += (3.0 * factor) * sizes * _numbers(rows)
        return factor * float((sizes**3).sum(dtype=np.float64))


def _loss_of_answers(
    queries: Rows, answers: Rows, negatives: Rows, is_answer: npt.NDArray[np.bool_]
) -> tuple[float, Rows, Rows, Rows]:
    """Half the mean cross-entropy of n questions of one side, and its gradients.

    Args:
        queries: (n, dim).
        answers: (n, dim): the right one of each.
        negatives: (k, dim): wrong ones, for all.
        is_answer: (n, k): where a negative is the right one after all.

    Returns:
        The loss, and the gradients by queries, answers and negatives.
    """
    scores = queries @ negatives.T
    scores[is_answer] = -np.inf
    right = np.einsum("nd,nd->n", queries, answers)
    # log-sum-exp, with the largest score taken out so that nothing overflows.
    largest = np.maximum(right, scores.max(axis=1, initial=-np.inf))
    scores -= largest[:, None]
    right -= largest
    np.exp(scores, out=scores)
    totals = scores.sum(axis=1) + np.exp(right)
    weight = 0.5 / max(len(queries), 1)
    loss = weight * float((np.log(totals) - right).sum(dtype=np.float64))
    by_scores = scores
    by_scores *= (weight / totals)[:, None]
    by_right = -by_scores.sum(axis=1, keepdims=True)
    by_queries = by_scores @ negatives + by_right * answers
    return loss, by_queries, by_right * queries, by_scores.T @ queries


def _numbers(rows: Rows) -> _Complex:
    """A view of rows as (n, dim / 2) complex numbers."""
    dtype = np.complex64 if rows.dtype == np.float32 else np.complex128
    return rows.view(dtype)


def _values(numbers: _Complex) -> Rows:
    """A view of complex numbers as rows, (n, dim)."""
    dtype = np.float32 if numbers.dtype == np.complex64 else np.float64
    return numbers.view(dtype)

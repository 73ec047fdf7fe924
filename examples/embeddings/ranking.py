"""How good embeddings are: the rank of each held-out fact's answer among all entities.

The usual measure of this field: filtered ranks, of heads and of tails, the mean over both. An
answer that is not asked for, but is known to be true (from any part of the graph), does not count
as standing before the one that is. Equal scores share the mean of their ranks ("realistic"): a
model that gives everything the same score is in the middle, not first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from embeddings.complex_model import ComplEx, Rows
from embeddings.knowledge_graph import Facts, Ids
from shardwell.errors import ArgumentError

Flags: TypeAlias = npt.NDArray[np.bool_]
Ranks: TypeAlias = npt.NDArray[np.float64]
_HEAD, _RELATION, _TAIL = range(3)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What ranks come to."""

    mrr: float
    """Mean of 1 / rank, 0 to 1."""
    hits_at_10: float
    """The part of ranks that are at most 10."""
    rank_count: int
    """Two for each fact."""

    @staticmethod
    def of(ranks: Ranks) -> Ranking:
        """Of ranks from 1."""
        return Ranking(
            mrr=float((1.0 / ranks).mean()),
            hits_at_10=float((ranks <= 10).mean()),
            rank_count=len(ranks),
        )


class Examination:
    """Held-out facts as questions. Made once, asked of any rows.

    Args:
        facts: (n, 3), what is asked: each fact without its tail, and without its head.
        known: (m, 3): all true facts, those of `facts` too.
        entity_count: Entities that may be an answer: rows that `ranking` will get.
    """

    def __init__(self, facts: Facts, known: Facts, entity_count: int) -> None:
        self._facts = facts
        # Which other answers are true, (n, entity_count), asked for tails and for heads.
        self._other_tails = _other_answers(facts, known, _TAIL, entity_count)
        self._other_heads = _other_answers(facts, known, _HEAD, entity_count)

    def ranks(self, model: ComplEx, entities: Rows, relations: Rows) -> Ranks:
        """(2 n,): ranks of the tails, then of the heads.

        Raises:
            ArgumentError: a score is not finite; the model has diverged.
        """
        asked_tails = self._scores_of_tails(model, entities, relations)
        tails, asked = entities[self._facts[:, _TAIL]], relations[self._facts[:, _RELATION]]
        asked_heads = model.head_queries(tails, asked) @ entities.T
        return np.concatenate(
            [
                filtered_ranks(asked_tails, self._facts[:, _TAIL], self._other_tails),
                filtered_ranks(asked_heads, self._facts[:, _HEAD], self._other_heads),
            ]
        )

    def best_tails(self, model: ComplEx, entities: Rows, relations: Rows) -> Ids:
        """(n,): the entity of the highest score, other true answers left out."""
        scores = self._scores_of_tails(model, entities, relations)
        best: Ids = np.where(self._other_tails, -np.inf, scores).argmax(axis=1)
        return best

    def ranking(self, model: ComplEx, entities: Rows, relations: Rows) -> Ranking:
        """What `ranks` comes to."""
        return Ranking.of(self.ranks(model, entities, relations))

    def _scores_of_tails(self, model: ComplEx, entities: Rows, relations: Rows) -> Rows:
        heads, asked = entities[self._facts[:, _HEAD]], relations[self._facts[:, _RELATION]]
        scores: Rows = model.tail_queries(heads, asked) @ entities.T
        return scores


def filtered_ranks(scores: npt.NDArray[Any], answers: Ids, others: Flags) -> Ranks:
    """The rank of each answer, (n,), from 1.

    Args:
        scores: (n, entities) of each question.
        answers: (n,): the entity that is asked for.
        others: (n, entities): other true answers, which do not count.

    Raises:
        ArgumentError: a score is not finite. Compared with anything, NaN is not above it: a model
            that has diverged would come out first.
    """
    if not np.isfinite(scores).all():
        raise ArgumentError(
            "scores must be finite; the model has diverged: use a smaller learning rate"
        )
    own = np.take_along_axis(scores, answers[:, None], axis=1)
    above = ((scores > own) & ~others).sum(axis=1)
    equal = ((scores == own) & ~others).sum(axis=1)  # with the answer itself
    ranks: Ranks = above + (equal + 1) / 2
    return ranks


def _other_answers(facts: Facts, known: Facts, asked: int, entity_count: int) -> Flags:
    """(n, entity_count): where a known fact differs from a fact in nothing but what is asked."""
    given = _TAIL - asked
    base = np.int64(max(facts[:, _RELATION].max(initial=0), known[:, _RELATION].max(initial=0)) + 1)
    keys = facts[:, given] * base + facts[:, _RELATION]
    known_keys = known[:, given] * base + known[:, _RELATION]
    order = np.argsort(known_keys, kind="stable")
    known_keys, known_answers = known_keys[order], known[order, asked]
    starts = np.searchsorted(known_keys, keys, "left")
    counts = np.searchsorted(known_keys, keys, "right") - starts
    questions = np.repeat(np.arange(len(facts)), counts)
    places = np.arange(len(questions)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
    flags = np.zeros((len(facts), entity_count), np.bool_)
    flags[questions, known_answers[places]] = True
    flags[np.arange(len(facts)), facts[:, asked]] = False
    return flags

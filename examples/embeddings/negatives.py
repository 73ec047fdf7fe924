"""Some held-out questions with what embeddings answer, for people to read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embeddings.complex_model import ComplEx, Rows
from embeddings.knowledge_graph import KnowledgeGraph
from embeddings.ranking import Examination

_SEED = 33


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which tail? with the answer."""

    head: str
    relation: str
    answer: str
    """The entity with the highest score among those that are not known to be true anyway."""
    right_answer: str
    rank: float
    """Of the right answer, from 1."""


def ask_some(
    graph: KnowledgeGraph, model: ComplEx, entities: Rows, relations: Rows, count: int
) -> list[Question]:
    """Asks for the tails of some test facts, the same ones every time, whatever is answered."""
    chosen = np.random.default_rng(_SEED).permutation(len(graph.test))[:count]
    facts = graph.test[np.sort(chosen)]
    examination = Examination(facts, graph.all_facts, graph.entity_count)
    ranks = examination.ranks(model, entities, relations)
    answers = examination.best_tails(model, entities, relations)
    names = graph.entity_names
    return [
        Question(
            head=names[head],
            relation=graph.relation_names[relation],
            answer=names[answer],
            right_answer=names[tail],
            rank=rank,
        )
        for (head, relation, tail), answer, rank in zip(
            facts.tolist(), answers.tolist(), ranks.tolist(), strict=False
        )
    ]

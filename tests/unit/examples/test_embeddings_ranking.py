"""Ranks of answers against an oracle that sorts, with ties and with answers that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.complex_model import ComplEx
from embeddings.ranking import Examination, Ranking, filtered_ranks
from shardwell import ArgumentError

ENTITY_COUNT, RELATION_COUNT = 5, 2
MODEL = ComplEx(dim=2, regularization=0.0)


def expected_rank(scores: list[float], answer: int, others: set[int]) -> float:
    """The mean place of the answer over all orders of equal scores, by sorting candidates."""
    candidates = [entity for entity in range(len(scores)) if entity not in others]
    best_first = sorted((scores[entity] for entity in candidates), reverse=True)
    places = [place for place, value in enumerate(best_first, 1) if value == scores[answer]]
    return sum(places) / len(places)


facts_of_a_graph = st.sets(
    st.tuples(
        st.integers(0, ENTITY_COUNT - 1),
        st.integers(0, RELATION_COUNT - 1),
        st.integers(0, ENTITY_COUNT - 1),
    ),
    min_size=1,
    max_size=30,
)
small_numbers = st.integers(-2, 2).map(float)


def rows_of(count: int) -> st.SearchStrategy[np.ndarray]:
    """Few values, so that many scores are equal."""
    return st.lists(small_numbers, min_size=2 * count, max_size=2 * count).map(
        lambda values: np.array(values, np.float32).reshape(count, 2)
    )


@given(facts_of_a_graph, rows_of(ENTITY_COUNT), rows_of(RELATION_COUNT), st.data())
def test_ranks_are_those_of_an_oracle_that_sorts(known, entities, relations, data):
    asked = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=8))
    examination = Examination(np.array(asked), np.array(sorted(known)), ENTITY_COUNT)
    ranks = examination.ranks(MODEL, entities, relations)

    def score(head: int, relation: int, tail: int) -> float:
        h, r, t = (complex(*row) for row in (entities[head], relations[relation], entities[tail]))
        return (h * r * t.conjugate()).real

    expected = []
    everybody = range(ENTITY_COUNT)
    for head, relation, tail in asked:
        scores = [score(head, relation, other) for other in everybody]
        others = {e for e in everybody if (head, relation, e) in known} - {tail}
        expected.append(expected_rank(scores, tail, others))
    for head, relation, tail in asked:
        scores = [score(other, relation, tail) for other in everybody]
        others = {e for e in everybody if (e, relation, tail) in known} - {head}
        expected.append(expected_rank(scores, head, others))
    assert ranks.tolist() == expected


def test_a_model_that_knows_nothing_is_in_the_middle():
    scores = np.zeros((3, 101), np.float32)
    ranks = filtered_ranks(scores, np.array([0, 50, 100]), np.zeros((3, 101), np.bool_))
    assert ranks.tolist() == [51.0] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_model_that_has_diverged_does_not_come_out_first(value):
    scores = np.zeros((2, 4), np.float32)
    scores[1, 2] = value
    with pytest.raises(ArgumentError, match="diverged"):
        filtered_ranks(scores, np.array([0, 2]), np.zeros((2, 4), np.bool_))


def test_what_ranks_come_to():
    ranking = Ranking.of(np.array([1.0, 2.0, 10.0, 10.5]))
    assert ranking.mrr == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 10.5) / 4)
    assert ranking.hits_at_10 == 0.75
    assert ranking.rank_count == 4

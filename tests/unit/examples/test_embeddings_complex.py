"""ComplEx: scores against Python's complex numbers, gradients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embeddings.complex_model import ComplEx
from shardwell import ArgumentError

DIM = 6
MODEL = ComplEx(dim=DIM, regularization=0.05)
HEADS, TAILS, NEGATIVES = [0, 3, 3, 1], [2, 3, 0, 4], [4, 2, 0, 0, 5]
ENTITY_IDS = np.array(HEADS + TAILS + NEGATIVES)
"""Some negatives are the answer, one twice, and an entity is both head and tail of a fact."""


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Rows of six entities by what is asked of them, and of four relations; float64."""
    random = np.random.default_rng(7)
    return random.normal(0.0, 0.8, (6, DIM))[ENTITY_IDS], random.normal(0.0, 0.8, (4, DIM))


def numbers(row: np.ndarray) -> list[complex]:
    return [complex(real, imaginary) for real, imaginary in row.reshape(-1, 2).tolist()]


def score(head: np.ndarray, relation: np.ndarray, tail: np.ndarray) -> float:
    parts = zip(numbers(head), numbers(relation), numbers(tail), strict=True)
    return sum((h * r * t.conjugate()).real for h, r, t in parts)


def expected_loss(model: ComplEx, entities: np.ndarray, relations: np.ndarray) -> float:
    """From the definition, fact by fact."""
    count = len(HEADS)
    heads, tails, negatives = np.split(entities, [count, 2 * count])
    loss = 0.0
    for place in range(count):
        head, relation, tail = heads[place], relations[place], tails[place]
        right = score(head, relation, tail)
        for own, fact_of in (
            (TAILS[place], lambda other, h=head, r=relation: (h, r, other)),
            (HEADS[place], lambda other, r=relation, t=tail: (other, r, t)),
        ):
            wrong = [
                score(*fact_of(row))
                for entity, row in zip(NEGATIVES, negatives, strict=True)
                if entity != own
            ]
            loss -= math.log(math.exp(right) / sum(map(math.exp, [right, *wrong]))) / (2 * count)
        sizes = [abs(number) for row in (head, relation, tail) for number in numbers(row)]
        loss += model.regularization * sum(size**3 for size in sizes) / count
    return loss


def test_queries_score_as_complex_numbers_do(rows):
    entities, relations = rows
    heads, tails = entities[:4], entities[4:8]
    expected = [score(*fact) for fact in zip(heads, relations, tails, strict=True)]
    by_tails = (MODEL.tail_queries(heads, relations) * tails).sum(axis=1)
    by_heads = (MODEL.head_queries(tails, relations) * heads).sum(axis=1)
    np.testing.assert_allclose(by_tails, expected, rtol=1e-12)
    np.testing.assert_allclose(by_heads, expected, rtol=1e-12)


def test_a_relation_need_not_be_symmetric(rows):
    entities, relations = rows
    head, relation, tail = entities[:1], relations[:1], entities[4:5]
    there = MODEL.tail_queries(head, relation) @ tail.T
    back = MODEL.tail_queries(tail, relation) @ head.T
    assert abs(float((there - back)[0, 0])) > 0.01


def test_the_loss_is_what_its_definition_says(rows):
    loss, _, _ = MODEL.loss_and_gradients(*rows, ENTITY_IDS)
    assert loss == pytest.approx(expected_loss(MODEL, *rows), rel=1e-12)


@pytest.mark.parametrize("regularization", [0.0, 0.05])
def test_gradients_agree_with_finite_differences(rows, regularization):
    model = ComplEx(dim=DIM, regularization=regularization)
    _, *gradients = model.loss_and_gradients(*rows, ENTITY_IDS)
    width = 1e-6
    for array, gradient in zip(rows, gradients, strict=True):
        expected = np.empty_like(array)
        for place in np.ndindex(array.shape):
            kept, ends = array[place], []
            for sign in (1.0, -1.0):
                array[place] = kept + sign * width
                ends.append(expected_loss(model, *rows))
            array[place] = kept
            expected[place] = (ends[0] - ends[1]) / (2 * width)
        assert np.abs(gradient).max() > 0.01
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_rows_stay_as_they_are_and_gradients_are_new(rows):
    entities, relations = (array.astype(np.float32) for array in rows)
    before = entities.copy(), relations.copy()
    _, *gradients = MODEL.loss_and_gradients(entities, relations, ENTITY_IDS)
    for array, copy, gradient in zip((entities, relations), before, gradients, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert gradient.dtype == np.float32
        assert gradient.shape == array.shape
        assert not np.may_share_memory(gradient, array)


def test_large_scores_of_triples_do_not_overflow(rows):
    entities, relations = (array.astype(np.float32) * np.float32(1e3) for array in rows)
    loss, *gradients = MODEL.loss_and_gradients(entities, relations, ENTITY_IDS)
    assert np.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_without_negatives_there_is_nothing_to_learn(rows):
    entities, relations = rows
    model = ComplEx(dim=DIM, regularization=0.0)
    loss, *gradients = model.loss_and_gradients(entities[:8], relations, ENTITY_IDS[:8])
    assert loss == 0.0
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dim", [0, 1, 7])
def test_a_dim_that_is_no_pairs_is_refused(dim):
    with pytest.raises(ArgumentError, match=f"got {dim}"):
        ComplEx(dim=dim, regularization=0.0)

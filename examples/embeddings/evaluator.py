"""Measures what tables have learnt: a reader, which takes no part in the training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embeddings.complex_model import ComplEx
from embeddings.knowledge_graph import KnowledgeGraph
from embeddings.local_table import RowTable
from embeddings.ranking import Examination
from shardwell.numerics.codec import Float32

VALIDATION_MRR, TEST_MRR, TEST_HITS = "validation MRR", "test MRR", "test hits@10"
"""Names of the measures."""


class Evaluator:
    """Asks a table of entities and one of relations for all held-out facts."""

    def __init__(
        self, model: ComplEx, graph: KnowledgeGraph, entities: RowTable, relations: RowTable
    ) -> None:
        self._model = model
        self._tables = (
            (entities, np.arange(graph.entity_count)),
            (
                relations,
                np.arange(graph.relation_count),
            ),
        )
        known = graph.all_facts
        self._validation = Examination(graph.validation, known, graph.entity_count)
        self._test = Examination(graph.test, known, graph.entity_count)

    def rows(self) -> tuple[Float32, Float32]:
        """All entities and all relations, as they are now."""
        entities, relations = (table.get_rows(ids) for table, ids in self._tables)
        return entities, relations

    def progress(self) -> Mapping[str, float]:
        """The figures on the way: the filtered MRR of the validation facts."""
        return {VALIDATION_MRR: self._validation.ranking(self._model, *self.rows()).mrr}

    def result(self) -> Mapping[str, float]:
        """The figures at the end: of the test facts too."""
        rows = self.rows()
        validation = self._validation.ranking(self._model, *rows)
        test = self._test.ranking(self._model, *rows)
        return {VALIDATION_MRR: validation.mrr, TEST_MRR: test.mrr, TEST_HITS: test.hits_at_10}

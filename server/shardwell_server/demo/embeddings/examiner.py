"""Measures what tables have learnt: a reader, which takes no part in the training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwell.codec import Float32
from shardwell_server.demo.embeddings.complex_model import ComplEx
from shardwell_server.demo.embeddings.knowledge_graph import KnowledgeGraph
from shardwell_server.demo.embeddings.local_table import RowTable
from shardwell_server.demo.embeddings.ranking import Examination

VALIDATION_MRR, TEST_MRR, TEST_HITS = "validation MRR", "test MRR", "test hits@10"
"""Names of the measures."""


class Examiner:
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
        """What is shown on the way: the filtered MRR of the validation facts."""
        ranking = self._validation.ranking(self._model, *self.rows())
        return {VALIDATION_MRR: ranking.mrr}

    def result(self) -> Mapping[str, float]:
        """What is told at the end: of the test facts too."""
        entities, relations = self.rows()
        ranking = self._test.ranking(self._model, entities, relations)
        return {**self.progress(), TEST_MRR: ranking.mrr, TEST_HITS: ranking.hits_at_10}

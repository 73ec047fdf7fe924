"""One worker's training loop on two tables: what a program needs, and nothing else.

`train` is the example to copy. It does not know where the rows are: on the shards of a cluster, or
in this process, which is what the cluster is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import shardwell
from embeddings.batches import Batches
from embeddings.complex_model import ComplEx
from embeddings.evaluator import Evaluator
from embeddings.knowledge_graph import KnowledgeGraph
from embeddings.local_table import LocalTable, RowTable
from shardwell.specs.parameter import CodecName
from shardwell.specs.table import TableSpec
from shardwell_server.demo.reports import Report, Reporter

WORKER_COMMAND = "worker"
"""The hidden command that runs one worker and prints its reports."""
DATA_SET = "umls"
"""Of PyKEEN: 135 terms of medicine, and 46 ways in which one may have to do with another."""
MODEL = ComplEx(dim=256, regularization=0.01)
OPTIMIZER = shardwell.Adagrad(learning_rate=0.3)
LATE_LEARNING_RATE = 0.03
"""Of the last quarter of all steps. Rows come to rest, and two trainings that differ in nothing but
the order of their steps come closer to each other: the ratio of their MRR differs by 0.4 % from
seed to seed (its standard deviation), without this by 0.7 %."""
LATE_FROM = 0.75
"""The part of all steps after which that rate is used."""
ENTITY_INITIALIZER = shardwell.Uniform(low=-0.5, high=0.5, seed=30)
RELATION_INITIALIZER = shardwell.Uniform(low=-0.5, high=0.5, seed=31)
BATCH_SIZE = 128
"""Facts of one gradient."""
NEGATIVE_COUNT = 64
"""Entities that each fact's answers are compared with."""
BATCH_COUNT = 1600
"""Of all workers together: 40 passes over the facts, after which little is gained."""
BATCH_SEED = 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker is to do. All but `worker_id` and `worker_index` is the same for all."""

    target: str | None
    """The cluster: "HOST:PORT,HOST:PORT"; None: train alone, on tables of this process."""
    worker_id: str
    """The same after a restart, so that the worker goes on where it was."""
    worker_index: int = 0
    """Which of the batches are its own, 0 to worker_count - 1."""
    worker_count: int = 1
    """Workers among whom the batches are dealt."""
    step_count: int
    """Steps that each worker makes."""
    tables: str = "umls"
    """What the names of the tables in the cluster begin with."""
    codec: CodecName = "fp16"
    """How rows and gradients travel."""
    timeout_s: float = 60.0
    """Bound of each call."""
    connect_timeout_s: float = 60.0
    """How long shards are waited for."""

    def command(self) -> list[str]:
        """The command that does it, as arguments of Python."""
        return [
            "-m",
            "embeddings",
            WORKER_COMMAND,
            *([] if self.target is None else [f"--shards={self.target}"]),
            f"--worker-id={self.worker_id}",
            f"--worker-index={self.worker_index}",
            f"--worker-count={self.worker_count}",
            f"--steps={self.step_count}",
            f"--tables={self.tables}",
            f"--codec={self.codec}",
            f"--timeout-s={self.timeout_s}",
            f"--connect-timeout-s={self.connect_timeout_s}",
        ]


def table_specs(task: Task, graph: KnowledgeGraph) -> tuple[TableSpec, TableSpec]:
    """Entities and relations, as all who open them must agree."""
    entities, relations = (
        TableSpec(
            name=f"{task.tables}-{what}",
            row_count=row_count,
            dim=MODEL.dim,
            optimizer=OPTIMIZER,
            initializer=initializer,
            worker_count=0,
            codec=task.codec,
            mode="async",
        )
        for what, row_count, initializer in (
            ("entities", graph.entity_count, ENTITY_INITIALIZER),
            ("relations", graph.relation_count, RELATION_INITIALIZER),
        )
    )
    return entities, relations


def open_tables(
    client: shardwell.Client, task: Task, graph: KnowledgeGraph
) -> tuple[shardwell.Table, shardwell.Table]:
    """The two tables in the cluster."""
    entities, relations = (
        client.table(
            spec.name,
            row_count=spec.row_count,
            dim=spec.dim,
            optimizer=spec.optimizer,
            initializer=spec.initializer,
            codec=spec.codec,
            mode=spec.mode,
        )
        for spec in table_specs(task, graph)
    )
    return entities, relations


def run_worker(
    task: Task, graph: KnowledgeGraph, report: Callable[[Report], None], *, report_interval_s: float
) -> None:
    """Trains until this worker has made its steps; measures what it has learnt if it is alone.

    Raises:
        ShardwellError: see `Client` and `Table`.
    """
    if task.target is None:
        entities, relations = (LocalTable(spec) for spec in table_specs(task, graph))
        reporter = Reporter(report, shardwell.Traffic(), interval_s=report_interval_s)
        evaluator = Evaluator(MODEL, graph, entities, relations)
        train(task, graph, entities, relations, reporter, evaluator)
        return
    with shardwell.connect(
        task.target,
        worker_id=task.worker_id,
        timeout_s=task.timeout_s,
        connect_timeout_s=task.connect_timeout_s,
    ) as client:
        tables = open_tables(client, task, graph)
        reporter = Reporter(report, client.traffic, interval_s=report_interval_s)
        train(task, graph, *tables, reporter)


def train(
    task: Task,
    graph: KnowledgeGraph,
    entities: RowTable,
    relations: RowTable,
    reporter: Reporter,
    evaluator: Evaluator | None = None,
) -> None:
    """Fetches rows, computes, sends gradients of these rows and gets the next in one round trip.

    The learning rate is lowered by every worker that sees that it is time, as any of them may have
    ended; once it is low, that changes nothing.
    """
    batches = Batches(
        graph.training,
        entity_count=graph.entity_count,
        batch_size=BATCH_SIZE,
        negative_count=NEGATIVE_COUNT,
        seed=BATCH_SEED,
    )
    late_from, is_late = LATE_FROM * task.step_count * task.worker_count, False
    # The relations' gradient is sent last, so a step is made when their table says so.
    step = relations.next_step
    reporter.begin(step)
    batch = batches[step * task.worker_count + task.worker_index]
    entity_rows = entities.get_rows(batch.entity_ids)
    relation_rows = relations.get_rows(batch.relation_ids)
    while step < task.step_count:
        loss, by_entities, by_relations = MODEL.loss_and_gradients(
            entity_rows, relation_rows, batch.entity_ids
        )
        step += 1
        following = batches[step * task.worker_count + task.worker_index]
        entity_rows = entities.exchange_rows(batch.entity_ids, by_entities, following.entity_ids)
        relation_rows = relations.exchange_rows(
            batch.relation_ids, by_relations, following.relation_ids
        )
        batch = following
        if not is_late and entities.version >= late_from:  # steps of all workers
            entities.set_learning_rate(LATE_LEARNING_RATE)
            relations.set_learning_rate(LATE_LEARNING_RATE)
            is_late = True
        last = step == task.step_count
        measure = None if evaluator is None else (evaluator.result if last else evaluator.progress)
        reporter.add(step, loss, last=last, measure=measure)

"""Embeddings in two tables: ComplEx (Trouillon et al., 2016) learns which facts of UMLS are true.

pip install --no-deps pykeen==1.11.1    # ships the facts, as text; its code is not used
shardwell cluster --shard-count 2      # prints: export SHARDWELL_SHARDS=...
shardwell run -n 2 -- python examples/knowledge_graph.py    # with that variable set
"""

import importlib.util
import os
from pathlib import Path

import numpy as np

import shardwell

DIM, BATCH_SIZE, NEGATIVE_COUNT, STEP_COUNT = 128, 128, 64, 400
worker = int(os.environ.get("RANK", 0))  # `shardwell run` numbers the workers

package = importlib.util.find_spec("pykeen").submodule_search_locations[0]
parts = [Path(package, f"datasets/umls/{part}.txt") for part in ("train", "valid", "test")]
lines = [path.read_text().splitlines() for path in parts]
names = np.array([line.split("\t") for part in lines for line in part])
entity_names, ends = np.unique(names[:, [0, 2]], return_inverse=True)
relation_names, relation = np.unique(names[:, 1], return_inverse=True)
facts = np.column_stack([ends.reshape(-1, 2)[:, 0], relation, ends.reshape(-1, 2)[:, 1]])
training, test = facts[: len(lines[0])], facts[-len(lines[2]) :]


def complex_of(rows):
    return rows.view(np.complex64)  # a row is dim / 2 complex numbers


def gradients(heads, relations, tails, negatives):
    """Of the cross-entropy of the right tail among the negatives: score = Re(h * r * conj(t))."""
    queries = (complex_of(heads) * complex_of(relations)).view(np.float32)
    scores = np.column_stack([(queries * tails).sum(axis=1), queries @ negatives.T])
    by_scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    by_scores /= by_scores.sum(axis=1, keepdims=True)
    by_scores[:, 0] -= 1
    by_scores /= len(heads)
    by_queries = complex_of(by_scores[:, :1] * tails + by_scores[:, 1:] @ negatives)
    by_heads = (by_queries * complex_of(relations).conj()).view(np.float32)
    by_relations = (by_queries * complex_of(heads).conj()).view(np.float32)
    return by_heads, by_relations, by_scores[:, :1] * queries, by_scores[:, 1:].T @ queries


with shardwell.connect(worker_id=f"w{worker}") as client, shardwell.LeaveRequest() as request:
    options = {
        "dim": DIM,
        "optimizer": shardwell.Adagrad(learning_rate=0.3, weight_decay=3e-4),
        "initializer": shardwell.Uniform(low=-0.5, high=0.5),
        "mode": "async",
    }
    entities = client.table("umls-entities", row_count=len(entity_names), **options)
    relations = client.table("umls-relations", row_count=len(relation_names), **options)
    random = np.random.default_rng(worker)
    for _ in range(STEP_COUNT):
        request.check()  # SIGTERM ends it here; the other workers go on
        h, r, t = random.choice(training, BATCH_SIZE).T
        ids = np.concatenate([h, t, random.integers(0, len(entity_names), NEGATIVE_COUNT)])
        rows = np.split(entities.get_rows(ids), [BATCH_SIZE, 2 * BATCH_SIZE])
        by_h, by_r, by_t, by_negatives = gradients(rows[0], relations.get_rows(r), *rows[1:])
        entities.put_row_gradients(ids, np.concatenate([by_h, by_t, by_negatives]))
        relations.put_row_gradients(r, by_r)  # repeated ids add up

    h, r, t = test.T
    everything = entities.get_rows(np.arange(len(entity_names)))
    queries = complex_of(everything[h]) * complex_of(relations.get_rows(r))
    scores = queries.view(np.float32) @ everything.T
    right = np.take_along_axis(scores, t[:, None], axis=1)
    known = np.zeros((len(entity_names), len(relation_names), len(entity_names)), bool)
    known[tuple(facts.T)] = True  # other true answers do not count
    ranks = 1 + ((scores > right) & ~known[h, r]).sum(axis=1)
    print(f"MRR {(1 / ranks).mean():.3f}  hits@10 {(ranks <= 10).mean():.3f}")

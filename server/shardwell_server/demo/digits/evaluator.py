"""Measures the cluster's weights on held-out digits: a reader, which takes no worker's seat."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import shardwell
from shardwell.process.connected import Closing
from shardwell_server.demo.digits.model import FloatArray
from shardwell_server.demo.digits.samples import Samples
from shardwell_server.demo.digits.worker import MODEL, Task, open_weights

_TIMEOUT_S = 20.0


class Evaluator(Closing):
    """A client that only fetches weights. A context manager."""

    def __init__(self, task: Task, held_out: Samples) -> None:
        self._held_out = held_out
        self._weights = np.empty(MODEL.size, np.float32)
        task = dataclasses.replace(task, worker_id=f"{task.parameter}-evaluator")
        self._client = shardwell.connect(
            task.target, worker_id=task.worker_id, timeout_s=_TIMEOUT_S
        )
        try:
            self._parts = _opened(self._client, task, self._weights)
        except BaseException:
            self._client.close()
            raise

    def accuracy(self, timeout_s: float = _TIMEOUT_S) -> float:
        """Accuracy of the weights on the shards now; a worker must have called `init`."""
        for parameter, part in self._parts:
            parameter.get_weights(out=part, timeout_s=timeout_s)
        return MODEL.accuracy(self._weights, self._held_out.images, self._held_out.labels)

    def close(self) -> None:
        """Ends its connection."""
        self._client.close()


def _opened(
    client: shardwell.Client, task: Task, weights: FloatArray
) -> list[tuple[shardwell.Parameter, Any]]:
    if task.outer is None:
        return [(open_weights(client, task), weights)]
    tensors = MODEL.tensors(weights)
    found = []
    for index in range(task.outer.fragment_count):
        fragment = client.parameter(f"{task.parameter}.fragment-{index}")
        assert fragment.spec.layout is not None
        names = fragment.spec.layout.by_name
        found.append((fragment, {name: tensors[name] for name in names}))
    return found

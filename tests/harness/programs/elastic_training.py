"""Worker processes of one training whose members come and go, and what must hold of them.

A worker's program is elastic_torch_worker.py or elastic_jax_worker.py, and is started as

python PROGRAM TARGET WORKER_ID SEED STOP_FILE OPTIONS, which is JSON

It prints lines of JSON: `opened` and the digest of its weights; of each step `step`, `version`,
`counted`, `contributors`, `loss`, and the digest; `left`, once STOP_FILE exists; and `final`, the
digest of the cluster's weights, once that file says "all".
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.polling import PATIENCE_S, Stopwatch
from harness.programs.commands import Program
from shardwell_server import LocalCluster


class TrainingWorker(Program):
    """Such a process, started."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments, environment={"OMP_NUM_THREADS": "1"})
        self.found: list[dict[str, Any]] = []
        """Its lines so far."""

    def read(self) -> dict[str, Any]:
        """Its next line; blocks."""
        line: dict[str, Any] = json.loads(self.read_line())
        self.found.append(line)
        return line

    def until(self, is_such: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Its next line of a kind; blocks."""
        watch = Stopwatch()
        while not is_such(line := self.read()):
            assert watch.elapsed_s < PATIENCE_S, line
        return line


class ElasticTraining:
    """Workers of one training on a cluster of two shards.

    Args:
        stack: Ends them.
        folder: Folder of its file.
        program: The workers'.
        options: Theirs.
    """

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, program: Path, **options: Any
    ) -> None:
        self._stack, self._program = stack, program
        self._options = {"pause_s": 0.01, **options}
        self._target = stack.enter_context(LocalCluster(2, chunk_size_bytes=256)).target
        self._stop_file = folder / "stop"
        self.workers: list[TrainingWorker] = []

    def start(self, worker_id: str, seed: int, **more: Any) -> TrainingWorker:
        """Starts a worker, which has opened the training when this returns.

        Args:
            worker_id: Its name.
            seed: Seed of its first weights.
            more: Options of this worker alone.
        """
        given = json.dumps({**self._options, **more})
        arguments = (self._target, worker_id, str(seed), str(self._stop_file), given)
        worker = self._stack.enter_context(TrainingWorker(str(self._program), *arguments))
        self.workers.append(worker)
        worker.read()
        return worker

    def finish(self, *, has_shared_steps: bool = True) -> int:
        """Ends all that run; checks replicas, the last weights and the loss; returns the version.

        Workers that were killed have no final line; what they printed before counts.

        Args:
            has_shared_steps: Whether several workers must have counted one step.
        """
        self._stop_file.write_text("some")
        living = [worker for worker in self.workers if worker.process.poll() is None]
        for worker in living:
            worker.until(lambda line: "left" in line)
        self._stop_file.write_text("all")
        finals = [worker.until(lambda line: "final" in line) for worker in living]
        assert [worker.end() for worker in living] == [0] * len(living)
        assert len({final["final"] for final in finals}) == 1, finals
        assert self._check_replicas() or not has_shared_steps
        losses = [[line["loss"] for line in each.found if "loss" in line] for each in self.workers]
        begun = np.mean(losses[0][:5])
        for worker, own in zip(self.workers, losses, strict=True):
            assert worker not in living or np.mean(own[-5:]) < begun, (begun, own)
        return int(finals[0]["version"])

    def _check_replicas(self) -> bool:
        """Workers that counted a step have the same bits; whether several counted one."""
        by_version: dict[int, list[str]] = {}
        for worker in self.workers:
            for line in worker.found:
                if line.get("counted") == "all":
                    by_version.setdefault(line["version"], []).append(line["digest"])
        assert all(len(set(digests)) == 1 for digests in by_version.values())
        return any(len(digests) > 1 for digests in by_version.values())


def counted_by(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a line is of a step that counted all of the worker's gradient, and these workers'."""
    return lambda line: line.get("contributors") == list(names) and line["counted"] == "all"

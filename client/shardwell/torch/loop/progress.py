"""The work of frameworks' callbacks after each step of a ServerOptimizer: report, save, leave."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwell.checkpoint.steps import StepPaths
from shardwell.checkpoint.stores import place_of
from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.parameter import STEP_MAX
from shardwell.torch.optimizer import ServerOptimizer, save_training
from shardwell.training.leave_request import EXIT_CODE

_LOG = logging.getLogger("shardwell")


class StepProgress:
    """A framework's callback: one worker's progress, checkpoints and reports. For one thread."""

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        every: int = 100,
        keep: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__()
        if checkpoint is not None and StepPaths.of(place_of(checkpoint)) is None:
            raise ArgumentError(
                f"checkpoint must have {{step}} in its name, as 'runs/{{step}}'; got {checkpoint!r}"
            )
        self._checkpoint = checkpoint
        self._every = check_integer("every", every, 1, STEP_MAX)
        self._keep = keep
        self._max_steps = max_steps
        if max_steps is not None:
            check_integer("max_steps", max_steps, 1, STEP_MAX)
        self._optimizer: ServerOptimizer | None = None
        """The first one of the program, whose steps count."""
        self._optimizers: list[ServerOptimizer] = []
        """All of them, whose training a checkpoint has."""
        self._step = 0
        self._began_s = 0.0
        self._sample_count = 0
        self._speed: float | None = None

    def _begin(self, optimizers: Iterable[Any]) -> None:
        """Begins training with the `ServerOptimizer`s among these, or wrapped in one of these."""
        # Accelerate's and Lightning's wrappers have the optimizer.
        given = [getattr(each, "optimizer", each) for each in optimizers]
        found = [each for each in given if isinstance(each, ServerOptimizer)]
        if found:
            self._optimizer, self._step = found[0], found[0].next_step
            self._optimizers = found
            self._began_s = time.monotonic()
            self._check_rest()
            _warn_of_ranks()
            return
        raise ArgumentError(
            "the callback needs a shardwell.torch.ServerOptimizer, and training has "
            f"{', '.join(type(each).__name__ for each in given) or 'no optimizer'}; pass the one "
            "that shardwell.torch.prepare returns"
        )

    def _check_rest(self) -> None:
        if self._is_done:
            raise ArgumentError(
                f"parameter {self._begun.parameter.name!r} is at step {self._step}, and "
                f"max_steps={self._max_steps} ends its training there: raise max_steps, or train "
                "only while optimizer.next_step is below it"
            )

    @property
    def _begun(self) -> ServerOptimizer:
        assert self._optimizer is not None
        return self._optimizer

    @property
    def _is_done(self) -> bool:
        return self._max_steps is not None and self._step >= self._max_steps

    def _end_batch(
        self, sample_count: int, figures: Mapping[str, float] | None = None, *, reports: bool = True
    ) -> None:
        """Counts a batch; at a step's end saves, and reports, at once only if `reports`."""
        optimizer, before = self._begun, self._step
        self._sample_count += sample_count
        step = optimizer.next_step
        if step == before:
            return  # gradients accumulate
        now_s = time.monotonic()
        self._speed = self._sample_count / max(now_s - self._began_s, 1e-9)
        if reports:
            self._report(figures or {})
        self._step, self._began_s, self._sample_count = step, now_s, 0
        if (
            self._checkpoint is not None
            and (step // self._every > before // self._every or self._is_done)
            and optimizer.client.rank == 0
        ):
            save_training(self._optimizers, self._checkpoint, keep=self._keep)

    def _report(self, figures: Mapping[str, float]) -> None:
        """Reports figures of the step that ended last; before training, none."""
        if self._optimizer is None:
            return
        parameter, speed = self._begun.parameter, self._speed
        if speed is not None:
            figures, self._speed = {**figures, "samples_per_second": speed}, None
        parameter.report(step=max(parameter.next_step - 1, 0), **dict(figures))

    @property
    def _is_over(self) -> bool:
        """True if this worker is to end its training after the step."""
        return self._begun.is_leaving or self._is_done

    def _end(self) -> None:
        """Ends the training, and the program if this worker is asked to leave."""
        if self._begun.is_leaving:
            raise SystemExit(EXIT_CODE)


def _warn_of_ranks() -> None:
    """Warns a user whose framework has set up a process group, as a launcher's variables say."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
        if count > 1:
            _LOG.warning(
                "torch.distributed has %d ranks here, as a launcher's RANK, LOCAL_RANK and "
                "WORLD_SIZE ask for: DDP averages what the shards average again, and one lost rank "
                "ends all; remove them from os.environ before the framework is imported, and give "
                "worker_id=",
                count,
            )

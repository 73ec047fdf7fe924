"""What callbacks of frameworks do after each step of a ServerOptimizer: report, save, leave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.parameter import STEP_MAX
from shardwell.torch.optimizer import ServerOptimizer
from shardwell.training.leave_request import EXIT_CODE


class StepProgress:
    """Of one worker; for one thread.

    Args:
        checkpoint: Where the first worker saves, with `{step}` in its name; None: nowhere.
        every: Steps between two checkpoints.
        keep: How many checkpoints stay; None: all.
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str] | None, every: int, keep: int | None
    ) -> None:
        if checkpoint is not None and "{step}" not in os.fspath(checkpoint):
            raise ArgumentError(
                f"checkpoint must have {{step}} in its name, as 'runs/{{step}}'; got {checkpoint!r}"
            )
        self._checkpoint = checkpoint
        self._every = check_integer("every", every, 1, STEP_MAX)
        self._keep = keep
        self._optimizer: ServerOptimizer | None = None
        self._step = 0
        self._began_s = 0.0
        self._sample_count = 0
        self._speed: float | None = None
        """Samples a second of the last step, until they are reported."""

    def begin(self, optimizers: Iterable[Any]) -> None:
        """Training begins, with one of these.

        Raises:
            ArgumentError: none of them is a ServerOptimizer.
        """
        # Accelerate's and Lightning's wrappers have the optimizer.
        given = [getattr(each, "optimizer", each) for each in optimizers]
        for each in given:
            if isinstance(each, ServerOptimizer):
                self._optimizer, self._step = each, each.next_step
                self._began_s = time.monotonic()
                return
        raise ArgumentError(
            "the callback needs a shardwell.torch.ServerOptimizer, and training has "
            f"{', '.join(type(each).__name__ for each in given) or 'no optimizer'}; pass the one "
            "that shardwell.torch.prepare returns"
        )

    @property
    def _begun(self) -> ServerOptimizer:
        if self._optimizer is None:
            raise ArgumentError("training has not begun, and the callback knows no optimizer")
        return self._optimizer

    def end_batch(
        self, sample_count: int, figures: Mapping[str, float] | None = None, *, reports: bool = True
    ) -> None:
        """Counts a batch of samples; saves and reports where a step has ended with it.

        Args:
            sample_count: Samples of the batch.
            figures: Figures to report with the samples a second.
            reports: Whether now; else with the next `report`, for one at a time is sent.
        """
        optimizer, before = self._begun, self._step
        self._sample_count += sample_count
        step = optimizer.next_step
        if step == before:
            return  # gradients accumulate
        now_s = time.monotonic()
        self._speed = self._sample_count / max(now_s - self._began_s, 1e-9)
        if reports:
            self.report(figures or {})
        self._step, self._began_s, self._sample_count = step, now_s, 0
        if (
            self._checkpoint is not None
            and step // self._every > before // self._every
            and optimizer.client.rank == 0
        ):
            name = optimizer.parameter.name
            optimizer.client.save_checkpoint(self._checkpoint, [name], keep=self._keep)

    def report(self, figures: Mapping[str, float]) -> None:
        """Reports figures of the step that ended last."""
        parameter, speed = self._begun.parameter, self._speed
        if speed is not None:
            figures, self._speed = {**figures, "samples_per_second": speed}, None
        parameter.report(step=max(parameter.next_step - 1, 0), **dict(figures))

    @property
    def is_leaving(self) -> bool:
        """Whether this worker is to end its training after the step."""
        return self._begun.is_leaving

    def end(self) -> None:
        """Training ends.

        Raises:
            SystemExit: because this worker leaves; 143, so that it is started again where it is to.
        """
        if self._begun.is_leaving:
            raise SystemExit(EXIT_CODE)

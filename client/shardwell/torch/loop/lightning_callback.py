"""A callback for Lightning's Trainer, which is imported here alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from shardwell.torch.loop.progress import StepProgress

try:
    _lightning: Any = importlib.import_module("lightning.pytorch")
except ModuleNotFoundError:  # under its earlier name
    _lightning = importlib.import_module("pytorch_lightning")


class LightningCallback(StepProgress, _lightning.Callback):  # type: ignore[misc]
    """Reports a Lightning Trainer's steps to the cluster, saves checkpoints, leaves when asked.

        callback = shardwell.torch.LightningCallback("runs/{step}", every=100, keep=3)
        lightning.Trainer(callbacks=[callback]).fit(module, loader)

    `shardwell top` and the status page show loss and samples per second of all workers. A worker
    that an operator drains ends its training after the step under way, and then the program, with
    the exit code 143. SIGTERM is Lightning's: it ends `fit`, and the worker leaves with it.

    Args:
        checkpoint: Where rank 0 saves all that the optimizer's client has open, as `Prepared.save`
            does, with `{step}` in its name; default: nowhere.
        every: Steps of the cluster between two checkpoints; at `max_steps` there is one, too.
        keep: How many checkpoints stay; default: all.
        max_steps: The cluster's step at which training ends, that of the first ServerOptimizer,
            after restarts and with elastic members, too; the framework's own `max_steps` counts
            this worker's steps since its start and may be as large. Default: the framework alone
            decides.

    Raises:
        ArgumentError: an argument can't be; or, as training begins, none of the module's optimizers
            is a ServerOptimizer, or the cluster is at max_steps.

    Examples:
        >>> callback = shardwell.torch.LightningCallback("runs/{step}", every=100, keep=3)
        >>> trainer = lightning.Trainer(callbacks=[callback], max_epochs=3)
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to count steps."""
        self._begin(trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports the batch's loss and samples."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        figures = {} if loss is None else {"loss": float(loss)}
        self._end_batch(_sample_count(batch), figures)
        trainer.should_stop |= self._is_over

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends reporting."""
        self._end()


def _sample_count(batch: Any) -> int:
    parts = [batch]
    while parts:
        part = parts.pop(0)
        if getattr(part, "ndim", 0):
            return len(part)
        if isinstance(part, Mapping):
            parts = [*part.values(), *parts]
        elif isinstance(part, list | tuple):
            parts = [*part, *parts]
    return 1

"""A callback for the Trainer of transformers, which is imported here alone."""

from __future__ import annotations

import importlib
from typing import Any

from shardwell.torch.loop.progress import StepProgress
from shardwell.torch.loop.shares import SharedLoader

_transformers: Any = importlib.import_module("transformers")
_REPORTED = ("loss", "eval_loss", "grad_norm")


class TrainerCallback(StepProgress, _transformers.TrainerCallback):  # type: ignore[misc]
    """Reports a Trainer's steps to the cluster, saves checkpoints there, and leaves when asked.

        transformers.Trainer(
            model,
            arguments,
            train_dataset=data,
            optimizers=(optimizer, schedule),  # of a ServerOptimizer
            callbacks=[shardwell.torch.TrainerCallback("runs/{step}", max_steps=1000)],
        )

    `shardwell top` and the status page show loss and samples per second of all workers. Loss comes
    as often as the Trainer logs (`logging_steps`). A worker that SIGTERM or an operator asks to
    leave ends its training after the step under way, and then the program, with the exit code 143.

    Args:
        checkpoint: Where rank 0 saves all that the optimizer's client has open, as `Prepared.save`
            does, with `{step}` in its name; default: nowhere.
        every: Steps of the cluster between two checkpoints; at `max_steps` there is one, too.
        keep: How many checkpoints stay; default: all.
        max_steps: The cluster's step at which training ends, after restarts and with elastic
            members, too; the framework's own `max_steps` counts this worker's steps since its start
            and may be as large. Default: the framework alone decides.

    Raises:
        ArgumentError: an argument can't be; or, as training begins, its optimizer is no
            ServerOptimizer, or the cluster is at max_steps (a Trainer makes one step at least).

    Examples:
        >>> callback = shardwell.torch.TrainerCallback("runs/{step}", every=100, keep=3)
        >>> trainer = transformers.Trainer(model, arguments, callbacks=[callback])
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to count steps."""
        loader = kwargs.get("train_dataloader")
        if isinstance(loader, SharedLoader):  # the Trainer ends where an epoch has no batch
            loader.go_on_to(state.num_train_epochs)
        self._begin([kwargs["optimizer"]] if kwargs.get("optimizer") else [])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Counts a step, and stops the training when this worker is to leave."""
        count = args.train_batch_size * args.gradient_accumulation_steps
        self._end_batch(count, reports=not control.should_log)  # else with the loss
        control.should_training_stop |= self._is_over
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Reports the logged figures."""
        figures = {name: float(logs[name]) for name in _REPORTED if name in (logs or {})}
        if figures:
            self._report(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends reporting."""
        self._end()

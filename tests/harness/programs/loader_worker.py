"""A worker process whose loader is prepared, and whose weights count visits; see data/visits.py.

Arguments: how its loop is made (plain, accelerate, epochs, lightning, trainer), its worker id, and
options: `epochs`, `dies_at` (a step), and those of `Visits`. It prints a line for each batch.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
PATH = Path(__file__)


def main(how: str, worker_id: str, options: dict[str, Any]) -> None:
    """Trains to the end, or to the step at which it is to die."""
    warnings.filterwarnings("ignore")  # of the frameworks, which have many
    import shardwell
    from harness.data.visits import Visits

    epochs, dies_at = options.pop("epochs"), options.pop("dies_at", -1)
    factor = options.get("worker_count", 1)
    if "members" in options:
        options["members"] = shardwell.Elastic(**options["members"])
    with shardwell.connect(worker_id=worker_id) as client:
        run = Visits(client, factor=factor, **options)

        def note(batch: Any) -> None:
            print("SEEN", *batch.tolist(), flush=True)
            if run.optimizer.next_step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        LOOPS[how](run, note, epochs)
        print("STEPS", run.optimizer.next_step, flush=True)


def plain(run: Any, note: Any, epochs: int) -> None:
    """A loop of torch."""
    for _ in run.loader.epochs(epochs):
        for (batch,) in run.loader:
            note(batch)
            run.step(batch)


def accelerate(run: Any, note: Any, epochs: int) -> None:
    """The loader goes through Accelerate, which looks ahead."""
    import accelerate as its

    loader = its.Accelerator(cpu=True).prepare(run.loader)
    for _ in range(epochs):
        for (batch,) in loader:
            note(batch)
            run.step(batch)


def epochs(run: Any, note: Any, epochs: int) -> None:
    """As `accelerate`, which numbers its passes by itself; the loader as it was says the epochs."""
    import accelerate as its

    loader = its.Accelerator(cpu=True).prepare(run.loader)
    for _ in run.loader.epochs(epochs):
        for (batch,) in loader:
            note(batch)
            run.step(batch)


def lightning(run: Any, note: Any, epochs: int) -> None:
    """Lightning has the loop; two batches a step."""
    import lightning as its

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(its.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Any, _: int) -> Any:
            note(batch[0])
            return 2 * run.loss(batch[0])  # which Lightning divides by 2

        def configure_optimizers(self) -> Any:
            return run.optimizer

    its.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), run.loader)


def trainer(run: Any, note: Any, epochs: int) -> None:
    """The Trainer of transformers has the loop; two batches a step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers as its

    import shardwell.torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def forward(self, batch: Any) -> dict[str, Any]:
            note(batch)
            return {"loss": 2 * run.loss(batch)}  # which the Trainer divides by 2

    class Trainer(its.Trainer):
        def get_train_dataloader(self) -> Any:
            return run.loader

    arguments = its.TrainingArguments(
        "run",
        num_train_epochs=epochs,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        lr_scheduler_type="constant",
    )
    Trainer(
        Model(),
        arguments,
        optimizers=(run.optimizer, None),
        callbacks=[shardwell.torch.TrainerCallback()],
    ).train()


LOOPS = {
    "plain": plain,
    "accelerate": accelerate,
    "epochs": epochs,
    "lightning": lightning,
    "trainer": trainer,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))

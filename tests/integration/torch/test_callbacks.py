"""Goal: the Trainers of transformers and Lightning report their steps, save checkpoints and leave
by a callback, and are as before without one.

Method: each trains a model of a few weights on a cluster; what the shards were sent is read where
the status page reads it. Skipped where the frameworks are not installed (`make test-torch`).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

import shardwell
from harness.polling import eventually

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")

import shardwell.torch  # noqa: E402

MISSING = [name for name in ("lightning", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the frameworks, which have many
    pytest.mark.skipif(bool(MISSING), reason="make test-torch installs them"),
]
STEPS, BATCH_SIZE = 8, 2
EXAMPLES = [
    {"inputs": torch.tensor([float(n), 1.0]), "labels": torch.tensor([n / 9])} for n in range(32)
]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs: Any, labels: Any) -> dict[str, Any]:
        return {"loss": (self.layer(inputs) - labels).square().mean()}


def by_trainer(model: Any, optimizer: Any, folder: Path, callbacks: list[Any]) -> None:
    import transformers  # here, as each process that collects tests would take seconds for it

    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    transformers.Trainer(
        model, arguments, train_dataset=EXAMPLES, optimizers=(optimizer, None), callbacks=callbacks
    ).train()


def by_lightning(model: Any, optimizer: Any, folder: Path, callbacks: list[Any]) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(EXAMPLES, BATCH_SIZE))


RUNS = {"TrainerCallback": by_trainer, "LightningCallback": by_lightning}


def prepared(client: shardwell.Client, **options: Any) -> tuple[Any, Any]:
    model = Line()
    plain = torch.optim.SGD(model.parameters(), 0.001)
    return shardwell.torch.prepare(model, plain, client=client, **options)[:2]


@pytest.mark.parametrize("name", RUNS)
def test_steps_are_reported_and_saved(cluster, connect, tmp_path, name) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    model, optimizer = prepared(client)
    callback = getattr(shardwell.torch, name)(tmp_path / "{step}", every=3, keep=1)
    RUNS[name](model, optimizer, tmp_path / "run", [callback])
    assert optimizer.next_step == STEPS
    assert shardwell.inspect_checkpoint(tmp_path / "6").parameters[0].version == 6
    assert not (tmp_path / "3").exists()

    def means() -> dict[str, Any]:
        return dict(running.servers[0].shard.parameters.find("model").reports.means())

    eventually("the last step's figures came", lambda: {"loss", "samples_per_second"} <= {*means()})
    for figure in ("loss", "samples_per_second"):
        assert all(0 <= step < STEPS and value > 0 for step, value in means()[figure])


@pytest.mark.parametrize("name", RUNS)
def test_a_worker_that_is_drained_ends_its_training(cluster, connect, tmp_path, name) -> None:
    running = cluster(1)
    client, operator = connect(running, "w0"), connect(running, "operator")
    model, optimizer = prepared(client, members=shardwell.Elastic())

    def drain(*_: Any) -> None:
        if optimizer.next_step == 3:
            operator.drain("w0")

    model.register_forward_hook(drain)
    callback = getattr(shardwell.torch, name)()
    with pytest.raises(SystemExit) as caught:
        RUNS[name](model, optimizer, tmp_path / "run", [callback])
    assert caught.value.code == 143
    assert optimizer.next_step == 4


@pytest.mark.parametrize("name", RUNS)
def test_what_a_callback_cannot_use_is_named(tmp_path, name) -> None:
    make = getattr(shardwell.torch, name)
    with pytest.raises(shardwell.ArgumentError, match=r"\{step\} in its name"):
        make("runs")
    with pytest.raises(shardwell.ArgumentError, match="every"):
        make("runs/{step}", every=0)
    model = Line()
    plain = torch.optim.SGD(model.parameters(), 0.001)
    with pytest.raises(shardwell.ArgumentError, match=r"training has .*SGD.*prepare returns"):
        RUNS[name](model, plain, tmp_path / "run", [make()])
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        _ = shardwell.torch.KerasCallback

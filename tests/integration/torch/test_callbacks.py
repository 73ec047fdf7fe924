"""Goal: the Trainers of transformers and Lightning report their steps, save checkpoints and leave
by a callback, and are as before without one.

Method: each trains a model of a few weights on a cluster; what the shards were sent is read where
the status page reads it. Skipped where the frameworks are not installed (`make test-extras`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwell
from harness.polling import eventually
from harness.programs.commands import run_command

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")

import shardwell.torch  # noqa: E402

MISSING = [name for name in ("lightning", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the frameworks, which have many
    pytest.mark.skipif(bool(MISSING), reason="make test-extras installs them"),
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
def test_training_ends_at_a_step_of_the_cluster(cluster, connect, tmp_path, name) -> None:
    """Not of the worker, which was started again; what the shards have is saved then."""
    client = connect(cluster(1), "w0")
    end, make = STEPS - 2, getattr(shardwell.torch, name)
    model, optimizer = prepared(client)
    for _ in range(3):
        model(**EXAMPLES[0])["loss"].backward()
        optimizer.step()
    RUNS[name](model, optimizer, tmp_path / "run", [make(tmp_path / "{step}", max_steps=end)])
    assert optimizer.next_step == end
    assert (tmp_path / str(end)).exists()
    with pytest.raises(shardwell.ArgumentError, match=f"is at step {end}, and max_steps={end} "):
        RUNS[name](model, optimizer, tmp_path / "run", [make(max_steps=end)])


def test_a_trainer_evaluates_before_it_trains(tmp_path) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", prediction_loss_only=True
    )
    callback = shardwell.torch.TrainerCallback()
    trainer = transformers.Trainer(Line(), arguments, eval_dataset=EXAMPLES, callbacks=[callback])
    assert trainer.evaluate()["eval_loss"] > 0


PROGRAM = """
import os, signal, sys, transformers
rank, trains_alone = os.environ["RANK"], sys.argv[1] == "alone"
if trains_alone:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
import shardwell, shardwell.torch, torch
from integration.torch.test_callbacks import EXAMPLES, Line, by_trainer
from pathlib import Path

class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if trains_alone and rank == "1" and os.environ["SHARDWELL_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

with shardwell.connect(worker_id=f"w{rank}") as client:
    model, crew = Line(), shardwell.Elastic(min_count=2, member_return_s=0.1)
    rule = shardwell.SGD(0.001)
    options = {"name": sys.argv[1], "members": crew}
    optimizer = shardwell.torch.ServerOptimizer(model, client, rule, **options)
    callbacks = [shardwell.torch.TrainerCallback(max_steps=8), Dies()]
    if optimizer.next_step < 8:
        by_trainer(model, optimizer, Path("run"), callbacks)
    print("ends at", optimizer.next_step)
"""


def test_under_a_launcher(cluster, tmp_path, monkeypatch) -> None:
    """Without the launcher's variables a killed rank comes back; with them the log warns of DDP."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {"SHARDWELL_SHARDS": cluster(1).target, "PYTHONPATH": path}
    run = ("run", "--elastic", "-n", "2", "--", sys.executable, "train.py")
    code, output, log = run_command(*run, "alone", environment=environment)
    assert code == 0, (output, log)
    assert output.count("ends at 8") == 2
    assert re.search(r"rank 1 .*; it is started again in", log), log
    code, output, log = run_command(*run, "by-ddp", environment=environment)
    assert "torch.distributed has 2 ranks here" in output + log


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
    with pytest.raises(shardwell.ArgumentError, match=r"no field \{epoch\}"):
        make("runs/{step}-{epoch}")
    with pytest.raises(shardwell.ArgumentError, match="every"):
        make("runs/{step}", every=0)
    model = Line()
    plain = torch.optim.SGD(model.parameters(), 0.001)
    with pytest.raises(shardwell.ArgumentError, match=r"training has .*SGD.*prepare returns"):
        RUNS[name](model, plain, tmp_path / "run", [make()])
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        _ = shardwell.torch.KerasCallback

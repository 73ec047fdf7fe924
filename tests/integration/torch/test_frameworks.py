"""Goal: programs of transformers' Trainer, Accelerate and Lightning train with a ServerOptimizer as
they come, save, resume, and go on when a worker is killed.

Method: each framework runs one program twice, with torch's SGD and with a ServerOptimizer on a
cluster of its own, and the weights are compared: clipping at 1.0, two batches a step, a schedule,
evaluation, float32 and bfloat16 autocast. The programs that docs/pytorch.md prints run as printed,
a worker is killed from outside and started again, and the weights are those of an undisturbed run,
bit for bit. Skipped where the frameworks are not installed (`make test-extras` installs them).
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
from sklearn.datasets import load_digits  # noqa: E402

import shardwell.torch  # noqa: E402

MISSING = [
    name
    for name in ("accelerate", "lightning", "transformers")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the frameworks, which have many
    pytest.mark.skipif(bool(MISSING), reason="make test-extras installs them"),
]
ROOT = Path(__file__).resolve().parents[3]
STEPS, BATCH_SIZE = 8, 8
RATE, MOMENTUM = 0.1, 0.9
PIXELS, DIGITS = load_digits(return_X_y=True)
MakeOptimizer = Callable[[Any], Any]
EXAMPLES = [
    {"input_ids": torch.tensor(pixels, dtype=torch.long), "labels": torch.tensor(digit)}
    for pixels, digit in zip(PIXELS[: 2 * BATCH_SIZE * STEPS], DIGITS, strict=False)
]


def bert() -> Any:
    import transformers  # here, as each process that collects tests would take seconds for it

    torch.manual_seed(1)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=17,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)


def by_trainer(
    make: MakeOptimizer, folder: Path, *, steps: int, precision: str, resumes: bool = False
) -> Any:
    import transformers

    model = bert()
    optimizer = make(model)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        bf16=precision == "bf16",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=EXAMPLES,
        eval_dataset=EXAMPLES[:8],
        optimizers=(optimizer, schedule_of(optimizer)),
    )
    trainer.train(resume_from_checkpoint=True if resumes else None)
    return model


def by_accelerate(
    make: MakeOptimizer, folder: Path, *, steps: int, precision: str, resumes: bool = False
) -> Any:
    import accelerate

    model = bert()
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if precision == "bf16" else "no",
    )
    optimizer = make(model)
    loader = torch.utils.data.DataLoader(EXAMPLES, batch_size=BATCH_SIZE)
    prepared, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, schedule_of(optimizer)
    )
    first = 0
    if resumes:
        accelerator.load_state(str(folder))
        first = 4
        loader = accelerator.skip_first_batches(loader, 2 * first)
    for number, batch in enumerate(loader, 2 * first + 1):
        if number > 2 * steps:
            break
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number % 4 == 0:
            prepared.eval()
            with torch.no_grad():
                prepared(**batch)
            prepared.train()
        if number == 8:
            accelerator.save_state(str(folder))
    accelerator.free_memory()
    return model


def by_lightning(
    make: MakeOptimizer, folder: Path, *, steps: int, precision: str, resumes: bool = False
) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = bert()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> Any:
            optimizer = make(self.model)
            schedule = schedule_of(optimizer)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        val_check_interval=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(EXAMPLES, batch_size=BATCH_SIZE)
    trainer.fit(
        module,
        loader,
        torch.utils.data.DataLoader(EXAMPLES[:8], batch_size=8),
        ckpt_path=folder / "saved.ckpt" if resumes else None,
        weights_only=True,
    )
    if steps == 4:
        trainer.save_checkpoint(folder / "saved.ckpt")
    return module.model


def by_torch(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)


def on(client: shardwell.Client) -> MakeOptimizer:
    def make(model: Any) -> Any:
        rule = shardwell.SGD(RATE, momentum=MOMENTUM)
        return shardwell.torch.ServerOptimizer(model, client, rule, codec="fp32")

    return make


def assert_same(found: Any, expected: Any) -> None:
    for (name, mine), its in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            mine, its, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FRAMEWORKS = pytest.mark.parametrize("run", [by_trainer, by_accelerate, by_lightning])


@FRAMEWORKS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_program_as_it_comes(cluster, connect, tmp_path, run, precision) -> None:
    client = connect(cluster(2), "w0")
    found = run(on(client), tmp_path / "mine", steps=STEPS, precision=precision)
    assert client.parameter("model").next_step == STEPS
    expected = run(by_torch, tmp_path / "its", steps=STEPS, precision=precision)
    assert_same(found, expected)


@FRAMEWORKS
def test_outer_steps_round_a_program_as_it_comes(cluster, connect, tmp_path, run) -> None:
    """Of one learner with outer SGD of rate 1, which trains as by itself."""
    client = connect(cluster(2), "w0")
    made = []

    def make(model: Any) -> Any:
        optimizer = by_torch(model)
        rule = shardwell.SGD(1.0)
        options = {"sync_every": 4, "fragments": 2, "overlap": 0, "codec": "fp32"}
        made.append(shardwell.torch.DiLoCo(model, optimizer, client, outer=rule, **options))
        return optimizer

    found = run(make, tmp_path / "mine", steps=STEPS, precision="bf16")
    (diloco,) = made
    assert diloco.inner_step == STEPS
    assert [each.version for each in diloco.outer.fragments] == [2, 2]
    diloco.close()
    assert_same(found, run(by_torch, tmp_path / "its", steps=STEPS, precision="bf16"))


@FRAMEWORKS
def test_save_and_resume(cluster, connect, tmp_path, run) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    run(on(client), tmp_path / "mine", steps=4, precision="fp32")
    client.close()
    client = connect(running, "w0")
    found = run(on(client), tmp_path / "mine", steps=STEPS, precision="fp32", resumes=True)
    assert client.parameter("model").next_step == STEPS
    run(by_torch, tmp_path / "its", steps=4, precision="fp32")  # what comes next is its own matter
    expected = run(by_torch, tmp_path / "its", steps=STEPS, precision="fp32", resumes=True)
    assert_same(found, expected)


@FRAMEWORKS
def test_resuming_with_values_on_a_new_cluster(cluster, connect, tmp_path, run) -> None:
    def first(model: Any) -> Any:
        optimizer = on(connect(cluster(2), "w0"))(model)
        optimizer.saves_values = True
        return optimizer

    run(first, tmp_path / "mine", steps=4, precision="fp32")
    client = connect(cluster(3), "w0")
    found = run(on(client), tmp_path / "mine", steps=STEPS, precision="fp32", resumes=True)
    assert client.parameter("model").next_step == STEPS
    run(by_torch, tmp_path / "its", steps=4, precision="fp32")
    expected = run(by_torch, tmp_path / "its", steps=STEPS, precision="fp32", resumes=True)
    assert_same(found, expected)


@FRAMEWORKS
def test_a_cluster_that_lost_its_memory_is_named(cluster, connect, tmp_path, run) -> None:
    run(on(connect(cluster(2), "w0")), tmp_path / "mine", steps=4, precision="fp32")
    other = on(connect(cluster(2), "w0"))
    with pytest.raises(shardwell.ArgumentError, match=r"step 4 .* at step 0.*restore_checkpoint"):
        run(other, tmp_path / "mine", steps=STEPS, precision="fp32", resumes=True)


def programs() -> dict[str, str]:
    """What docs/pytorch.md says to save, by name."""
    text = (ROOT / "docs/pytorch.md").read_text()
    blocks = re.findall(r"Save this as\s`(\w+\.py)`:\n\n```python\n(.*?)^```", text, re.M | re.S)
    return dict(blocks)


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning"])
def test_a_worker_of_the_docs_is_killed_and_started_again(
    cluster, connect, tmp_path, monkeypatch, name
) -> None:
    for file, block in programs().items():
        (tmp_path / file).write_text(block)
    monkeypatch.chdir(tmp_path)
    file = f"with_{name}.py"

    def started(running: Any, worker_id: str) -> Program:
        environment = {"SHARDWELL_SHARDS": running.target, "OMP_NUM_THREADS": "1"}
        return Program(file, worker_id, environment=environment, is_forked=True)

    clusters = [cluster(2, chunk_size_bytes=1024) for _ in range(2)]
    clients = [connect(running, "reader") for running in clusters]
    weights = []
    with started(clusters[0], "w0") as first, started(clusters[0], "w1") as second:
        eventually(
            "some steps are made",
            lambda: any(each.version_min >= 5 for each in clients[0].status()[0].parameters),
            timeout_s=PATIENCE_S,
        )
        second.send(signal.SIGKILL)
        second.end()
        with (
            started(clusters[0], "w1") as again,
            started(clusters[1], "w0") as third,
            started(clusters[1], "w1") as fourth,
        ):
            for program in (first, again, third, fourth):
                assert program.end(120.0) == 0, program.log[-20:]
        assert re.search(rf"'w1' goes on with parameter 'with-{name}' at step \d+", str(again.log))
    for client in clients:
        entry = next(e for e in client.status()[0].parameters if e.spec.name == f"with-{name}")
        assert entry.version_min == 30
        weights.append(client.parameter(f"with-{name}").get_weights())
    for tensor, values in weights[0].items():
        assert (values == weights[1][tensor]).all(), tensor

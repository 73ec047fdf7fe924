"""Goal: public reports on resuming, as programs: a training that is killed, or goes on from a
checkpoint, ends as the one that nothing disturbed.

Method: a docstring cites the report and says what its author wanted. Programs as users write them
train on real shards; some kill themselves and are started again, and samples, rates or weights are
compared with those of an undisturbed run, or with numbers that are computed here
(harness/programs/reported.py). Skipped where the frameworks are not installed (`make test-extras`
installs them).
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import numpy as np
import pytest

from harness.programs.commands import Program
from harness.programs.reported import (
    COUNT,
    PREPARED,
    each_sample,
    ended,
    run,
    started,
    times,
)
from harness.threads import together

MISSING = [
    name
    for name in ("jax", "lightning", "optax", "orbax", "torch", "transformers")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(bool(MISSING), reason="make test-extras installs them"),
]
STEP = """
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOOP = "for epoch in loader.epochs(2):\n    for indices, in loader:" + STEP
EPOCH_STEPS = -(-COUNT // 4)


def weights_of(connect: Any, running: Any, name: str = "net") -> dict[str, Any]:
    weights = connect(running, "reader").parameter(name).get_weights()
    return {tensor: np.array(values) for tensor, values in weights.items()}


# The place in the data.


def test_a_program_that_is_killed_twice_in_an_epoch_keeps_its_place(cluster, connect) -> None:
    """KempnerInstitute/KempnerForge#57: the second restart within an epoch begins where the program
    was, and not where it had begun before."""
    text = PREPARED + LOOP
    running = cluster(2)
    parts = [run(running.target, text, stop=stop) for stop in (2, 5, 9, -1)]
    assert [step for seen in parts for step, _ in seen] == list(range(2 * EPOCH_STEPS))
    assert times(*parts) == each_sample(2)
    assert weights_of(connect, running)["visits"].tolist() == [2.0] * COUNT


def test_a_program_that_is_killed_between_epochs_makes_the_next_one_whole(cluster) -> None:
    """verl-project/verl#7401, meta-pytorch/data#1437: a restart at an epoch's very end leaves out
    no epoch."""
    text = PREPARED + LOOP.replace("    for", '    print("EPOCH", epoch, flush=True)\n    for', 1)
    target = cluster(2).target
    first = run(target, text, stop=EPOCH_STEPS)
    with started(target, text) as program:
        second = ended(program)
    assert times(first) == times(second) == each_sample(1)
    assert [line for line in program.lines if line.startswith("EPOCH")] == ["EPOCH 1"]


def test_a_trainer_goes_on_with_another_batch_size(cluster, connect, tmp_path) -> None:
    """huggingface/transformers#43708: with another per_device_train_batch_size, a resumed Trainer
    trains the samples that are left, and makes the steps that these are."""
    text = """
import transformers
transformers.logging.set_verbosity_error()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Visits()

    def forward(self, indices):
        note(optimizer, indices)
        return {"loss": self.inner(indices)}

class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        return loader

size = int(sys.argv[3])
model = Model()
loader = torch.utils.data.DataLoader(
    [{"indices": torch.tensor(place)} for place in range(COUNT)], batch_size=size, shuffle=True
)
model, optimizer, loader = shardwell.torch.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1.0), loader, name="net", codec="fp32"
)
Trainer(
    model,
    transformers.TrainingArguments(
        sys.argv[2], max_steps=100, per_device_train_batch_size=size, max_grad_norm=0.0,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1000,
    ),
    train_dataset=loader.dataset,
    optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    callbacks=[shardwell.torch.TrainerCallback(max_steps=9)],
).train()
"""
    running = cluster(2)
    first = run(running.target, text, str(tmp_path), "4", stop=3)
    second = run(running.target, text, str(tmp_path), "8")
    assert [len(samples) for _, samples in first + second] == [4, 4, 4, 8, 6, 8, 8, 8, 2]
    assert times(first, second[:2]) == times(second[2:]) == each_sample(1)
    assert weights_of(connect, running)["inner.visits"].tolist() == [2.0] * COUNT


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_what_an_elastic_worker_had_when_it_ended_is_trained_by_others(cluster, end) -> None:
    """horovod/horovod#3399, meta-pytorch/torchft#58: no sample is trained twice in an epoch, and
    none is lost, where a worker leaves or dies in it, and another one goes on."""
    text = """
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, num_workers=1)
model, optimizer, loader = shardwell.torch.prepare(
    model, plain, loader, name="net", codec="fp32",
    members=shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0),
)
made = 0
for epoch in loader.epochs(2):
    for indices, in loader:
        made += 1
        if made == 4 and sys.argv[2]:
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        model(indices).backward()
        try:
            optimizer.step()
        finally:  # a worker that is asked to leave ends here
            if optimizer.outcome.counted == "all":
                print("SEEN", optimizer.outcome.step, *indices.tolist(), flush=True)
        optimizer.zero_grad()
"""
    target = cluster(2).target

    def worker(worker_id: str, *arguments: str) -> Any:
        variables = {"SHARDWELL_WORKER_ID": worker_id, "COUNT": "120"}
        return started(target, text, *arguments, environment=variables)

    with worker("w1", end) as first, worker("w2", "") as second:
        seen = [ended(first, whole=True), ended(second)]
    with worker("w3", "") as third:
        seen.append(ended(third))
    assert first.process.returncode == {"SIGTERM": 143, "SIGKILL": -9}[end]
    assert seen[0]
    assert times(*seen) == each_sample(2, range(120))


def test_a_checkpoint_of_two_workers_goes_on_with_three(cluster, connect, tmp_path) -> None:
    """AI-Hypercomputer/maxtext#1760, ray-project/ray#48224: with another number of processes than
    the checkpoint's, an epoch still has each sample exactly once. A program of JAX."""
    import jax
    import jax.numpy as jnp

    import shardwell.jax

    def work(client: Any, count: int, until: int) -> list[int]:
        net = shardwell.jax.TreeParameter(
            client,
            "net",
            {"visits": jnp.zeros(COUNT)},
            optimizer=shardwell.SGD(1.0),
            worker_count=count,
            codec="fp32",
        )
        weights, found = net.get_weights(), []
        gradient = jax.grad(lambda weights, indices: -weights["visits"][indices].sum())
        for batch in net.batches(shardwell.Samples(COUNT, batch_size=3), epochs=2):
            weights = net.exchange(gradient(weights, batch.indices))
            found += batch.indices.tolist()
            if net.parameter.next_step == until:
                break
        return found

    def crew(running: Any, count: int, until: int) -> list[list[int]]:
        clients = [connect(running, f"w{rank}") for rank in range(count)]
        return together([lambda client=each: work(client, count, until) for each in clients])

    running = cluster(2)
    before = crew(running, 2, 3)
    connect(running, "saver").save_checkpoint(tmp_path / "saved")
    running = cluster(3)
    connect(running, "saver").restore_checkpoint(tmp_path / "saved", worker_count=3)
    after = crew(running, 3, -1)
    assert len(before[0]) == len(before[1]) == 9
    found = Counter(sample for part in before + after for sample in part)
    assert found == each_sample(2)


# What follows the step.


def test_a_schedule_of_a_restarted_program_is_at_the_clusters_step(cluster, connect) -> None:
    """Lightning-AI/pytorch-lightning#4655: the rate of each step is that of the same step in a run
    without a restart, and does not lag behind."""
    text = """
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
import logging, lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
model, optimizer, loader = shardwell.torch.prepare(model, plain, loader, name="net", codec="fp32")
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
while schedule.last_epoch < optimizer.next_step:  # as the log says at a restart
    schedule.step()

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        note(optimizer, batch[0])
        return self.model(batch[0])

    def configure_optimizers(self):
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

lightning.Trainer(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=9,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[shardwell.torch.LightningCallback(max_steps=10)],
).fit(Module(), loader)
"""
    running = cluster(2)
    seen = run(running.target, text, stop=4) + run(running.target, text)
    assert [step for step, _ in seen] == list(range(10))
    expected = np.zeros(COUNT)
    for step, samples in seen:
        expected[list(samples)] += 1 / (1 + step)
    np.testing.assert_allclose(weights_of(connect, running)["visits"], expected, rtol=1e-6)


def test_a_step_that_a_scaler_skips_is_none_of_the_schedule(cluster, connect) -> None:
    """Lightning-AI/pytorch-lightning#18828: a step that a GradScaler skips moves no learning rate,
    also across a restart, which keeps the scale, the schedule, and what the program counts."""
    text = """
schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10**6)
made = {"attempts": 0}
model, optimizer, loader = shardwell.torch.prepare(
    model, plain, loader, schedule=schedule, scaler=scaler, state={"made": made},
    name="net", codec="fp32",
)
for epoch in loader.epochs(1):
    for indices, in loader:
        attempt, scale = made["attempts"], scaler.get_scale()
        made["attempts"] += 1
        note(optimizer, indices)
        print("SCALE", attempt, scale, schedule.get_last_lr()[0], flush=True)
        loss = model(indices) * (float("inf") if attempt in (1, 5) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            schedule.step()
        optimizer.zero_grad()
"""
    running = cluster(2)
    lines = []
    for stop in (3, -1):
        with started(running.target, text, stop=stop) as program:
            ended(program)
        lines += [line.split()[1:] for line in program.lines if line.startswith("SCALE")]
    lines = [list(each) for each in dict.fromkeys(map(tuple, lines))]  # a step is made again
    scales = [(int(attempt), float(scale)) for attempt, scale, _ in lines]
    assert scales == [*enumerate([64.0] * 2 + [32.0] * 4 + [16.0] * 3)]
    counted = [0, 1, 1, 2, 3, 4, 4, 5, 6]
    np.testing.assert_allclose([float(rate) for *_, rate in lines], [1 / (1 + n) for n in counted])


def test_an_average_of_weights_goes_on_after_a_kill(cluster) -> None:
    """ai2cm/ace#349, m2lines/Samudra#282: a restarted program has the moving average of its weights
    as it was, and its number of updates."""
    text = """
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)
)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = shardwell.torch.prepare(
    model, plain, loader, state={"average": average}, name="net", codec="fp32"
)
for epoch in loader.epochs(1):
    for indices, in loader:
        note(optimizer, indices)
        model(indices).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
print("AVERAGE", int(average.n_averaged), average.module.visits.tolist(), flush=True)
"""

    def ends(*stops: int) -> list[str]:
        target = cluster(2).target
        for stop in stops:
            with started(target, text, stop=stop) as program:
                ended(program)
        return program.lines[-1:]

    undisturbed = ends(-1)
    assert undisturbed[0].startswith("AVERAGE 7 ")
    assert ends(4, -1) == undisturbed


def test_a_checkpoint_of_a_callback_has_all_optimizers(cluster, connect, tmp_path) -> None:
    """dansuh17/segan-pytorch#14, keras-team/keras#10806: a checkpoint of a generator and a critic
    has both, with both optimizers' state."""
    text = """
import logging, lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
nets = [torch.nn.Linear(1, 3), torch.nn.Linear(1, 3)]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
adam = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
_, first, loader = shardwell.torch.prepare(
    nets[0], adam[0], loader, name="generator", codec="fp32"
)
_, second, _ = shardwell.torch.prepare(
    nets[1], adam[1], client=first.client, name="critic", codec="fp32"
)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleList(nets)

    def training_step(self, batch, _):
        note(first, batch[0])
        for net, optimizer in zip(self.nets, self.optimizers()):
            self.manual_backward(net(batch[0][:, None] / 26).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [first, second]

lightning.Trainer(
    accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=9,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        shardwell.torch.LightningCallback(
            sys.argv[2] + "/{step}", every=3, max_steps=int(sys.argv[3])
        )
    ],
).fit(Module(), loader)
"""
    undisturbed, before, after = cluster(2), cluster(2), cluster(3)
    whole = run(undisturbed.target, text, str(tmp_path / "whole"), "9")
    first = run(before.target, text, str(tmp_path / "parts"), "5")
    connect(after, "operator").restore_checkpoint(tmp_path / "parts" / "3")
    second = run(after.target, text, str(tmp_path / "parts"), "9")
    assert first[:3] + second == whole
    for name in ("generator", "critic"):
        expected = weights_of(connect, undisturbed, name)
        for tensor, values in weights_of(connect, after, name).items():
            np.testing.assert_array_equal(values, expected[tensor], name)


def test_a_checkpoint_has_the_statistics_of_batch_normalization(cluster, connect, tmp_path) -> None:
    """torch/nn#1165: running means and variances are in a checkpoint, as parameters are, though no
    optimizer trains them."""
    text = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = shardwell.torch.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader, name="net", codec="fp32"
)
if optimizer.next_step == 0:
    for epoch in loader.epochs(1):
        for indices, in loader:
            note(optimizer, indices)
            model(indices[:, None].float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.average_buffers()
    optimizer.client.save_checkpoint(sys.argv[2])
print("STATISTICS", model[0].running_mean.item(), model[0].running_var.item(), flush=True)
"""
    path = str(tmp_path / "saved")

    def last_line(target: str) -> str:
        with started(target, text, path) as program:
            assert program.end() == 0, program.log[-20:]
        return program.lines[-1]

    before = last_line(cluster(2).target)
    after = cluster(3)
    connect(after, "operator").restore_checkpoint(path)
    assert before.startswith("STATISTICS")
    assert last_line(after.target) == before


def test_random_numbers_go_on_by_rank_after_a_kill(cluster) -> None:
    """vllm-project/speculators#1027, NVIDIA/Megatron-LM#6858: a resumed run draws the noise that
    the undisturbed run drew, and each rank its own."""
    text = """
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
noise = torch.Generator().manual_seed(7 + int(os.environ["RANK"]))
model, optimizer, loader = shardwell.torch.prepare(
    model, plain, loader, state={"noise": noise}, name="net", codec="fp32"
)
for epoch in loader.epochs(2):
    for indices, in loader:
        note(optimizer, indices)
        step, drawn = optimizer.next_step, torch.rand((), generator=noise)
        (drawn * model(indices)).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("DRAWN", step, drawn.item(), flush=True)
"""

    def drawn(target: str, stop: int) -> list[list[str]]:
        with (
            started(target, text, rank=0, worker_count=2) as first,
            started(target, text, rank=1, worker_count=2, stop=stop) as second,
        ):
            programs = [second]
            ended(second)
            if stop >= 0:
                programs.append(again := started(target, text, rank=1, worker_count=2))
                with again:
                    ended(again)
            ended(first)
        return [  # a step that is made again draws the same
            list(dict.fromkeys(line for each in of for line in each.lines if line[:5] == "DRAWN"))
            for of in ([first], programs)
        ]

    undisturbed = drawn(cluster(2).target, -1)
    assert undisturbed[0] != undisturbed[1]
    assert drawn(cluster(2).target, 3) == undisturbed


def test_a_restored_schedule_of_optax_is_at_the_clusters_step(cluster, tmp_path) -> None:
    """google-deepmind/optax#1036, NVIDIA-NeMo/Automodel#763: a program restores an optax state of
    an earlier step with orbax, and its schedule goes on with the weights' step."""
    text = """
import sys
import jax, jax.numpy as jnp, optax, orbax.checkpoint as orbax
import shardwell, shardwell.jax

first = {"weights": jnp.zeros(5)}
with shardwell.connect() as client:
    net = shardwell.jax.TreeParameter(
        client, "net", first, optimizer=shardwell.SGD(1.0), codec="fp32"
    )
    update = shardwell.jax.server_updates(net, learning_rate=lambda step: 1 / (1.0 + step))
    weights = net.get_weights(min_version=net.parameter.next_step)
    state = update.init(weights)
    saver = orbax.StandardCheckpointer()
    path = sys.argv[2] + "/state"
    if net.parameter.next_step:
        state = saver.restore(path, {"state": state})["state"]
    while net.parameter.next_step < 9:
        if net.parameter.next_step == int(sys.argv[1]):
            break
        given = jax.tree.map(lambda each: -jnp.ones_like(each), weights)
        updates, state = update.update(given, state, weights)
        weights = optax.apply_updates(weights, updates)
        if net.parameter.next_step == 3:
            saver.save(path, {"state": state})
            saver.wait_until_finished()
    print("WEIGHTS", weights["weights"][0].item(), flush=True)
"""
    variables = {"SHARDWELL_SHARDS": cluster(2).target, "SHARDWELL_WORKER_ID": "w0"}
    for stop in ("6", "-1"):
        arguments = ("-c", text, stop, str(tmp_path))
        with Program(*arguments, environment=variables, is_forked=True) as program:
            assert program.end() == 0, program.log[-20:]
    expected = sum(1 / (1 + step) for step in range(9))
    assert float(program.lines[-1].split()[1]) == pytest.approx(expected, rel=1e-6)
    assert "the optax state is of step 3, and the cluster is at step 6" in str(program.log)


def test_an_optimizers_saved_state_is_whole_or_refused_by_name(cluster, tmp_path) -> None:
    """apache/mxnet#15923, horovod/horovod#526: what a program saves of model and optimizer, and
    loads on a new cluster, goes on as without the break; else an error says what is missing."""
    text = """
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
plain = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer, _ = shardwell.torch.prepare(model, plain, name="net", codec="fp32")
if os.path.exists(sys.argv[2]):
    saved = torch.load(sys.argv[2], weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
while optimizer.next_step < int(sys.argv[3]):
    model(torch.full((1, 1), 1.0 + optimizer.next_step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.saves_values = sys.argv[4] == "values"
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
print("WEIGHT", model.weight.item(), flush=True)
"""

    def end(path: Any, steps: int, values: str, code: int = 0) -> Any:
        with started(cluster(2).target, text, str(path), str(steps), values) as program:
            assert program.end() == code, program.log[-20:]
        return program

    expected = end(tmp_path / "whole", 12, "none").lines
    end(tmp_path / "values", 6, "values")
    assert end(tmp_path / "values", 12, "values").lines == expected
    end(tmp_path / "rates", 6, "none")
    log = str(end(tmp_path / "rates", 12, "none", code=1).log)
    assert "step 6" in log
    assert "restore_checkpoint" in log

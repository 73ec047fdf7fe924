"""Goal: a plain program trains on a cluster once `prepare` has its model, optimizer and loader:
with the same numbers, and from the cluster's step on when it starts again.

Method: torch alone is the oracle of what one worker trains; test_loader_samples.py has how samples
are dealt. The program that docs/pytorch.md prints is run by two workers, one of
which kills itself in the middle and is started again, and the weights are compared with those of
an undisturbed run, bit for bit. Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.programs.commands import Program
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import shardwell.torch  # noqa: E402
from harness.torch_seeds import seeded  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
COUNT, BATCH_SIZE = 50, 4
INPUTS = torch.linspace(-1, 1, COUNT * 3).reshape(COUNT, 3).sin()
NUMBERS = TensorDataset(torch.arange(COUNT))
ELASTIC = shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0)
KILLER = """
import os, signal, sys, runpy, shardwell.torch, torch, sklearn
step = shardwell.torch.ServerOptimizer.step
def until(optimizer, *given):
    if optimizer.next_step == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(optimizer, *given)
shardwell.torch.ServerOptimizer.step = until
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SHARDWELL_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)


@seeded(1)
def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def groups(model: Any) -> list[dict[str, Any]]:
    first, _, last = model
    return [
        {"params": first.parameters(), "name": "first"},
        {"params": last.parameters(), "lr": 3e-3, "weight_decay": 0.2},
    ]


def train(model: Any, optimizer: Any, after: Any, steps: int = 12) -> list[Any]:
    for step in range(steps):
        model(INPUTS[4 * step : 4 * step + 4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return [tensor.detach().clone() for tensor in model.parameters()]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "decoupled": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, alpha=0.9, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_shards_run_the_optimizer_as_torch_does(cluster, connect, name) -> None:
    client = connect(cluster(2), "w0")
    found, expected = net(), net()
    plain, its = (OPTIMIZERS[name](groups(model)) for model in (found, expected))
    early = torch.optim.lr_scheduler.StepLR(plain, 3, gamma=0.5)  # of the one that was given
    _, optimizer, _ = shardwell.torch.prepare(found, plain, client=client, codec="fp32")
    late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # of the one that came back
    theirs = [
        torch.optim.lr_scheduler.StepLR(its, 3, gamma=0.5),
        torch.optim.lr_scheduler.ExponentialLR(its, 0.9),
    ]
    mine = train(found, optimizer, lambda: [each.step() for each in (early, late)])
    for own, other in zip(
        mine, train(expected, its, lambda: [each.step() for each in theirs]), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert optimizer.param_groups[0]["name"] == "first"
    with pytest.raises(shardwell.ArgumentError, match=r"whose optimizer makes the steps"):
        plain.step()


CLIPPED: dict[str, Any] = {
    "on the shards": lambda own: torch.optim.AdamW(own, lr=0.02),
    "on the workers": lambda own: torch.optim.Adadelta(own, lr=0.5),
}


@pytest.mark.parametrize("where", CLIPPED)
def test_clip_norm_clips_the_mean_as_torch_does(where, cluster, connect, caplog) -> None:
    running = cluster(2)
    expected = net()
    its = CLIPPED[where](expected.parameters())
    for step in range(8):
        for rank in range(2):
            (loss_at(expected, step, rank) / 2).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
        its.step()
        its.zero_grad()

    def work(rank: int) -> Any:
        model = net()
        model, optimizer, _ = shardwell.torch.prepare(
            model,
            CLIPPED[where](model.parameters()),
            client=connect(running, f"w{rank}"),
            worker_count=2,
            codec="fp32",
            clip_norm=0.3,
        )
        for step in range(8):
            loss_at(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    for found in together([lambda: work(0), lambda: work(1)]):
        for own, other in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    told = [each.getMessage() for each in caplog.records if "stays on the workers" in each.message]
    assert len(told) == (2 if where == "on the workers" else 0)
    for line in told:
        assert "the shards have no update rule for Adadelta" in line
        assert "a worker that is killed ends the training of parameter 'model'" in line


def loss_at(model: Any, step: int, rank: int) -> Any:
    draw = torch.Generator().manual_seed(10 * step + rank)
    first = next(model.parameters())
    return model(torch.randn(8, first.shape[1], generator=draw) * (step + 1)).square().mean()


@pytest.mark.parametrize("made", ["of the ServerOptimizer", "before prepare", "after prepare"])
def test_a_schedule_that_catches_up_after_a_restart_is_no_misuse(made, cluster, connect) -> None:
    """Warnings are errors here. A schedule that steps before the first step of all is a misuse."""
    running = cluster(1)

    def started(worker_id: str) -> tuple[Any, Any, Any]:
        model, client = net(), connect(running, worker_id)
        halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
        if made == "of the ServerOptimizer":
            optimizer = shardwell.torch.ServerOptimizer(model, client, shardwell.AdamW(1e-2))
            return model, optimizer, halving(optimizer)
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = halving(plain) if made == "before prepare" else None
        model, optimizer, _ = shardwell.torch.prepare(model, plain, client=client)
        return model, optimizer, schedule or halving(optimizer)

    _, optimizer, schedule = started("w0")
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        schedule.step()
    for first in (0, 3):
        model, optimizer, schedule = started("w0")
        assert optimizer.next_step == first
        for _ in range(3):
            while schedule.last_epoch < optimizer.next_step:
                schedule.step()
            make_step(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5 ** ((first + 2) // 2)


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


def prepared(client: shardwell.Client, loader: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return shardwell.torch.prepare(model, optimizer, loader, client=client, **options)


def make_step(model: Any, optimizer: Any) -> None:
    model(INPUTS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_generators_seed_and_drop_last_count(cluster, connect) -> None:
    running = cluster(1)

    def dealt(generator_seed: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(generator_seed)
        options = {"drop_last": True, "generator": generator, "num_workers": 1}
        whole = DataLoader(NUMBERS, 8, shuffle=True, **options)
        client = connect(running, f"w{generator_seed}")
        name = f"seeds-{generator_seed}-{seed}"
        return batches_of(prepared(client, whole, seed=seed, name=name)[2])

    first = dealt(11, 2)
    assert [len(batch) for batch in first] == [8] * 6
    assert first == dealt(2, 11)  # seeds are added up
    assert first != dealt(11, 0)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_worker_that_starts_again_goes_on_in_the_epoch(cluster, connect, accumulated) -> None:
    """With the batches that an undisturbed worker has, of 13 an epoch."""
    whole = DataLoader(NUMBERS, BATCH_SIZE, shuffle=True)

    def run(running: Any, batch_count: int) -> list[list[int]]:
        client = connect(running, "w0")
        model, optimizer, loader = prepared(client, whole)
        seen: list[list[int]] = []
        for _ in loader.epochs(3):
            for (batch,) in loader:
                if len(seen) == batch_count:
                    client.close()
                    return seen
                seen.append(batch.tolist())
                model(INPUTS).square().mean().backward()
                if len(seen) % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return seen

    expected = run(cluster(1), 99)
    assert len(expected) == 39
    running = cluster(2)
    assert run(running, 16) + run(running, 99) == expected


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(9))


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter([])


REFUSED_LOADERS = {
    "Endless.*optimizer.next_step": lambda: DataLoader(Endless(), 2),
    "WeightedRandomSampler": lambda: DataLoader(
        NUMBERS, 2, sampler=torch.utils.data.WeightedRandomSampler([1.0] * COUNT, 5)
    ),
    "SubsetRandomSampler.*utils.data.Subset": lambda: DataLoader(
        NUMBERS, 2, sampler=torch.utils.data.SubsetRandomSampler(range(9))
    ),
    "SequentialSampler of its own": lambda: DataLoader(
        NUMBERS, 2, sampler=torch.utils.data.SequentialSampler(range(9))
    ),
    "RandomSampler of its own": lambda: DataLoader(
        NUMBERS, 2, sampler=torch.utils.data.RandomSampler(NUMBERS, num_samples=5)
    ),
    "a batch_sampler of its own": lambda: DataLoader(NUMBERS, batch_sampler=[[1, 2], [3]]),
    "batch_size=None of its own": lambda: DataLoader(NUMBERS, batch_size=None),
    "dataset is empty": lambda: DataLoader(TensorDataset(torch.zeros(0)), 2),
    "OwnLoader, which makes its batches": lambda: OwnLoader(NUMBERS, 2),
    "got list": lambda: [1, 2],
    "less than a batch of 99": lambda: DataLoader(NUMBERS, 99, drop_last=True),
}


@pytest.mark.parametrize("words", REFUSED_LOADERS)
def test_a_loader_that_cannot_be_shared_is_refused(cluster, connect, words) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=words):
        prepared(client, REFUSED_LOADERS[words]())
    is_late = words.startswith("less than a batch")  # which depends on the number of workers
    assert bool(client.status()[0].parameters) == is_late


def test_an_optimizer_that_cannot_be_prepared_is_refused(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    model = net()

    def refuse(words: str, optimizer: Any, **options: Any) -> None:
        with pytest.raises(shardwell.ArgumentError, match=words):
            shardwell.torch.prepare(model, optimizer, **{"client": client, **options})

    used = torch.optim.Adam(model.parameters())
    make_step(model, used)
    refuse("has made steps", used)
    refuse(r"got shardwell\.SGD", shardwell.SGD(0.1))
    fresh = torch.optim.SGD(model.parameters(), 0.1)
    refuse("gradient_accumulation_steps", fresh, gradient_accumulation_steps=0)
    _, optimizer, _ = shardwell.torch.prepare(model, fresh, client=client)
    assert shardwell.torch.prepare(model, optimizer)[1] is optimizer
    with pytest.raises(shardwell.ArgumentError, match=r"takes a ServerOptimizer as it is.*codec"):
        shardwell.torch.prepare(model, optimizer, codec="fp32")


@pytest.mark.parametrize("asked", ["schedule", "scaler", "state", "resume"])
@pytest.mark.parametrize("kind", ["async", "a ServerOptimizer of async", "on the workers"])
def test_what_no_shard_keeps_is_refused_by_name(kind, asked, cluster, connect, tmp_path) -> None:
    client = connect(cluster(1), "w0")
    model = net()
    stays = kind == "on the workers"
    plain: Any = (torch.optim.Adadelta if stays else torch.optim.SGD)(model.parameters(), lr=0.1)
    options: dict[str, Any] = {} if stays else {"mode": "async"}
    given = {
        "schedule": torch.optim.lr_scheduler.StepLR(plain, 3),
        "scaler": torch.amp.GradScaler("cpu"),
        "state": {"rng": torch.default_generator},
        "resume": tmp_path / "{step}",
    }[asked]
    if kind.startswith("a Server"):
        rule = shardwell.SGD(0.1)
        plain, options = shardwell.torch.ServerOptimizer(model, client, rule, mode="async"), {}
        how = {}
    else:
        how = {"client": client}
    if asked == "resume" and kind == "async":
        _, optimizer, _ = shardwell.torch.prepare(model, plain, resume=given, **how, **options)
        assert optimizer.next_step == 0, "shards have all of such a training, so it goes on"
        return
    with pytest.raises(ValueError, match=rf"{asked}=.*"):
        shardwell.torch.prepare(model, plain, **{asked: given}, **how, **options)
    if not kind.startswith("a Server"):
        assert not any(shard.parameters for shard in client.status()), "nothing was made"


def test_whose_worker_it_is(cluster, monkeypatch) -> None:
    """Of a client that `prepare` makes; the end of the program closes it."""
    ends: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *given: ends.append(given))
    monkeypatch.setenv("SHARDWELL_SHARDS", cluster(1).target)

    def made(**options: Any) -> Any:
        model = net()
        plain = torch.optim.SGD(model.parameters(), 0.1)
        return shardwell.torch.prepare(model, plain, **options)[1]

    with pytest.raises(shardwell.ArgumentError, match=r"shardwell run -n 2 .*SHARDWELL_WORKER_ID"):
        made(worker_count=2)
    assert made(name="alone").client.worker_id == "alone-0"
    open_ids = [made(name="open", members=ELASTIC).client.worker_id for _ in range(2)]
    assert open_ids[0] == open_ids[1]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    optimizer = made(name="pair")
    assert (optimizer.client.worker_id, optimizer.client.rank) == ("pair-1", 1)
    assert optimizer.parameter.spec.worker_count == 2
    with pytest.raises(shardwell.ArgumentError, match=r"worker_count=3, and RANK and WORLD_SIZE"):
        made(worker_count=3)
    monkeypatch.setenv("SHARDWELL_WORKER_ID", "mine")
    assert made(name="other").client.worker_id == "mine"
    for end, *given in ends:
        end(*given)


def test_the_program_of_the_docs_is_killed_and_started_again(
    cluster, connect, tmp_path, monkeypatch
) -> None:
    text = (ROOT / "docs/pytorch.md").read_text()
    found = re.search(r"Save this as `plain.py`:\n\n```python\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    program, killer = tmp_path / "plain.py", tmp_path / "killer.py"
    program.write_text(found[1])
    killer.write_text(KILLER)
    clusters = [cluster(2, chunk_size_bytes=1024) for _ in range(2)]

    def started(place: int, rank: int, *arguments: Path) -> Program:
        folder = tmp_path / str(place)
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        environment = {
            "SHARDWELL_SHARDS": clusters[place].target,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        return Program(*map(str, arguments), environment=environment, is_forked=True)

    with started(0, 0, program) as first, started(0, 1, killer, program) as second:
        assert second.end() == -9
        with (
            started(0, 1, program) as again,
            started(1, 0, program) as third,
            started(1, 1, program) as fourth,
        ):
            for each in (first, again, third, fourth):
                assert each.end() == 0, each.log[-20:]
    assert "goes on with parameter 'digits' at step 40" in str(again.log)
    weights = [connect(each, "reader").parameter("digits").get_weights() for each in clusters]
    for name, values in weights[0].items():
        np.testing.assert_array_equal(values, weights[1][name])


@pytest.mark.parametrize(("end", "code", "done"), [("", 0, ("ended-0",)), ("1 / 0", 1, ())])
def test_the_end_of_the_program_closes_its_client(cluster, connect, tmp_path, end, code, done):
    """In order; where an exception ended it, as a death, after which the worker may come back."""
    program = tmp_path / "ended.py"
    program.write_text(
        f"""
import shardwell.torch, torch
model = torch.nn.Linear(2, 1)
plain = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, _ = shardwell.torch.prepare(model, plain, name="ended")
model(torch.ones(2)).backward()
optimizer.step()
{end}
"""
    )
    running = cluster(1)
    environment = {"SHARDWELL_SHARDS": running.target}
    with Program(str(program), environment=environment, is_forked=True) as started:
        assert started.end() == code, started.log[-5:]
    found = connect(running, "reader").status()[0].parameters
    assert {each.spec.name: each.done_worker_ids for each in found}["ended"] == done


def test_what_is_saved_has_the_outer_families_of_its_client(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    model, fast = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    training = shardwell.torch.prepare(model, plain, client=client, name="sync")
    inner = torch.optim.SGD(fast.parameters(), 0.1)
    with shardwell.torch.DiLoCo(fast, inner, client, name="slow", sync_every=4, fragments=1):
        saved = training.save(tmp_path / "saved")
    assert [each.name for each in saved.families] == ["slow"]
    found = connect(cluster(3), "w0").restore_checkpoint(tmp_path / "saved")
    assert {"sync", "slow.fragment-0"} <= {each.name for each in found.parameters}

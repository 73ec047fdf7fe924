"""Goal: an unchanged torch loop trains in outer steps, whatever it is made of.

Method: with one learner and plain outer SGD of rate 1 the outer step puts the local weights where
they are already, so training is that without Shardwell; several learners are then means, made by
hand. All is float32 on the wire.
"""

from __future__ import annotations

import copy
import gc
import io
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.faults.interrupts import Interrupt
from harness.polling import PATIENCE_S
from harness.programs.commands import Program
from harness.threads import together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

PLAIN = {"outer": shardwell.SGD(1.0), "codec": "fp32", "fragments": 2, "sync_every": 4}
OPTIMIZERS = {
    "sgd": lambda own: torch.optim.SGD(own, 0.1, momentum=0.9),
    "adamw": lambda own: torch.optim.AdamW(own, 0.01),
    "rmsprop": lambda own: torch.optim.RMSprop(own, 0.01, foreach=False),
    "adagrad": lambda own: torch.optim.Adagrad(own, 0.05),
}


def net(seed: int = 0, width: int = 8) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    )


def batches(count: int, seed: int = 1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs = torch.randn(10, 6, generator=draw)
        yield inputs, inputs[:, :3].argmax(1)


def loss_of(model, inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def train(model, optimizer, count: int, seed: int = 1) -> None:
    for inputs, targets in batches(count, seed):
        loss_of(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model) -> dict[str, np.ndarray]:
    return {n: p.detach().float().numpy().copy() for n, p in model.named_parameters()}


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    found, expected = (values(m) if hasattr(m, "parameters") else m for m in (found, expected))
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], tolerance, tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_trains_as_by_itself(cluster, connect, kind: str) -> None:
    client = connect(cluster(2), "w0")
    model, alone = net(), net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        train(model, optimizer, 12)
        assert diloco.inner_step == 12
        assert [each.version for each in diloco.outer.fragments] == [3, 3]
        last = diloco.outer.fragments[1].tensors
        image, local = diloco.outer.image(), values(model)
        assert_close({n: image[n] for n in last}, {n: local[n] for n in last}, 0.0)
    train(alone, OPTIMIZERS[kind](alone.parameters()), 12)
    assert_close(model, alone)
    train(model, optimizer, 1)  # which is the loop's own again


def test_a_loop_of_everything_trains_as_by_itself(cluster, connect) -> None:
    """Accumulation, clipping, a GradScaler that skips a step, autocast, a schedule, a closure."""

    def run(model, optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for number, (inputs, targets) in enumerate(batches(16)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, inputs, targets) / 2
            scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update(1024.0)
                optimizer.zero_grad()
                schedule.step()

    client, model, alone = connect(cluster(2), "w0"), net(), net()
    optimizer, other = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, alone))
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        run(model, optimizer)
        made = diloco.inner_step
    run(alone, other)
    assert_close(model, alone)
    # That of infinite gradients was no inner step.
    assert made == int(next(iter(other.state.values()))["step"]) == 7
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_a_closure_is_one_inner_step(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        for inputs, targets in batches(4):

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert diloco.inner_step == 4
        assert [each.version for each in diloco.outer.fragments] == [1, 1]


def test_several_optimizers_make_one_inner_step(cluster, connect) -> None:
    client, model, alone = connect(cluster(2), "w0"), net(), net()

    def pair(of):
        return [torch.optim.SGD(of[0].parameters(), 0.1), torch.optim.Adam(of[2].parameters())]

    def run(of, optimizers) -> None:
        for inputs, targets in batches(8):
            loss_of(of, inputs, targets).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()

    optimizers = pair(model)
    with shardwell.torch.DiLoCo(model, optimizers, client, overlap=0, **PLAIN) as diloco:
        run(model, optimizers)
        assert diloco.inner_step == 8
    run(alone, pair(alone))
    assert_close(model, alone)


@pytest.mark.parametrize("overlap", [0, 1])
def test_two_learners_make_weighted_means(cluster, connect, overlap: int) -> None:
    """By hand: each fragment's local weights of both, by samples, where it was offered."""
    target = cluster(2).target
    models = [net(0), net(7)]  # the first learner's weights count for both
    rates = (0.1, 0.05)
    clients = [connect(target, f"w{n}") for n in (0, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr) for m, lr in zip(models, rates, strict=True)]
    options = {**PLAIN, "worker_count": 2, "overlap": overlap}
    learners = [
        shardwell.torch.DiLoCo(*each, samples_per_step=count, **options)
        for *each, count in zip(models, optimizers, clients, (1, 3), strict=True)
    ]
    assert_close(models[1], models[0], 0.0)

    by_hand = [net(0), net(0)]
    others = [torch.optim.SGD(m.parameters(), lr) for m, lr in zip(by_hand, rates, strict=True)]
    sent: dict[int, list[dict[str, torch.Tensor]]] = {}
    for step in range(1, 9):
        for number, (model, optimizer) in enumerate(zip(by_hand, others, strict=True)):
            inputs, targets = next(batches(1, 100 * number + step))
            loss_of(model, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + overlap) % 2 == 0:
            states = [copy.deepcopy(m.state_dict()) for m in by_hand]
            sent[step + overlap] = states
        if step in sent:
            layer = "0." if step % 4 == 2 else "2."
            first, second = sent.pop(step)
            for model in by_hand:
                mean = {
                    name: (first[name] + 3 * second[name]) / 4
                    for name in first
                    if name.startswith(layer)
                }
                model.load_state_dict(mean, strict=False)

    def run(number: int) -> None:
        for step in range(1, 9):
            inputs, targets = next(batches(1, 100 * number + step))
            loss_of(models[number], inputs, targets).backward()
            optimizers[number].step()
            optimizers[number].zero_grad()

    together([lambda: run(0), lambda: run(1)])
    for model, expected in zip(models, by_hand, strict=True):
        assert_close(model, expected)
    for each in learners:
        each.close()


def test_a_wrapped_model_and_frozen_tensors(cluster, connect) -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    wrapped = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    client = connect(cluster(2), "w0")
    with shardwell.torch.DiLoCo(wrapped, optimizer, client, overlap=1, **PLAIN) as diloco:
        train(wrapped, optimizer, 4)
        tensors = [name for each in diloco.outer.fragments for name in each.tensors]
    assert tensors == ["0.weight", "2.weight", "2.bias"]
    assert torch.equal(model[0].bias, before)


def test_what_a_narrow_type_rounds_off_is_not_trained(cluster, connect) -> None:
    """A bfloat16 model that does not move leaves the shards' float32 as it is."""
    client = connect(cluster(2), "w0")
    exact = net()
    with shardwell.torch.DiLoCo(
        exact, torch.optim.SGD(exact.parameters(), 0.1), client, overlap=0, **PLAIN
    ):
        pass
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        for _ in range(4):
            model(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        assert [each.version for each in diloco.outer.fragments] == [1, 1]
        assert_close(diloco.outer.image(), exact, 1e-7)


def test_a_model_changed_by_something_else_is_an_error_with_a_way_out(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        train(model, optimizer, 2)
        image = diloco.outer.image()
        model.load_state_dict(net(5).state_dict())
        written = values(model)
        with pytest.raises(
            shardwell.ArgumentError, match=r"tensor '0\.weight'.*written to.*reload\(\)"
        ):
            train(model, optimizer, 1)
        assert_close(model, written, 0.0)  # the step was not made
        assert diloco.inner_step == 2
        diloco.reload()
        assert_close(model, image, 0.0)
        optimizer.zero_grad()
        train(model, optimizer, 4)
        model[0].weight.data = torch.zeros(8, 6)
        with pytest.raises(shardwell.ArgumentError, match=r"moved to other memory"):
            train(model, optimizer, 1)
        model[0].weight.data = torch.zeros(8, 7)
        with pytest.raises(shardwell.ArgumentError, match=r"shape \(8, 7\), and had \(8, 6\)"):
            optimizer.step()


def test_a_model_that_writes_to_its_weights_may_say_so(cluster, connect) -> None:
    """Such as an Embedding with max_norm, whose forward pass scales its rows down."""

    def made() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Embedding(5, 4, max_norm=0.5), torch.nn.Linear(4, 1))

    def run(of, optimizer) -> None:
        for number in range(8):
            of(torch.tensor([number % 5])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    client, model, alone = connect(cluster(2), "w0"), made(), made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN),
        pytest.raises(shardwell.ArgumentError, match=r"'0\.weight'.*watches_model=False"),
    ):
        run(model, optimizer)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(
        model, optimizer, client, name="net", overlap=0, watches_model=False, **PLAIN
    ) as diloco:
        run(model, optimizer)
        assert diloco.inner_step == 8
    run(alone, torch.optim.SGD(alone.parameters(), 0.1))
    assert_close(model, alone)


def test_optimizers_that_frameworks_wrap(cluster, connect) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    client, model, alone = connect(cluster(2), "w0"), net(), net()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with shardwell.torch.DiLoCo(prepared, optimizer, client, overlap=0, **PLAIN) as diloco:
        for inputs, targets in batches(16):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, inputs, targets))
                optimizer.step()
                optimizer.zero_grad()
        assert diloco.inner_step == 8
    other = torch.optim.SGD(alone.parameters(), 0.1)
    for number, (inputs, targets) in enumerate(batches(16)):
        (loss_of(alone, inputs, targets) / 2).backward()
        if number % 2:
            other.step()
            other.zero_grad()
    assert_close(model, alone)


def test_ctrl_c_loses_nothing_that_diloco_moved(cluster, connect) -> None:
    """One learner: the model, and the weights of all, are where it was moved, or it is an error."""
    client, model = connect(cluster(1), "w0"), torch.nn.Linear(2, 2)
    for tensor in model.parameters():
        torch.nn.init.zeros_(tensor)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    options = {"outer": shardwell.SGD(1.0), "codec": "fp32", "fragments": 1, "sync_every": 1}

    def step(by: float) -> None:
        for tensor in model.parameters():
            tensor.grad = torch.full_like(tensor, -by)
        optimizer.step()

    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **options) as diloco:
        at, moved, places = 0, 0.0, set()
        while True:
            interrupt = Interrupt(("torch/diloco.py", "outer/outer.py", "outer/fragment.py"), at)
            is_over = not interrupt.run(lambda: step(1.0))
            places.add(interrupt.place)
            try:
                step(0.0)
            except shardwell.ArgumentError:  # what it could not know to be trained
                assert interrupt.place in UNSURE
                diloco.reload()
                step(0.0)
            (found,) = {*values(model)["weight"].flat, *values(model)["bias"].flat}
            assert {*diloco.outer.image()["weight"].flat} == {found}, interrupt.place
            is_certain = interrupt.place.startswith(("outer.py", "fragment.py")) or is_over
            assert found in ({moved + 1} if is_certain else {moved, moved + 1}), interrupt.place
            moved = found
            if is_over:
                break
            at += 1
    assert {"diloco.py:_after", "outer.py:_take", "diloco.py:__setitem__"} <= places


UNSURE = ("diloco.py:_after", "diloco.py:note", "diloco.py:__setitem__")
"""Places where tensors were written to and that was not noted yet."""


def test_a_model_with_other_tensors_is_refused(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN):
        model[2].bias.requires_grad_(True)
        with pytest.raises(shardwell.ArgumentError, match=r"tensor '2\.bias' was added.*unfrozen"):
            train(model, optimizer, 2)
        model[2].bias.requires_grad_(False)
        model[0] = torch.nn.Linear(6, 8)
        with pytest.raises(
            shardwell.ArgumentError, match=r"tensor '0\.weight' of the model was replaced"
        ):
            train(model, optimizer, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: (m, m), r"optimizer of torch.*got torch\.nn.*Sequential"),
        (lambda m: (m, []), r"one optimizer of torch at least; got none"),
        (lambda m: (m, torch.optim.SGD(net(3).parameters(), 0.1)), r"SGD has no parameter of the"),
        (
            lambda m: (m.requires_grad_(False), torch.optim.SGD(net().parameters(), 0.1)),
            r"no parameter that requires a gradient",
        ),
    ],
)
def test_what_can_not_be_trained_is_refused(cluster, connect, make, text: str) -> None:
    client = connect(cluster(1), "w0")
    with pytest.raises(shardwell.ArgumentError, match=text):
        shardwell.torch.DiLoCo(*make(net()), client, overlap=0, **PLAIN)
    model = net()
    with pytest.raises(shardwell.ArgumentError, match=r"made by shardwell\.connect"):
        shardwell.torch.DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1), "127.0.0.1:7070")


def test_a_state_goes_on_as_if_nothing_had_happened(cluster, connect) -> None:
    """Through torch.save: what was moved since the last take is kept, and its samples."""
    target, model, alone = cluster(2).target, net(), net()
    make = OPTIMIZERS["adamw"]
    optimizer = make(model.parameters())
    first = connect(target, "w0")
    with shardwell.torch.DiLoCo(model, optimizer, first, overlap=0, **PLAIN) as diloco:
        train(model, optimizer, 7)
        file = io.BytesIO()
        torch.save([diloco.state_dict(), optimizer.state_dict()], file)
        before = values(model)
    first.close()
    file.seek(0)
    saved, of_optimizer = torch.load(file, weights_only=True)
    again = net(9)
    optimizer = make(again.parameters())
    client = connect(target, "w0")
    with shardwell.torch.DiLoCo(again, optimizer, client, overlap=0, **PLAIN) as diloco:
        diloco.load_state_dict(saved)
        optimizer.load_state_dict(of_optimizer)
        assert diloco.inner_step == 7
        assert_close(again, before, 1e-7)
        draws = list(batches(12))[7:]
        for inputs, targets in draws:
            loss_of(again, inputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(shardwell.ArgumentError, match=r"before the first"):
            diloco.load_state_dict(saved)
    train(alone, make(alone.parameters()), 12)
    assert_close(again, alone)


def test_a_state_that_does_not_fit_is_refused(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        state, before = diloco.state_dict(), values(model)
        first = state["fragments"][0]
        for wrong, text in (
            ({}, r"expected name, inner_step and fragments"),
            ({**state, "name": "other"}, r"the state is of 'other', and this family is 'model'"),
            ({**state, "inner_step": -1}, r"inner_step must be a whole number"),
            ({**state, "inner_step": True}, r"inner_step must be a whole number"),
            ({**state, "fragments": [first]}, r"has 1 fragments, and the family 2"),
            ({**state, "fragments": [first, first]}, r"fragment 1: the state has the tensors"),
            ({**state, "fragments": [{}, {}]}, r"fragment 0: expected moved, residual"),
            (
                {**state, "fragments": [{**first, "moved": torch.zeros(3)}] * 2},
                r"moved must be float32 of shape \(56,\); got float32 of shape \(3,\)",
            ),
            (
                {**state, "fragments": [{**first, "moved": first["moved"] * float("nan")}] * 2},
                r"moved has values that are not finite",
            ),
            (
                {**state, "fragments": [{**first, "sample_count": "many"}] * 2},
                r"sample_count must be a whole number",
            ),
        ):
            with pytest.raises(shardwell.ArgumentError, match=text):
                diloco.load_state_dict(wrong)
        assert_close(model, before, 0.0)


def test_another_diloco_of_the_same_optimizer_closes_the_first(cluster, connect, caplog) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN)
    second = shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN)
    assert "the DiLoCo of 'model' was closed" in caplog.text
    train(model, optimizer, 4)
    assert (first.inner_step, second.inner_step) == (0, 4)
    third = shardwell.torch.DiLoCo(model, optimizer, client, name="else", overlap=0, **PLAIN)
    train(model, optimizer, 4)
    assert (second.inner_step, third.inner_step) == (4, 4)
    third.close()
    second.close()


def test_nothing_is_kept_of_a_closed_one(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=1, **PLAIN) as diloco:
        train(model, optimizer, 3)
    train(model, optimizer, 6)
    assert diloco.inner_step == 3
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert not any(hooks)
    gc.collect()


def test_values_that_are_not_finite_are_refused_by_tensor(cluster, connect) -> None:
    client, model = connect(cluster(2), "w0"), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shardwell.torch.DiLoCo(model, optimizer, client, overlap=0, **PLAIN) as diloco:
        train(model, optimizer, 1)
        image = diloco.outer.image()
        model[0].bias.grad = torch.full((8,), float("inf"))
        with pytest.raises(
            shardwell.NonFiniteError, match=r"fragment 0.*tensor '0\.bias'.*8 of 8.*norm.*reload"
        ):
            optimizer.step()
        optimizer.zero_grad()
        diloco.reload()
        assert_close(model, image, 0.0)
        train(model, optimizer, 4)
        assert [each.version for each in diloco.outer.fragments] == [1, 1]


WORKER = """
import sys
import shardwell, shardwell.torch, torch

target, worker_id, crew = sys.argv[1:]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
crews = {
    "elastic": {"members": shardwell.Elastic(min_count=1, max_count=4)},
    "two": {"worker_count": 2},
}
with shardwell.connect(target, worker_id=worker_id) as client:
    with shardwell.torch.DiLoCo(
        model, optimizer, client, sync_every=4, fragments=1, overlap=1, codec="fp32", **crews[crew]
    ) as diloco:
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "look" and diloco.is_leaving:
                print("saves", diloco.inner_step, flush=True)
                break
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            print("made", diloco.inner_step, flush=True)
print("closed", flush=True)
"""


@pytest.fixture
def work(tmp_path: Path):
    """Starts learners in processes, which make an inner step a line."""
    program = tmp_path / "learner.py"
    program.write_text(WORKER)

    def start(target: str, name: str, crew: str = "elastic") -> Program:
        return Program(str(program), target, name, crew, stdin=subprocess.PIPE, is_forked=True)

    return start


def tell(worker: Program, line: str = "") -> None:
    assert worker.process.stdin is not None
    worker.process.stdin.write(f"{line}\n")
    worker.process.stdin.flush()


def test_sigterm_ends_a_loop_after_its_inner_step(cluster, work) -> None:
    running = cluster(2)
    with work(running.target, "w0") as worker:
        assert worker.read_line() == "ready"
        for number in range(1, 6):
            tell(worker)
            assert worker.read_line() == f"made {number}"
        worker.process.send_signal(signal.SIGTERM)
        tell(worker)
        assert worker.read_line() == "made 6"
        tell(worker)
        assert worker.process.wait(PATIENCE_S) == 143
    with shardwell.connect(running.target) as client:
        assert [each.state for each in client.members("model.fragment-0")] == ["over"]


def test_a_loop_that_looks_ends_by_itself(cluster, work) -> None:
    with work(cluster(2).target, "w0") as worker:
        assert worker.read_line() == "ready"
        tell(worker)
        assert worker.read_line() == "made 1"
        worker.process.send_signal(signal.SIGTERM)
        tell(worker, "look")
        assert worker.read_line() == "saves 1"
        assert worker.read_line() == "closed"
        assert worker.process.wait(PATIENCE_S) == 0


def test_sigterm_kills_a_learner_that_the_others_wait_for_anyway(cluster, work) -> None:
    with work(cluster(2).target, "w0", "two") as worker:
        assert worker.read_line() == "ready"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(PATIENCE_S) == -signal.SIGTERM

"""Goal: a gradient copied without waiting, as from a GPU, is sent when the copy has ended, never
before.

Method: a copier of the test's own, which copies from the CPU and only when the test lets it, in
place of the one for GPUs. Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.threads import in_background
from harness.torch_models import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402
from shardwell.torch.buffers import DeviceCopies  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1, momentum=0.9)


class LateCopy:
    """Copies when it is waited for, once it may."""

    def __init__(self, target: Any, source: Any, may_copy: threading.Event) -> None:
        self._target, self._source, self._may_copy = target, source, may_copy

    def synchronize(self) -> None:
        assert self._may_copy.wait(PATIENCE_S)
        with torch.no_grad():
            self._target.copy_(self._source)


class BrokenCopy:
    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


class LateCopier:
    def __init__(self) -> None:
        self.may_copy = threading.Event()
        self.count = 0
        self.is_broken = False

    def takes(self, source: Any) -> bool:
        return bool(source.is_floating_point())

    def copy(self, target: Any, source: Any) -> LateCopy | BrokenCopy:
        self.count += 1
        target.fill_(float("nan"))  # a gradient that is sent before is refused
        return BrokenCopy() if self.is_broken else LateCopy(target, source, self.may_copy)


def deep() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(10)])


def late(client: shardwell.Client, model: Any, **options: Any) -> tuple[Any, LateCopier]:
    options = {"codec": "fp32", "overlap": True, **options}
    optimizer = shardwell.torch.ServerOptimizer(model, client, SGD, **options)
    copier = LateCopier()
    optimizer._step.copies = DeviceCopies(copier)
    return optimizer, copier


def loss_of(model: Any, step: int) -> Any:
    torch.manual_seed(step)
    return model(torch.randn(4, 40)).square().mean()


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2, chunk_size_bytes=256), "w0")


def counted(client: shardwell.Client) -> int:
    return sum(p.counted_chunk_count for shard in client.status() for p in shard.parameters)


def test_gradients_leave_when_their_copies_are_there(client) -> None:
    """Backward has returned, so no hook comes that could look."""
    model, alone = deep(), deep()
    optimizer, copier = late(client, model)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        before = counted(client)
        copier.may_copy.clear()
        loss_of(model, step).backward()
        assert copier.count == 20 * (step + 1)
        assert optimizer._step.state == "announced"
        copier.may_copy.set()
        eventually("pieces are counted", lambda before=before: counted(client) > before)
        assert optimizer.next_step == step
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, step).backward()
        reference.step()
        reference.zero_grad()
    assert_same(model, alone, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_step_waits_for_copies(client) -> None:
    model = deep()
    optimizer, copier = late(client, model)
    loss_of(model, 0).backward()
    ending = in_background(optimizer.step)
    copier.may_copy.set()
    ending.result(PATIENCE_S)
    assert optimizer.next_step == 1
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    optimizer.close()


def test_a_copy_that_failed_is_an_error_of_step(client) -> None:
    model = deep()
    optimizer, copier = late(client, model)
    copier.is_broken = True
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="the device is lost"):
        optimizer.step()
    assert optimizer.next_step == 0
    optimizer.close()


def test_gradients_that_change_before_anything_left_are_copied_again(client) -> None:
    """One tensor alone is too little for a piece, so all may be taken back."""
    model, alone = torch.nn.Linear(40, 1), torch.nn.Linear(40, 1)
    alone.load_state_dict(model.state_dict())
    optimizer, copier = late(client, model)
    loss_of(model, 0).backward()
    copier.may_copy.set()
    model.weight.grad.mul_(0.5)
    optimizer.step()
    loss_of(alone, 0).backward()
    alone.weight.grad.mul_(0.5)
    torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9).step()
    torch.testing.assert_close(model.weight, alone.weight)
    optimizer.close()


def test_zero_grad_waits_for_copies_and_forgets_them(client) -> None:
    model = torch.nn.Linear(40, 1)
    optimizer, copier = late(client, model)
    loss_of(model, 0).backward()
    copier.may_copy.set()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.next_step == 1
    optimizer.close()


def test_the_thread_ends_with_what_it_copies_for() -> None:
    copier = LateCopier()
    copier.may_copy.set()
    copies = DeviceCopies(copier)
    done: list[str] = []
    target = torch.zeros(3)
    for name in "abc":
        copies.copy(target, torch.ones(3), lambda name=name: done.append(name))
    copies.wait()
    assert done == ["a", "b", "c"]
    assert target.tolist() == [1.0, 1.0, 1.0]
    (thread,) = [each for each in threading.enumerate() if each.name == "shardwell-gpu-copies"]
    seen = weakref.ref(copies)
    del copies
    gc.collect()
    assert seen() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()

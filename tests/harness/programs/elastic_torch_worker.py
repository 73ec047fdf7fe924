"""A worker process that trains a torch model as an elastic member; see elastic_training.py.

Two batches of its own a step, which accumulate, are clipped, and scaled by a GradScaler. OPTIONS:
`min_count`, `member_return_s`, `member_lease_s`, `min_contributors`, `grace_s`, `late`, `overlap`,
`clip_norm`, `pause_s` between two steps, `scales` (false: no GradScaler, no clipping here), and
`skips_every`: the loss of so many steps overflows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import shardwell
import shardwell.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from harness.polling import eventually

PATH = Path(__file__)
NAME = "net"
INPUT_SIZE, CLASS_COUNT, BATCH_SIZE = 20, 3, 16


def net(seed: int) -> torch.nn.Module:
    """A model whose first weights only the same seed has."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUT_SIZE, 30), torch.nn.Tanh(), torch.nn.Linear(30, CLASS_COUNT)
    )


def digest_of(tensors: Any) -> str:
    """A digest of tensors, in the order of their names."""
    found = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        found.update(torch.as_tensor(tensor).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Loop:
    """The loop of a worker.

    Args:
        optimizer: A ServerOptimizer.
        model: Its model.
        worker_id: Draws the batches.
        options: Those of the program.
    """

    def __init__(self, optimizer: Any, model: Any, worker_id: str, options: dict[str, Any]) -> None:
        self._optimizer, self._model, self._options = optimizer, model, options
        self._scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self._draw = torch.Generator().manual_seed(sum(worker_id.encode()))
        self._step_count = 0

    def _loss(self) -> Any:
        inputs = torch.randn(BATCH_SIZE, INPUT_SIZE, generator=self._draw)
        targets = inputs[:, :CLASS_COUNT].argmax(1)
        return torch.nn.functional.cross_entropy(self._model(inputs), targets) / 2

    def step(self) -> float:
        """One step; its loss."""
        optimizer, self._step_count = self._optimizer, self._step_count + 1
        if not self._options.get("scales", True):
            with optimizer.no_sync():
                first = self._loss()
                first.backward()
            second = self._loss()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float((first + second).item())
        skips_every = self._options.get("skips_every", 0)
        factor = float("inf") if skips_every and not self._step_count % skips_every else 1.0
        total = 0.0
        for _ in range(2):
            loss = self._loss()
            total += loss.item()
            self._scaler.scale(loss * factor).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 5.0)
        self._scaler.step(optimizer)
        self._scaler.update(256.0)
        optimizer.zero_grad()
        return float(total)


def main() -> None:
    """Trains, and prints a line a step."""
    target, worker_id, seed, stop = sys.argv[1:5]
    options: dict[str, Any] = json.loads(sys.argv[5])
    torch.set_num_threads(1)
    stop_file, never = Path(stop), threading.Event()
    bounds = {"min_count", "member_return_s", "member_lease_s"} & set(options)
    chosen = {"min_contributors", "grace_s", "late", "overlap"} & set(options)
    with shardwell.connect(target, worker_id=worker_id, timeout_s=40.0) as client:
        model = net(int(seed))
        optimizer = shardwell.torch.ServerOptimizer(
            model,
            client,
            shardwell.SGD(0.2, momentum=0.5, clip_norm=options.get("clip_norm", 0.0)),
            members=shardwell.Elastic(max_count=8, **{key: options[key] for key in bounds}),
            name=NAME,
            **{key: options[key] for key in chosen},
        )
        print(json.dumps({"opened": optimizer.next_step, "digest": _digest(model)}), flush=True)
        loop = Loop(optimizer, model, worker_id, options)
        while not stop_file.exists():
            loss = loop.step()
            outcome = optimizer.outcome
            assert outcome is not None
            found = {
                "step": outcome.step,
                "counted": outcome.counted,
                "contributors": outcome.contributors,
                "version": optimizer.parameter.version,
                "loss": loss,
                "digest": _digest(model),
            }
            print(json.dumps(found), flush=True)
            never.wait(options.get("pause_s", 0.0))
        optimizer.parameter.leave()
        print(json.dumps({"left": optimizer.next_step}), flush=True)
        with contextlib.suppress(AssertionError):
            eventually("all have left", lambda: stop_file.read_text() == "all")
        final = optimizer.parameter.get_weights()
        print(json.dumps({"final": digest_of(final), "version": optimizer.parameter.version}))


def _digest(model: torch.nn.Module) -> str:
    return digest_of(dict(model.named_parameters()))


if __name__ == "__main__":
    main()

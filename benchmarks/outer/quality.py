"""What outer training costs in quality: digits, and a small model of characters.

Learners are threads of this process with clients of their own, so that all of them get through on
few cores; what they send and take goes through real shards. Both arms see the same samples.
"""

from __future__ import annotations

import io
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import shardwell
from outer.rows import Row
from shardwell_server import LocalCluster
from shardwell_server.demo.digits.model import FloatArray
from shardwell_server.demo.digits.samples import Batches, Digits, Samples, load_digits
from shardwell_server.demo.digits.worker import BATCH_SIZE, FIRST_WEIGHTS_SEED, MODEL

_LEARNER_COUNT = 4
_STEP_COUNT = 600
_INNER = shardwell.Adam(learning_rate=1e-3)
_SEEDS = range(5)
_SYNC_EVERY = 50

_CHARACTER_LEARNER_COUNT = 8
_CHARACTER_STEP_COUNT = 4000
_CHARACTER_COUNT, _CONTEXT, _EMBEDDING_WIDTH, _WIDTH = 128, 8, 16, 256
_CHARACTER_BATCH_SIZE = 64
_PEAK_RATE, _WARM_UP = 2e-3, 100
_TEXT_SIZE = 1_000_000
_HELD_OUT_SIZE = 50_000


def _together(count: int, work: Callable[[int], None]) -> None:
    """Runs a function for each learner, each on a thread.

    Raises:
        BaseException: what the first that failed has raised.
    """
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Digits.


def digits() -> list[Row]:
    """Held-out accuracy of 4 learners, H = 50, beside a synchronous run on as many samples."""
    found: dict[str, list[float]] = {"synchronous": [], "fp32": [], "int8": []}
    for seed in _SEEDS:
        data = _shuffled(load_digits(), seed)
        found["synchronous"].append(_synchronous(data, seed))
        for codec in ("fp32", "int8"):
            found[codec].append(_outer(data, seed, codec))
    texts = {
        name: f"{statistics.mean(values):.4f} ({min(values):.3f} to {max(values):.3f})"
        for name, values in found.items()
    }
    return [
        Row("digits, 4 learners, H = 50, mean of 5 seeds, held-out: int8", "0.962", texts["int8"]),
        Row("the same with fp32", "", texts["fp32"]),
        Row("synchronous, as many samples", "", texts["synchronous"]),
    ]


def _shuffled(data: Digits, seed: int) -> Digits:
    order = np.random.default_rng(seed).permutation(len(data.training))
    return Digits(data.training[order], data.held_out)


def _gradient_of(
    weights: FloatArray, batch: tuple[FloatArray, npt.NDArray[np.int64]]
) -> tuple[float, FloatArray]:
    return MODEL.loss_and_gradient(weights, *batch)


def _shares(training: Samples) -> list[Batches]:
    return [
        Batches(training, worker_index=index, worker_count=_LEARNER_COUNT, batch_size=BATCH_SIZE)
        for index in range(_LEARNER_COUNT)
    ]


def _accuracy(flat: FloatArray, data: Digits) -> float:
    return float(MODEL.accuracy(flat, data.held_out.images, data.held_out.labels))


def _synchronous(data: Digits, seed: int) -> float:
    """All gradients of a step averaged, one update by Adam: what shards do with 4 workers."""
    shares = _shares(data.training)

    first = MODEL.first_weights(FIRST_WEIGHTS_SEED + seed)
    trainer = shardwell.DataParallelTrainer(_gradient_of, first, _INNER)
    for step in range(_STEP_COUNT):
        batches = [share[step] for share in shares]
        images = np.concatenate([batch.images for batch in batches])
        trainer.step_share((images, np.concatenate([batch.labels for batch in batches])))
    return _accuracy(trainer.weights, data)


def _outer(data: Digits, seed: int, codec: Any) -> float:
    shares = _shares(data.training)
    images: list[Any] = [None] * _LEARNER_COUNT

    def learn(index: int) -> None:
        first = MODEL.first_weights(FIRST_WEIGHTS_SEED + seed)
        trainer = shardwell.DataParallelTrainer(_gradient_of, first, _INNER)
        weights = MODEL.tensors(trainer.weights)
        with (
            shardwell.connect(cluster.target, worker_id=f"w{index}", timeout_s=120) as client,
            shardwell.Outer(
                client,
                "digits",
                tensors={name: tensor.shape for name, tensor in weights.items()},
                sync_every=_SYNC_EVERY,
                fragments=2,
                overlap=2,
                codec=codec,
                worker_count=_LEARNER_COUNT,
            ) as outer,
        ):
            _copy(outer.init(weights), weights)
            for step in range(_STEP_COUNT):
                batch = shares[index][step]
                trainer.step_share((batch.images, batch.labels))
                _copy(outer.after_step(weights, sample_count=BATCH_SIZE), weights)
            images[index] = outer.reload()

    with LocalCluster(2) as cluster:
        _together(_LEARNER_COUNT, learn)
    flat = np.empty(MODEL.size, np.float32)
    _copy(images[0], MODEL.tensors(flat))
    return _accuracy(flat, data)


def _copy(new: dict[str, npt.NDArray[np.float32]], weights: dict[str, FloatArray]) -> None:
    for name, tensor in new.items():
        weights[name][...] = tensor


# Characters.


def characters() -> list[Row]:
    """Loss of a small model of characters, 8 learners, H = 50, beside as many tokens at once."""
    import torch

    torch.set_num_threads(1)
    text = _text()
    synchronous = _characters_synchronous(text)
    fp32, int8 = (_characters_outer(text, codec) for codec in ("fp32", "int8"))
    return [
        Row(
            "characters, 8 learners, H = 50: held-out loss / synchronous, int8",
            "1.02",
            f"{int8 / synchronous:.4f} ({int8:.4f} / {synchronous:.4f})",
        ),
        Row("the same with fp32", "", f"{fp32 / synchronous:.4f}"),
        Row("int8 / fp32", "1.002", f"{int8 / fp32:.4f}"),
    ]


def _text() -> npt.NDArray[np.int64]:
    """Python's own modules, in the order of their names, as numbers of characters."""
    found = io.StringIO()
    for path in sorted(Path(io.__file__).parent.glob("*.py")):
        found.write(path.read_text(errors="replace"))
        if found.tell() > _TEXT_SIZE + _HELD_OUT_SIZE:
            break
    raw = found.getvalue().encode("ascii", "replace")[: _TEXT_SIZE + _HELD_OUT_SIZE]
    return np.frombuffer(raw, np.uint8).astype(np.int64)


def _model(seed: int) -> Any:
    """A perceptron of the last eight characters (Bengio et al., 2003); 68,000 weights."""
    import torch

    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(_CHARACTER_COUNT, _EMBEDDING_WIDTH),
        torch.nn.Flatten(),
        torch.nn.Linear(_CONTEXT * _EMBEDDING_WIDTH, _WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(_WIDTH, _CHARACTER_COUNT),
    )


def _batches(text: npt.NDArray[np.int64], learner: int) -> Iterator[tuple[Any, Any]]:
    """Each learner's own draws from the text, the same in both arms."""
    import torch

    random = np.random.default_rng((7, learner))
    share = text[:_TEXT_SIZE]
    while True:
        starts = random.integers(0, share.size - _CONTEXT - 1, _CHARACTER_BATCH_SIZE)
        rows_of_torch = torch.from_numpy(share[starts[:, None] + np.arange(_CONTEXT + 1)])
        yield rows_of_torch[:, :-1], rows_of_torch[:, -1]


def _loss(model: Any, inputs: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(inputs), targets)


def _held_out_loss(model: Any, text: npt.NDArray[np.int64]) -> float:
    import torch

    windows = np.lib.stride_tricks.sliding_window_view(text[_TEXT_SIZE:], _CONTEXT + 1)
    rows = torch.from_numpy(windows.copy())
    with torch.no_grad():
        return float(_loss(model, rows[:, :-1], rows[:, -1]))


def _rate(step: int) -> float:
    """A cosine to a twentieth, after a warm-up."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    part = (step - _WARM_UP) / (_CHARACTER_STEP_COUNT - _WARM_UP)
    return float(0.05 + 0.475 * (1 + np.cos(np.pi * part)))


def _optimizer(model: Any) -> tuple[Any, Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)


def _characters_synchronous(text: npt.NDArray[np.int64]) -> float:
    import torch

    model = _model(0)
    optimizer, schedule = _optimizer(model)
    shares = [_batches(text, learner) for learner in range(_CHARACTER_LEARNER_COUNT)]
    for _ in range(_CHARACTER_STEP_COUNT):
        pairs = [next(share) for share in shares]
        inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        optimizer.zero_grad()
        _loss(model, inputs, targets).backward()
        optimizer.step()
        schedule.step()
    return _held_out_loss(model, text)


def _characters_outer(text: npt.NDArray[np.int64], codec: Any) -> float:
    import shardwell.torch

    losses: list[float] = [0.0] * _CHARACTER_LEARNER_COUNT
    models = [_model(0) for _ in range(_CHARACTER_LEARNER_COUNT)]

    def learn(index: int) -> None:
        model = models[index]
        optimizer, schedule = _optimizer(model)
        batches = _batches(text, index)
        with (
            shardwell.connect(cluster.target, worker_id=f"w{index}", timeout_s=300) as client,
            shardwell.torch.DiLoCo(
                model,
                optimizer,
                client,
                sync_every=_SYNC_EVERY,
                fragments=2,
                overlap=1,
                codec=codec,
                worker_count=_CHARACTER_LEARNER_COUNT,
            ) as training,
        ):
            for _ in range(_CHARACTER_STEP_COUNT):
                optimizer.zero_grad()
                _loss(model, *next(batches)).backward()
                optimizer.step()
                schedule.step()
            training.reload()
            losses[index] = _held_out_loss(model, text)

    with LocalCluster(2) as cluster:
        _together(_CHARACTER_LEARNER_COUNT, learn)
    return losses[0]

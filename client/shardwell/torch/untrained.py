"""Tensors of a model that are not trained: buffers, and parameters that are frozen.

Buffers, and tensors that something else trains, are the first worker's at the start: float32 as it
is, all else as its bytes, bit for bit. Then they are each worker's own, until all make those of
floating point their mean, which takes the place of the first worker's. Frozen tensors stay on the
workers. The shards keep a digest of each, so that a worker with other values gets an error that
names the tensor; with `broadcast_frozen` they keep the bytes, too, for a worker that comes without
them.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from shardwell.client import Client
from shardwell.errors import (
    ArgumentError,
    NotInitializedError,
    SpecMismatchError,
    UnknownParameterError,
)
from shardwell.numerics.codec import Float32
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.specs.optimizers import SGD, Average
from shardwell.torch.buffers import (
    as_float32,
    check_readable,
    pieces,
    put_back,
    word_count,
    words_of,
)
from shardwell.torch.plain_names import PlainNames
from shardwell.torch.trained_model import TrainedModel, Training

_NO_UPDATE = SGD(learning_rate=0.0)
_HANDED_OVER: dict[str, Any] = {
    "optimizer": _NO_UPDATE,
    "codec": "fp32",
    "mode": "async",  # a shard then has room for the values, and none for sums
    "allow_non_finite": True,
}
_PIECE_WORD_COUNT = 2**25
"""Words of frozen tensors that are handed over at a time, 128 MiB in memory; a larger one is
alone."""
_DIGEST_BYTES = 16
_PAUSE_S = 0.05
_ROUND_COUNT_MAX = 8
"""Updates that bring a value to another one; each takes off what rounding has left."""


class Untrained:
    """A model's frozen tensors, which `broadcast_frozen` hands over, and its buffers."""

    def __init__(
        self, trained: TrainedModel, training: Training, *, broadcast_frozen: bool = False
    ) -> None:
        self._model = trained.model
        self._names = trained.names
        self._options = training.options
        self._buffer_mean: Parameter[NamedArrays] | None = None
        self._first: Parameter[NamedArrays] | None = None
        """The first worker's values, on rank 0 once it has averaged."""
        client, name = training.client, training.name
        self._client, self._first_name = client, f"{name}.first"
        frozen = _frozen_of(self._model, self._names)
        shared = _shared_of(self._model, self._names, {**trained.tensors, **frozen})
        if frozen:
            _agree_on_frozen(training, frozen, broadcast=broadcast_frozen)
        if shared:
            _hand_over(client, self._first_name, shared, training.timeout_s)
        means = self._means()
        if means and self._options["mode"] == "sync" and "members" not in self._options:
            self._buffer_mean = client.parameter(
                f"{name}.buffers",
                tensors=means,
                optimizer=Average(),
                codec="fp32",
                allow_non_finite=True,
                worker_count=self._options.get("worker_count", 1),
                mode="sync",
            )
            last = self._buffer_mean.get_weights()
            if self._buffer_mean.version:  # it starts again: those that were averaged last
                self._put_means(last)

    def average(self, timeout_s: float | None) -> None:
        """Averages the buffers, as `ServerOptimizer.average_buffers` says."""
        if "members" in self._options and self._means():
            raise ArgumentError(
                "average_buffers() waits until all workers call it, and with members= these are "
                "not known: a worker that was late for a step would miss it; evaluate one "
                "worker's model, whose statistics are of its own batches, or use layers without "
                "statistics, such as GroupNorm"
            )
        if self._buffer_mean is None:
            if self._options["mode"] == "async":
                raise ArgumentError("buffers are averaged in mode='sync' alone")
            return
        own = {name: as_float32(name, buffer) for name, buffer in self._means().items()}
        self._put_means(self._buffer_mean.exchange(own, timeout_s=timeout_s))
        if self._client.rank == 0:
            self._hand_on(timeout_s)

    def _hand_on(self, timeout_s: float | None) -> None:
        """Makes the means what a worker gets that begins; an Average's are in no restore."""
        if self._first is None:
            self._first = self._client.parameter(self._first_name)
        means = {_title(name, each): _encoded(name, each) for name, each in self._means().items()}
        for _ in range(_ROUND_COUNT_MAX):
            found = self._first.get_weights(timeout_s=timeout_s)
            rest = {name: np.zeros_like(values) for name, values in found.items()}
            with np.errstate(invalid="ignore", over="ignore"):
                for name, values in means.items():
                    off = found[name] - values
                    rest[name] = np.where(np.isfinite(off), off, 0)  # else they stay as they were
            if not any(values.any() for values in rest.values()):
                return
            self._first.put_gradient(rest, learning_rate=1.0, timeout_s=timeout_s)

    def _put_means(self, arrays: NamedArrays) -> None:
        with torch.no_grad():
            for buffer_name, buffer in self._means().items():
                buffer.copy_(torch.from_numpy(arrays[buffer_name]))

    def _means(self) -> dict[str, torch.Tensor]:
        saved = set(self._model.state_dict(keep_vars=True))
        buffers = self._names.of(
            (name, each) for name, each in self._model.named_buffers() if name in saved
        )
        return {
            name: each
            for name, each in buffers.items()
            if each.numel() and each.is_floating_point()
        }


def _frozen_of(model: torch.nn.Module, names: PlainNames) -> dict[str, torch.Tensor]:
    found = names.of(model.named_parameters())
    return {
        name: tensor
        for name, tensor in found.items()
        if not tensor.requires_grad and tensor.numel()
    }


def _shared_of(
    model: torch.nn.Module, names: PlainNames, others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    state = names.of(model.state_dict(keep_vars=True).items())
    ids = {id(tensor) for tensor in others.values()}
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and tensor.numel() and id(tensor) not in ids
    }


def hand_over_model(client: Client, name: str, model: torch.nn.Module) -> None:
    """Gives a model the first worker's parameters and buffers, bit for bit."""
    tensors = _shared_of(model, PlainNames(model), {})
    if tensors:
        _hand_over(client, name, tensors, None)


def _hand_over(
    client: Client, name: str, tensors: Mapping[str, torch.Tensor], timeout_s: float | None
) -> None:
    own = {_title(key, tensor): _encoded(key, tensor) for key, tensor in tensors.items()}
    handed = client.parameter(name, tensors=own, **_HANDED_OVER)
    handed.init(own, timeout_s=timeout_s)
    found = handed.get_weights(timeout_s=timeout_s)
    handed.close()
    for key, tensor in tensors.items():
        _decode(found[_title(key, tensor)], tensor)


def _title(name: str, tensor: torch.Tensor) -> str:
    """Returns the name on the cluster of a tensor that is handed over: for float32 its own.

    Others lie there as bytes, and their names say type and shape: a worker whose tensor differs
    gets an error that names it.
    """
    if tensor.dtype == torch.float32:
        return name
    return f"{name} ({_kind(tensor)}, as bytes)"


def _kind(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _encoded(name: str, tensor: torch.Tensor) -> Float32:
    check_readable(name, tensor)
    if tensor.dtype == torch.float32:
        return as_float32(name, tensor)
    return words_of([tensor])


def _decode(values: Float32, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.float32:
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(values))
    else:
        put_back(values, [tensor])


# Frozen tensors.


def _agree_on_frozen(
    training: Training, frozen: Mapping[str, torch.Tensor], *, broadcast: bool
) -> None:
    """Compares frozen tensors with the first worker's, or takes those.

    The digests decide whose values count: the first worker's. With `broadcast`, a worker whose
    tensors have these digests sends the bytes, and one whose tensors have others waits for them.
    """
    client, name, timeout_s = training.client, training.name, training.timeout_s
    titles = {key: f"{key} ({_kind(tensor)}, digest)" for key, tensor in frozen.items()}
    own = dict(zip(titles.values(), _digests(frozen), strict=True))
    agreed = client.parameter(f"{name}.frozen", tensors=own, **_HANDED_OVER)
    agreed.init(own, timeout_s=timeout_s)
    expected = agreed.get_weights(timeout_s=timeout_s)
    agreed.close()

    def others(now: Mapping[str, Float32]) -> list[str]:
        return [
            key for key, title in titles.items() if not np.array_equal(now[title], expected[title])
        ]

    differ = others(own)
    if broadcast:
        deadline_s = time.monotonic() + (client.timeout_s if timeout_s is None else timeout_s)
        for number, piece in enumerate(pieces(frozen, _PIECE_WORD_COUNT)):
            part = f"{name}.frozen.{number}"
            if differ:
                _fetch(client, part, piece, deadline_s)
            else:
                _send(client, part, piece, timeout_s)
        if differ:
            differ = others(dict(zip(titles.values(), _digests(frozen), strict=True)))
    if differ:
        more = f", and {len(differ) - 1} more tensors" if len(differ) > 1 else ""
        raise SpecMismatchError(
            f"frozen tensor {differ[0]!r}{more}: the first worker of {name!r} has other values of "
            "it; frozen tensors stay on the workers, and all must have the same: load the same "
            "weights before the ServerOptimizer is made, or pass broadcast_frozen=True on every "
            "worker, and all get the first worker's",
            parameter=name,
        )


def _digests(frozen: Mapping[str, torch.Tensor]) -> list[Float32]:
    """Returns a digest of each tensor's bytes: 8 numbers of 16 bits."""
    for name, tensor in frozen.items():
        check_readable(name, tensor)
    thread_count = min(8, os.cpu_count() or 1)  # hashing lets go of the GIL
    with ThreadPoolExecutor(thread_count, "shardwell-digest") as threads:
        return list(threads.map(_digest, frozen.values()))


def _digest(tensor: torch.Tensor) -> Float32:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(flat.data, digest_size=_DIGEST_BYTES).digest()
    words: Float32 = np.frombuffer(digest, "<u2").astype(np.float32)
    return words


def _send(
    client: Client, name: str, piece: Mapping[str, torch.Tensor], timeout_s: float | None
) -> None:
    words = words_of(list(piece.values()))
    kept = client.parameter(name, size=words.size, **_HANDED_OVER)
    kept.init(words, timeout_s=timeout_s)
    kept.close()


def _fetch(client: Client, name: str, piece: Mapping[str, torch.Tensor], deadline_s: float) -> None:
    pause = threading.Event()
    while True:
        rest_s = max(deadline_s - time.monotonic(), _PAUSE_S)
        try:
            kept = client.parameter(name)
            words = kept.get_weights(timeout_s=rest_s)
            break
        except (UnknownParameterError, NotInitializedError) as error:
            if time.monotonic() > deadline_s:
                raise NotInitializedError(
                    f"frozen tensors, from {next(iter(piece))!r} on: no worker with the first "
                    "worker's values has sent them; start one that has them, with "
                    "broadcast_frozen=True",
                    parameter=name,
                ) from error
            pause.wait(_PAUSE_S)
    kept.close()
    tensors = list(piece.values())
    if words.size != word_count(tensors):
        raise SpecMismatchError(
            f"frozen tensors, from {next(iter(piece))!r} on, take {word_count(tensors)} numbers, "
            f"and parameter {name!r} has {words.size}; give all workers the same model",
            parameter=name,
        )
    put_back(words, tensors)

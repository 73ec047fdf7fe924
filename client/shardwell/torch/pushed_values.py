"""Weights that all workers put on the cluster on purpose, in place of those of a parameter.

The parameter is deleted and made again (docs/adr/0025-pushed-weights.md): steps never lead back, so
no gradient, tenure or stream of the old one can count in the new one. Workers meet twice: before
the deletion, where all show that they push the same, and after it, so that no worker deletes what
another one has made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwell.checkpoint.tensor_files import WEIGHTS_NAME, SliceReader
from shardwell.client import Client
from shardwell.errors import ArgumentError, StepOrderError, UnknownParameterError
from shardwell.numerics.codec import Float32
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec


@dataclass(frozen=True)
class PushedValues:
    """The values to put in place of a parameter's.

    Args:
        arrays: By name: "weights", and the update rule's arrays, all of them or none: (size,), in
            the order of the parameter's layout.
        version: Steps that they have seen.
    """

    arrays: Mapping[str, Float32]
    version: int = 0

    @property
    def digest(self) -> bytes:
        """32 bytes that tell these values from any others."""
        found = hashlib.sha256(f"{self.version}".encode())
        for name, array in self.arrays.items():
            found.update(name.encode())
            found.update(array.data.cast("B"))
        return found.digest()

    @staticmethod
    def of(saved: Any, spec: ParameterSpec, version: int) -> PushedValues:
        """The values of a state_dict, whose tensors may have been saved in another order.

        Raises:
            ArgumentError: an array or tensor is missing, or has another shape; names it.
        """
        assert spec.layout is not None
        names = (WEIGHTS_NAME, *spec.optimizer.slot_names)
        if not isinstance(saved, Mapping) or set(saved) != set(names):
            found = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
            raise ArgumentError(
                f"load_state_dict: values of {found!r:.200}; expected {list(names)} of "
                f"{type(spec.optimizer).__name__}"
            )
        arrays = {}
        for name in names:
            tensors, flat = saved[name], np.empty(spec.size, np.float32)
            for tensor in spec.layout:
                given = tensors.get(tensor.name) if isinstance(tensors, Mapping) else None
                if not isinstance(given, torch.Tensor) or tuple(given.shape) != tensor.shape:
                    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else None
                    raise ArgumentError(
                        f"load_state_dict: {name!r} of tensor {tensor.name!r} has shape {shape}, "
                        f"expected {tensor.shape}"
                    )
                values = given.detach().to("cpu", torch.float32).reshape(-1).numpy()
                flat[tensor.offset : tensor.stop] = values
            arrays[name] = flat
        return PushedValues(arrays, version)


def saved_values(client: Client, parameter: Parameter[NamedArrays], version: int) -> dict[str, Any]:
    """Weights and the update rule's arrays by tensor, as the shards have them. Blocks.

    They come through files in a temporary directory, one at a time.

    Raises:
        ArgumentError: the parameter has gone on to another version.
        ShardwellError: as `Client.save_checkpoint`.
    """
    layout = parameter.spec.layout
    assert layout is not None
    with tempfile.TemporaryDirectory(prefix="shardwell-") as directory:
        path = Path(directory, "values")
        (entry,) = client.save_checkpoint(path, [parameter.name]).parameters
        if entry.version != version:
            raise ArgumentError(
                f"state_dict: parameter {parameter.name!r} is at version {entry.version}, expected "
                f"{version}; other workers went on under this worker's name"
            )
        arrays = {name: np.empty(entry.size, np.float32) for name in entry.tensor_names}
        for file in entry.files:
            with SliceReader(path / file.path, entry.tensor_names, file.size) as reader:
                for index, array in enumerate(arrays.values()):
                    array[file.offset : file.offset + file.size] = reader.read(index, 0, file.size)
    return {
        name: {
            tensor.name: torch.from_numpy(array[tensor.offset : tensor.stop]).view(tensor.shape)
            for tensor in layout
        }
        for name, array in arrays.items()
    }


def replace(
    client: Client,
    old: Parameter[NamedArrays],
    values: PushedValues,
    meeting: Meeting,
    opened: Callable[[], Parameter[NamedArrays]],
    *,
    timeout_s: float | None,
) -> Parameter[NamedArrays]:
    """Makes a parameter again with other values. All its workers call it; blocks until all do.

    Args:
        client: The worker's.
        old: The parameter as it is; closed, if all agree.
        values: What it gets.
        meeting: Meeting of its workers.
        opened: Opens it as it was at first.
        timeout_s: Bound of each wait; default: the client's.

    Raises:
        ArgumentError: workers push different values, and nothing was changed; or one was started
            again meanwhile, and the parameter is gone.
        WorkersMissingError: other workers do not push; nothing was changed.
        ShardwellError: as `Client.delete` and `Parameter.init`.
    """
    name, digest = old.name, values.digest
    if not meeting.agrees(digest, timeout_s):
        raise ArgumentError(
            f"workers push different values for parameter {name!r}, or not at the same time; "
            "nothing was changed; load the same weights on all workers, and push again"
        )
    old.close()
    with contextlib.suppress(UnknownParameterError):  # which another worker has deleted
        client.delete(name, kind="parameter", force=True, timeout_s=timeout_s)
    if not meeting.agrees(hashlib.sha256(digest).digest(), timeout_s):
        raise ArgumentError(
            f"a worker was started again while values for parameter {name!r} were pushed, and the "
            "parameter was deleted before; start all workers again, and push once more"
        )
    new = opened()
    new.restore(
        *(_named(new, array) for array in values.arrays.values()),
        version=values.version,
        load_id=int.from_bytes(digest[:8], "little") >> 1 or 1,
        timeout_s=timeout_s,
    )
    return new


def _named(parameter: Parameter[NamedArrays], array: Float32) -> NamedArrays:
    layout = parameter.spec.layout
    assert layout is not None
    return {t.name: array[t.offset : t.stop].reshape(t.shape) for t in layout}


class Meeting:
    """Where all workers of a parameter compare 32 bytes: the mean of theirs, `NAME.pushed`.

    One for each worker: a comparison that failed for want of another worker is gone on with by the
    next one, as its first bytes are counted.

    Args:
        client: The worker's.
        name: Name of the parameter.
        worker_count: Its workers.
    """

    def __init__(self, client: Client, name: str, worker_count: int) -> None:
        self._mean = client.parameter(
            f"{name}.pushed", size=32, optimizer=Average(), worker_count=worker_count, codec="fp32"
        )

    def agrees(self, own: bytes, timeout_s: float | None) -> bool:
        """Whether all workers bring the same. Blocks until all have come."""
        given = np.frombuffer(own, np.uint8).astype(np.float32)  # sums of which are exact
        try:
            mean = self._mean.exchange(given, timeout_s=timeout_s)
        except StepOrderError:  # other bytes were counted, and their step is over for this worker
            self._mean.reopen()
            mean = self._mean.exchange(given, timeout_s=timeout_s)
        return bool((mean == given).all())

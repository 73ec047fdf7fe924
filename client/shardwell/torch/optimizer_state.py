"""The state_dict of a `ServerOptimizer`, and values that go from workers to the shards with it.

The optimizer's arrays are on the shards. So a state goes on where the cluster is at the same
version of the same training, or where it has the values; never with arrays that begin anew.

Values that all workers put on the cluster on purpose replace the parameter, which is deleted and
made again (docs/adr/0025-pushed-weights.md): steps never lead back, so no gradient, tenure or
stream of the old one can count in the new one. Workers meet twice: before the deletion, where all
show that they push the same, and after it, so that no worker deletes what another one has made
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwell.checkpoint.format import opened
from shardwell.checkpoint.tensor_files import WEIGHTS_NAME
from shardwell.client import Client
from shardwell.errors import ArgumentError, StepOrderError, UnknownParameterError
from shardwell.numerics.codec import Float32
from shardwell.parameter.parameter import Parameter
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import ParameterSpec

KEY = "shardwell"
"""The state_dict's key of a TrainingState, beside torch's "state" and "param_groups"."""
VALUES_KEY = "shardwell_values"
"""The state_dict's key of arrays, where `saves_values` is set."""
_WHERE_ARRAYS_ARE = (
    "the optimizer's arrays are on the shards and in their checkpoints: call "
    "client.restore_checkpoint() before the ServerOptimizer is made"
)


@dataclass(frozen=True)
class TrainingState:
    """The point that a training has reached; a state_dict has it as plain numbers and strings."""

    name: str
    version: int
    """Steps that the weights have seen; in asynchronous mode, updates."""
    digest: str
    """Digest of the weights at that version, as workers have them."""

    @staticmethod
    def of(state: Mapping[str, Any]) -> TrainingState:
        """Reads a state_dict."""
        if not isinstance(state, Mapping) or KEY not in state:
            raise ArgumentError(
                f"load_state_dict: {_foreign(state)}, which a ServerOptimizer can't go on with; "
                f"{_WHERE_ARRAYS_ARE}, or begin a new training without load_state_dict"
            )
        found = state[KEY]
        kinds = {"name": str, "version": int, "digest": str}
        if (
            not isinstance(found, Mapping)
            or set(found) != set(kinds)
            or any(type(found[key]) is not kind for key, kind in kinds.items())
            or found["version"] < 0
        ):
            raise ArgumentError(
                f"load_state_dict: state_dict[{KEY!r}] must have a name, a version and a digest; "
                f"got {found!r:.200}; save it by state_dict() of this version of Shardwell"
            )
        return TrainingState(**found)

    def check_goes_on(
        self, now: TrainingState, *, is_sync: bool, may_go_on_alone: bool = False
    ) -> None:
        """Refuses to go on where the cluster is elsewhere; says what to do.

        With `may_go_on_alone` a step may close without a worker: a state of any earlier step is
        good then, and weights of a worker may be of two versions.
        """
        if self.name != now.name:
            raise ArgumentError(
                f"load_state_dict: the state is of parameter {self.name!r}, and this "
                f"ServerOptimizer has {now.name!r}; make it with name={self.name!r}"
            )
        if now.version < self.version and (is_sync or not now.version):
            raise ArgumentError(
                f"load_state_dict: the state is of step {self.version} of parameter "
                f"{self.name!r}, and the cluster is at step {now.version}, without the optimizer's "
                f"arrays of step {self.version}; {_WHERE_ARRAYS_ARE}, with a checkpoint that "
                f"client.save_checkpoint() made at step {self.version}; or save states with "
                "optimizer.saves_values = True, which have them"
            )
        if may_go_on_alone:
            return
        if now.version > self.version and is_sync:
            raise ArgumentError(
                f"load_state_dict: the state is of step {self.version} of parameter "
                f"{self.name!r}, and the cluster is at step {now.version}; to go on there, load no "
                "state, and begin at optimizer.next_step with its data; to go back to step "
                f"{self.version} on purpose, load on all workers a state that was saved with "
                "optimizer.saves_values = True"
            )
        if is_sync and self.digest != now.digest:
            raise ArgumentError(
                f"load_state_dict: the state is of another training: its weights at step "
                f"{self.version} of parameter {self.name!r} were others than the cluster's; load "
                "the state of this training, or give it another name="
            )


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns a digest of weights, in any order: float32, contiguous, on the CPU."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        found.update(f"{name!r} {tuple(tensor.shape)}".encode())
        found.update(memoryview(tensor.detach().reshape(-1).numpy()).cast("B"))
    return found.hexdigest()


def _foreign(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"got {type(state).__name__}"
    own = state.get("state")
    if isinstance(own, Mapping) and own:
        first = next(iter(own.values()))
        names = sorted(map(str, first)) if isinstance(first, Mapping) else []
        return f"this is another optimizer's state, of {len(own)} tensors with {names!r:.120}"
    return f"this is no state of a ServerOptimizer, having no {KEY!r} beside {sorted(state)!r:.120}"


@dataclass(frozen=True)
class PushedValues:
    """The values that replace a parameter's, after `version` steps.

    `arrays` are the "weights", and the update rule's arrays, all of them or none: (size,) each, in
    the order of the parameter's layout.
    """

    arrays: Mapping[str, Float32]
    version: int = 0

    @property
    def digest(self) -> bytes:
        """A digest of 32 bytes that tells these values from any others."""
        found = hashlib.sha256(f"{self.version}".encode())
        for name, array in self.arrays.items():
            found.update(name.encode())
            found.update(array.data.cast("B"))
        return found.digest()

    @staticmethod
    def of(saved: Any, spec: ParameterSpec, version: int) -> PushedValues:
        """The values of a state_dict, whose tensors may have been saved in another order."""
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
    """Returns weights and rule's arrays by tensor, through temporary files one by one. Blocks."""
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
            with opened(path, entry, file) as reader:
                for name, array in arrays.items():
                    array[file.offset : file.offset + file.size] = reader.read(name, 0, file.size)
    return {
        name: {key: torch.from_numpy(view) for key, view in TensorViews(layout, array).items()}
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
    """Makes a parameter again with other values; blocks until all of its workers have called it.

    If all agree, `old` is closed; `opened` opens the parameter as it was at first.
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
    assert new.spec.layout is not None
    new.restore(
        *(TensorViews(new.spec.layout, array) for array in values.arrays.values()),
        version=values.version,
        load_id=int.from_bytes(digest[:8], "little") >> 1 or 1,
        timeout_s=timeout_s,
    )
    return new


class Meeting:
    """A place where all workers compare 32 bytes: the mean of theirs, the parameter `NAME.pushed`.

    One for each worker: after a comparison that failed for want of another worker, the next one
    goes on with its first bytes, which are counted.
    """

    def __init__(self, client: Client, name: str, worker_count: int) -> None:
        self._mean = client.parameter(
            f"{name}.pushed", size=32, optimizer=Average(), worker_count=worker_count, codec="fp32"
        )

    def agrees(self, own: bytes, timeout_s: float | None) -> bool:
        """True if all workers bring the same. Blocks until all have come."""
        given = np.frombuffer(own, np.uint8).astype(np.float32)  # sums of which are exact
        try:
            mean = self._mean.exchange(given, timeout_s=timeout_s)
        except StepOrderError:  # other bytes were counted, and their step is over for this worker
            self._mean.reopen()
            mean = self._mean.exchange(given, timeout_s=timeout_s)
        return bool((mean == given).all())

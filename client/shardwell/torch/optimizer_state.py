"""What a state_dict of `ServerOptimizer` has beside torch's: which training it is of, and where.

The optimizer's arrays are on the shards. So a state goes on where the cluster is at the same
version of the same training, or where it has the values; never with arrays that begin anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardwell.errors import ArgumentError

KEY = "shardwell"
"""Of a state_dict, beside torch's "state" and "param_groups"."""
VALUES_KEY = "shardwell_values"
"""The same, where `saves_values` is set."""
_WHERE_ARRAYS_ARE = (
    "the optimizer's arrays are on the shards and in their checkpoints: call "
    "client.restore_checkpoint() before the ServerOptimizer is made"
)


@dataclass(frozen=True)
class TrainingState:
    """Where a training is. Saved with a state_dict, as plain numbers and strings."""

    name: str
    """Name of the parameter."""
    version: int
    """Steps that the weights have seen; in asynchronous mode, updates."""
    digest: str
    """Digest of the weights at that version, as workers have them."""

    def as_dict(self) -> dict[str, Any]:
        """What `of` reads."""
        return asdict(self)

    @staticmethod
    def of(state: Mapping[str, Any]) -> TrainingState:
        """Reads a state_dict.

        Raises:
            ArgumentError: it is another optimizer's, or damaged.
        """
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
        """Returns if the cluster is where the state was saved.

        Args:
            now: Where it is.
            is_sync: Whether its versions are steps that all workers make together.
            may_go_on_alone: Whether such a step may close without a worker: a state of any earlier
                step is good then, and weights of a worker may be of two versions.

        Raises:
            ArgumentError: it is elsewhere; says what to do.
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
    """A digest of weights, in whatever order they come.

    Args:
        tensors: By name: float32, contiguous, on the CPU.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        found.update(f"{name!r} {tuple(tensor.shape)}".encode())
        found.update(memoryview(tensor.detach().reshape(-1).numpy()).cast("B"))
    return found.hexdigest()


def _foreign(state: Any) -> str:
    """The given state, in words."""
    if not isinstance(state, Mapping):
        return f"got {type(state).__name__}"
    own = state.get("state")
    if isinstance(own, Mapping) and own:
        first = next(iter(own.values()))
        names = sorted(map(str, first)) if isinstance(first, Mapping) else []
        return f"this is another optimizer's state, of {len(own)} tensors with {names!r:.120}"
    return f"this is no state of a ServerOptimizer, having no {KEY!r} beside {sorted(state)!r:.120}"

"""The contract of all stores: named storage for the arrays of a parameter's slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardwell.codec import Float32


@dataclass(frozen=True)
class ParameterStorage:
    """The float32 arrays of one slice; each (slice_size,), C-contiguous, writable, from zero."""

    weights: Float32
    """Master weights."""
    gradient_sum: Float32 | None
    """Sum of the open step's gradients; None where one gradient makes an update."""
    slots: tuple[Float32, ...]
    """Optimizer state, one array a slot."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.weights, *self.slots)
        total = sum(array.nbytes for array in arrays)
        return total + (self.gradient_sum.nbytes if self.gradient_sum is not None else 0)


class Store(Protocol):
    """Storage of one shard. Calls come from one thread at a time."""

    def create(
        self, name: str, slice_size: int, *, slot_count: int, with_sum: bool
    ) -> ParameterStorage:
        """Makes the storage of a new parameter.

        Args:
            name: The parameter; checked by `shardwell.names`, unique in the store.
            slice_size: Elements of this shard's slice; 0 is possible.
            slot_count: Arrays of optimizer state.
            with_sum: Whether gradients are summed before they are applied.

        Raises:
            LimitError: there is no room for it.
        """
        ...

    def close(self) -> None:
        """Lets go of everything. The arrays are not to be used afterwards."""
        ...

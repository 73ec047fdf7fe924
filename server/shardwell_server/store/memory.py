"""A store in plain memory: as fast as it gets, gone with the process."""

from __future__ import annotations

import numpy as np

from shardwell.codec import Float32
from shardwell.errors import LimitError
from shardwell_server.store.store import ParameterStorage


class MemoryStore:
    """See Store. Pages are touched when first written, so an unused array costs nothing."""

    def __init__(self) -> None:
        self._parameters: dict[str, ParameterStorage] = {}

    def create(
        self, name: str, slice_size: int, *, slot_count: int, with_sum: bool
    ) -> ParameterStorage:
        """See Store."""
        if name in self._parameters:
            raise ValueError(f"storage of {name!r} exists")

        def zeros() -> Float32:
            return np.zeros(slice_size, np.float32)

        try:
            storage = ParameterStorage(
                weights=zeros(),
                gradient_sum=zeros() if with_sum else None,
                slots=tuple(zeros() for _ in range(slot_count)),
            )
        except MemoryError:
            raise LimitError(
                f"no memory for {slice_size} elements of {name!r} with {slot_count} slots of "
                "optimizer state; add shards or memory",
                parameter=name,
            ) from None
        self._parameters[name] = storage
        return storage

    def close(self) -> None:
        """See Store."""
        self._parameters.clear()

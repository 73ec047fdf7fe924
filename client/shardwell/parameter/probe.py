"""A parameter whose calls move one shard's slice alone: for measuring that shard, not for training.

A gradient that one shard has and the others have not is a step that is not whole. So this is for
asynchronous parameters without training, made to be measured with.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from shardwell.errors import ArgumentError
from shardwell.parameter.exchange import ShardSlice
from shardwell.parameter.parameter import Parameter
from shardwell.rpc.retry import Attempts
from shardwell.traffic import Traffic


class SliceProbe(Parameter[Any]):
    """`put_gradient` and `get_weights` of one shard's slice; values are those of the whole.

    Args:
        parameter: An asynchronous one, open and initialized. Its connections are used, and its
            client counts nothing of it: `traffic` does.
        shard_index: The shard.

    Raises:
        ArgumentError: the parameter is synchronous, or that shard has nothing of it.
        ShardUnavailableError: a shard is away.
    """

    def __init__(self, parameter: Parameter[Any], shard_index: int) -> None:
        if parameter.spec.mode != "async":
            raise ArgumentError(
                f"parameter {parameter.name!r} is synchronous: a gradient for one shard alone "
                "would leave its step open; measure with one of mode='async'"
            )
        if not any(one.size for one in parameter.slices[shard_index : shard_index + 1]):
            raise ArgumentError(f"shard {shard_index} has no elements of {parameter.name!r}")
        self._shard_index = shard_index
        self.traffic = Traffic()
        """What went to this shard, and came from it."""
        super().__init__(
            parameter.spec,
            parameter._shards,
            worker_id=parameter._worker_id,
            timeout_s=parameter._timeout_s,
            traffic=self.traffic,
            idle_streams=parameter._idle_streams,
        )

    @override
    def _open(self, attempts: Attempts, *, is_known: bool = False) -> None:
        super()._open(attempts, is_known=is_known)
        self._transfer.parts = [
            ShardSlice(part.channel, part.where, part.chunk_element_count, 0)
            for part in self._transfer.parts
            if part.channel.shard_index == self._shard_index
        ]

"""Sets a parameter's first weights so that one client's values stand as a whole.

Shard 0 grants a claim; its holder sends the values to the other shards, then to shard 0, whose
success decides that they stand, then tells the others so (docs/adr/0005-steps.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy.typing as npt

from shardwell.channel import ANSWER_MARGIN_S, ShardChannel
from shardwell.chunk_codec import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec
from shardwell.codec import CODECS, Scratch
from shardwell.errors import DeadlineError, InitSupersededError, ShardwellError
from shardwell.partition import Slice, slice_of
from shardwell.retry import Attempts
from shardwell.traffic import Traffic
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2

_RANGE_ELEMENT_COUNT = PAYLOAD_SIZE_MAX_BYTES // 4
_PAUSE_S_MAX = 0.5
# Finiteness was checked, or is not asked for.
_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)


class FirstValues(Protocol):
    """What is to stand, read piece by piece."""

    size: int
    """Elements of the parameter."""
    array_count: int
    """1: the weights; more: the arrays of optimizer state too."""
    version: int
    """Updates that they have seen."""
    learning_rate: float | None
    """From that version on; None: the spec's."""

    def read(self, array_index: int, where: Slice) -> npt.NDArray[Any]:
        """A range of an array, (where.size,) of floating point numbers."""


class GivenWeights:
    """Weights that the caller passed. See FirstValues."""

    array_count = 1
    version = 0
    learning_rate: float | None = None

    def __init__(self, weights: npt.NDArray[Any]) -> None:
        self.size = weights.size
        self._weights = weights

    def read(self, array_index: int, where: Slice) -> npt.NDArray[Any]:
        """See FirstValues: a view."""
        return self._weights[where.offset : where.stop]


class FirstWeights:
    """One client's values for one parameter."""

    def __init__(
        self,
        name: str,
        values: FirstValues,
        channels: list[ShardChannel],
        *,
        worker_id: str,
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        self._name = name
        self._values = values
        self._channels = channels
        self._worker_id = worker_id
        self._traffic = traffic
        self._attempts = attempts
        self._epoch = 0
        self._failure: ShardwellError | None = None
        self.is_own = False
        """Once settled: whether it is this client's values that stand."""

    def settle(self) -> int:
        """Blocks until this client's values or another's stand; returns the version.

        Safe to repeat: another claim is granted to the worker that has the last one.

        Raises:
            DeadlineError: another client claimed to set them and did not finish in time.
        """
        pause_s = 0.02
        while True:
            claim = self._claim()
            if claim.initialized:
                confirm(self._name, self._channels, claim.epoch, self._attempts)
                self.is_own = claim.epoch != 0 and claim.epoch == self._epoch
                return claim.version
            if claim.granted:
                self._epoch = claim.epoch
                try:
                    version = self._send(claim.epoch)
                    confirm(self._name, self._channels, claim.epoch, self._attempts)
                    self.is_own = True
                    return version
                except InitSupersededError:
                    pass  # somebody was granted a later claim: see how that goes
            # Not all at once: those who take turns in claiming would take it from one another.
            self._attempts.pause(random.uniform(0.5, 1.5) * pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _claim(self) -> pb.ClaimInitResponse:
        remaining_s = self._attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"first weights of {self._name!r}: another client claimed to set them and has not "
                "finished; check that client, or raise timeout_s",
                parameter=self._name,
                shard_index=0,
            )
        shard = self._channels[0]
        return shard.call(
            "ClaimInit",
            pb.ClaimInitRequest(
                shard=shard.identity,
                parameter=self._name,
                worker_id=self._worker_id,
                wait_timeout_ms=max(int(remaining_s * 1000), 1),
            ),
            pb.ClaimInitResponse,
            timeout_s=remaining_s + ANSWER_MARGIN_S,
            parameter=self._name,
        )

    def _send(self, epoch: int) -> int:
        """Sends the values, to shard 0 last."""
        version = 0
        size = self._values.size
        for channel in reversed(self._channels):
            where = slice_of(size, channel.shard_index, len(self._channels))
            try:
                with channel.translated(self._name):
                    version = channel.init_weights(
                        self._ended_by_failure(self._messages(channel, where, epoch)),
                        timeout=self._attempts.rest_s,
                    ).version
            finally:
                if self._failure is not None:
                    raise self._failure from None
        return version

    def _ended_by_failure(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """The same; values that can't be read end the stream, which no shard then believes."""
        try:
            yield from messages
        except ShardwellError as error:
            self._failure = error

    def _messages(self, channel: ShardChannel, where: Slice, epoch: int) -> Iterator[bytes]:
        opening = types_pb2.StreamOpen(
            shard=channel.identity, parameter=self._name, worker_id=self._worker_id
        )
        yield pb.InitWeightsRequest(
            open=opening,
            epoch=epoch,
            version=self._values.version,
            learning_rate=self._values.learning_rate,
        ).SerializeToString()
        scratch = Scratch()
        for array_index in range(self._values.array_count):
            for index in range(where.chunk_count(_RANGE_ELEMENT_COUNT)):
                part = where.chunk(index, _RANGE_ELEMENT_COUNT)
                header = pb.InitWeightsRequest(array_index=array_index)
                values = self._values.read(array_index, part)
                message = _CODEC.encode(header, header.chunk, part, index, values, scratch)
                self._traffic.add_sent(len(message), part.size)
                yield message


def confirm(name: str, channels: list[ShardChannel], epoch: int, attempts: Attempts) -> None:
    """Tells all shards but shard 0 that its first weights, of that epoch, stand.

    Safe to repeat, by any client: the one that set them may have died before it could.
    """
    if epoch == 0:
        return
    for channel in channels[1:]:
        channel.call(
            "ConfirmInit",
            pb.ConfirmInitRequest(shard=channel.identity, parameter=name, epoch=epoch),
            pb.ConfirmInitResponse,
            timeout_s=attempts.rest_s,
            parameter=name,
        )

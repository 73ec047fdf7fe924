"""Sets a parameter's first weights so that one client's values stand as a whole.

Shard 0 grants a claim; its holder sends the values to the other shards, then to shard 0, whose
success decides that they stand, then tells the others so (docs/adr/0005-steps.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy.typing as npt

from shardwell.errors import DeadlineError, InitSupersededError, ShardwellError
from shardwell.numerics.codec import CODECS
from shardwell.parameter.state_pages import bring
from shardwell.placement.slices import Slice, slice_of
from shardwell.process.spans import Traffic
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.deadlines import wait_milliseconds, with_answer
from shardwell.specs.parameter import ParameterSpec
from shardwell.threads.asking import ask_all
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.wire import checksum
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES, ChunkCodec

_RANGE_ELEMENT_COUNT = PAYLOAD_SIZE_MAX_BYTES // 4
_PAUSE_S_MAX = 0.5
# Finiteness was checked, or is not asked for.
_CODEC = ChunkCodec(CODECS["fp32"], allow_non_finite=True)


class FirstValues(Protocol):
    """The values to set, read piece by piece."""

    size: int
    array_count: int
    """1: the weights; more: the arrays of optimizer state too."""
    version: int
    learning_rate: float | None
    load_id: int
    samples: bytes
    """The account of the samples in that version, as a checkpoint has it; empty: there is none."""

    @property
    def states(self) -> Iterable[tuple[str, int, bytes]]:
        """The states of workers beside the weights: whose, before which step, the bytes."""

    def read(self, array_index: int, where: Slice) -> npt.NDArray[Any]:
        """Returns a range of an array, (where.size,) of floating point; any thread calls it."""


class GivenValues:
    """The caller's arrays, the weights first."""

    learning_rate: float | None = None
    samples = b""
    states: Iterable[tuple[str, int, bytes]] = ()

    def __init__(self, *arrays: npt.NDArray[Any], version: int = 0, load_id: int = 0) -> None:
        self.size = arrays[0].size
        self.array_count = len(arrays)
        self.version = version
        self.load_id = load_id
        self._arrays = arrays

    def read(self, array_index: int, where: Slice) -> npt.NDArray[Any]:
        """Returns a view."""
        return self._arrays[array_index][where.offset : where.stop]


@dataclass(eq=False)
class FirstWeights:
    """One client's values for one parameter."""

    spec: ParameterSpec
    values: FirstValues
    channels: list[ShardChannel]
    worker_id: str
    traffic: Traffic
    attempts: Attempts
    incarnation: int = 0
    is_own: bool = False
    """True once this client's values are the committed ones."""
    _epoch: int = 0
    _above_epoch: int = 0
    """The highest epoch that a shard has seen which refused the last claim."""
    _failure: ShardwellError | None = None

    def settle(self) -> int:
        """Blocks until this client's values or another's are committed; returns the version.

        Safe to repeat: the worker that has the last claim is granted another.
        """
        pause_s = 0.02
        while True:
            claim = self._claim()
            if claim.initialized:
                self._confirm(claim.epoch)
                self.is_own = claim.epoch != 0 and claim.epoch == self._epoch
                return claim.version
            if claim.granted:
                self._epoch = claim.epoch
                try:
                    send = partial(self._send_to, epoch=claim.epoch)
                    ask_all(self.channels[1:], send)
                    load_beside(
                        self.spec.name,
                        self.channels[0],
                        self.values.samples,
                        self.values.states,
                        self.incarnation,
                        self.attempts,
                    )
                    version = send(self.channels[0])
                    self._confirm(claim.epoch)
                    self.is_own = True
                    return version
                except InitSupersededError as error:
                    # Another worker was granted a later claim; shard 0 may have forgotten that.
                    self._above_epoch = max(self._above_epoch, error.init_epoch)
            # Not all at once: those who take turns in claiming would take it from one another.
            self.attempts.pause(random.uniform(0.5, 1.5) * pause_s)  # noqa: S311 (a pause)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _claim(self) -> pb.ClaimInitResponse:
        remaining_s = self.attempts.remaining_s
        if remaining_s <= 0:
            raise DeadlineError(
                f"first weights of {self.spec.name!r}: another client claimed to set them and has "
                "not finished; check that client, or raise timeout_s",
                parameter=self.spec.name,
                shard_index=0,
            )
        shard = self.channels[0]
        return shard.call(
            "ClaimInit",
            pb.ClaimInitRequest(
                shard=shard.identity,
                parameter=self.spec.name,
                worker_id=self.worker_id,
                wait_timeout_ms=wait_milliseconds(self.attempts.rest_s),
                above_epoch=self._above_epoch,
                incarnation=self.incarnation,
            ),
            pb.ClaimInitResponse,
            timeout_s=with_answer(self.attempts.rest_s),
            parameter=self.spec.name,
        )

    def _confirm(self, epoch: int) -> None:
        confirm(self.spec.name, self.channels, epoch, self.attempts, self.incarnation)

    def _send_to(self, channel: ShardChannel, *, epoch: int) -> int:
        count = len(self.channels)
        where = slice_of(self.values.size, channel.shard_index, count, self.spec.slice_unit)
        try:
            with channel.translated(parameter=self.spec.name):
                messages = self._messages(channel, where, epoch)
                timeout_s = self.attempts.rest_s
                if self.values.array_count == 1 and len(_ranges(where)) == 1:
                    (message,) = messages
                    return channel.call(
                        "InitWeights",
                        message,
                        pb.InitWeightsResponse,
                        timeout_s=timeout_s,
                        parameter=self.spec.name,
                    ).version
                call = channel.streaming("InitWeights").future(
                    self._ended_by_failure(messages), timeout=timeout_s
                )
                version: int = channel.result_of(call, parameter=self.spec.name).version
        finally:
            if self._failure is not None:
                raise self._failure from None
        return version

    def _ended_by_failure(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Ends the stream at values that can't be read: no shard then believes it."""
        try:
            yield from messages
        except ShardwellError as error:
            self._failure = error

    def _messages(self, channel: ShardChannel, where: Slice, epoch: int) -> Iterator[bytes]:
        opening = types_pb2.StreamOpen(
            shard=channel.identity,
            parameter=self.spec.name,
            worker_id=self.worker_id,
            session=channel.session.number,
            incarnation=self.incarnation,
        )
        header = pb.InitWeightsRequest(
            open=checksum.seal(opening),
            epoch=epoch,
            version=self.values.version,
            learning_rate=self.values.learning_rate,
            load_id=self.values.load_id,
            array_count=self.values.array_count,
        )
        context = checksum.first_weights_context(header)
        # An empty slice has one range of its own, without elements: its CRC32C covers `open`.
        array_count = self.values.array_count if where.size else 1
        for array_index in range(array_count):
            for index, part in enumerate(_ranges(where)):
                header.array_index = array_index
                values = self.values.read(array_index, part)
                start = checksum.first_weights(context, array_index)
                message = _CODEC.encode(header, header.chunk, part, index, values, start=start)
                self.traffic.add_sent(len(message), part.size)
                yield message
                header = pb.InitWeightsRequest()


def _ranges(where: Slice) -> list[Slice]:
    count = where.chunk_count(_RANGE_ELEMENT_COUNT)
    return [where.chunk(index, _RANGE_ELEMENT_COUNT) for index in range(count)] or [where]


def confirm(
    name: str, channels: list[ShardChannel], epoch: int, attempts: Attempts, incarnation: int = 0
) -> None:
    """Has all shards but shard 0 commit the first weights of the epoch that shard 0 committed.

    Safe to repeat, by any client: the one that set them may have died before it could. Epoch 0:
    nothing is to be committed; incarnation 0: any of that name.
    """
    if epoch == 0:
        return
    ask_all(
        channels[1:],
        lambda channel: channel.call(
            "ConfirmInit",
            pb.ConfirmInitRequest(
                shard=channel.identity, parameter=name, epoch=epoch, incarnation=incarnation
            ),
            pb.ConfirmInitResponse,
            timeout_s=attempts.rest_s,
            parameter=name,
        ),
    )


def load_beside(
    name: str,
    shard: ShardChannel,
    account: bytes,
    states: Iterable[tuple[str, int, bytes]],
    incarnation: int,
    attempts: Attempts,
) -> None:
    """Gives shard 0 what a checkpoint has beside the weights, before the first weights stand.

    `account` is that of samples; `states` are of workers, each with its step.
    """
    beside: dict[str, Any] = {
        "shard": shard.identity,
        "parameter": name,
        "incarnation": incarnation,
    }
    given: dict[str, Any] = {"timeout_s": attempts.rest_s, "parameter": name}
    if account:
        loading = pb.DealSamplesRequest(
            stage=pb.DealSamplesRequest.STAGE_LOAD, account=account, **beside
        )
        shard.call("DealSamples", loading, pb.DealSamplesResponse, **given)

    def keep(worker_id: str, **fields: Any) -> pb.KeepStateResponse:
        keeping = pb.KeepStateRequest(worker_id=worker_id, **beside, **fields)
        return shard.call("KeepState", keeping, pb.KeepStateResponse, **given)

    for worker_id, step, state in states:
        stage = pb.KeepStateRequest.STAGE_LOAD
        bring(partial(keep, worker_id), stage, step, state, attempts)

"""Opens a parameter on all shards of a cluster, and tells whether they agree on where it stands."""

from __future__ import annotations

from functools import partial

from shardwell.channel import ShardChannel
from shardwell.chunk_codec import PAYLOAD_SIZE_MAX_BYTES
from shardwell.codec import CODECS
from shardwell.errors import (
    CorruptChunkError,
    StepOrderError,
    UnknownParameterError,
    WrongShardError,
)
from shardwell.first_weights import confirm
from shardwell.partition import Slice, slice_of
from shardwell.retry import Attempts
from shardwell.specs import ParameterSpec
from shardwell.transfer import Part
from shardwell.v1 import parameter_server_pb2 as pb


class Opening:
    """One worker's calls about one parameter as a whole; all are safe to repeat, and repeated."""

    def __init__(self, spec: ParameterSpec, channels: list[ShardChannel], worker_id: str) -> None:
        self._spec = spec
        self._channels = channels
        self._worker_id = worker_id

    def open(self, attempts: Attempts) -> tuple[list[Part], int]:
        """Creates or joins the parameter on all shards.

        Returns:
            The parts that have elements, in the order of the shards, and the step at which this
            worker is to go on.

        Raises:
            SpecMismatchError, LimitError: a shard refuses.
            StepOrderError: the shards do not have the same past.
            CorruptChunkError: a shard cuts the parameter in another way.
        """
        # While one shard is waited for the others go on, so all are asked again.
        answers = attempts.run(lambda: [self._join(c, attempts) for c in self._channels])
        unconfirmed: StepOrderError | None = None
        if answers[0].initialized and not all(answer.initialized for answer in answers):
            # Whoever set the first weights, or restored them, did not come so far, or not yet.
            epoch = answers[0].init_epoch
            try:
                attempts.run(lambda: confirm(self._spec.name, self._channels, epoch, attempts))
            except StepOrderError as error:
                unconfirmed = error
            answers = attempts.run(lambda: [self._join(c, attempts) for c in self._channels])
        parts: list[Part] = []
        for channel, answer in zip(self._channels, answers, strict=True):
            if answer.slice_size:
                first_chunk = parts[-1].first_chunk + len(parts[-1].chunks) if parts else 0
                parts.append(self._part(channel, answer, first_chunk))
        next_steps = [answer.next_step for answer in answers if answer.slice_size]
        if self._spec.mode == "sync" and max(next_steps) - min(next_steps) > 1:
            raise StepOrderError(
                f"shards disagree on where parameter {self._spec.name!r} stands: this worker's "
                f"next step is {min(next_steps)} on one and {max(next_steps)} on another; a shard "
                "lost its memory; start the training again under another name",
                parameter=self._spec.name,
            )
        if unconfirmed is not None:
            raise unconfirmed
        return parts, min(next_steps)

    def take_seat(self, attempts: Attempts) -> None:
        """Takes this worker's place among worker_count, shard by shard: shard 0 decides.

        Raises:
            SeatsTakenError, NotInitializedError: see the errors.
        """
        for channel in self._channels:
            attempts.run(partial(self._join, channel, attempts, take_seat=True))

    def first_step_ahead(self, next_step: int, attempts: Attempts) -> int:
        """The first step from now on that no chunk of any shard has passed.

        That is this worker's next step, or, when that was interrupted and some chunks closed it,
        the one after it. A worker that takes part is never further behind.
        """
        newest = 0
        for channel in self._channels:
            status = attempts.run(partial(self._status, channel, attempts))
            if status.shard != channel.identity:
                raise WrongShardError(
                    f"{channel.address} is shard {status.shard.shard_index} of cluster "
                    f"{status.shard.cluster_id!r} now; it was shard {channel.shard_index} of "
                    f"{channel.identity.cluster_id!r}; connect again",
                    shard_index=channel.shard_index,
                )
            here = status.parameters
            if not here:
                raise UnknownParameterError(
                    f"shard {channel.shard_index} has no parameter {self._spec.name!r} any more; "
                    "it lost its memory",
                    shard_index=channel.shard_index,
                    parameter=self._spec.name,
                )
            newest = max(newest, here[0].version_max)
        if newest > next_step + 1:
            raise StepOrderError(
                f"learning rate of {self._spec.name!r} from step {next_step}, this worker's next: "
                f"chunks have reached step {newest}; pass now=True, or open the parameter again",
                parameter=self._spec.name,
            )
        return max(newest, next_step)

    def _status(self, channel: ShardChannel, attempts: Attempts) -> pb.GetStatusResponse:
        return channel.call(
            "GetStatus",
            pb.GetStatusRequest(parameter=self._spec.name),
            pb.GetStatusResponse,
            timeout_s=attempts.rest_s,
        )

    def _part(
        self, channel: ShardChannel, answer: pb.CreateParameterResponse, first_chunk: int
    ) -> Part:
        where = Slice(answer.slice_offset, answer.slice_size)
        bytes_ = answer.chunk_element_count * CODECS[self._spec.codec_name].item_size
        expected = slice_of(self._spec.size, channel.shard_index, len(self._channels))
        if where != expected or not 64 <= bytes_ <= PAYLOAD_SIZE_MAX_BYTES:
            raise CorruptChunkError(
                f"shard {channel.shard_index} answers {where} in chunks of "
                f"{answer.chunk_element_count} elements for {self._spec.name!r}; expected "
                f"{expected}; run the same version everywhere",
                shard_index=channel.shard_index,
                parameter=self._spec.name,
            )
        return Part(channel, where, answer.chunk_element_count, first_chunk)

    def _join(
        self, channel: ShardChannel, attempts: Attempts, *, take_seat: bool = False
    ) -> pb.CreateParameterResponse:
        """Creates or joins the parameter on one shard."""
        return channel.call(
            "CreateParameter",
            pb.CreateParameterRequest(
                shard=channel.identity,
                worker_id=self._worker_id,
                spec=self._spec.to_proto(),
                take_seat=take_seat,
            ),
            pb.CreateParameterResponse,
            timeout_s=attempts.rest_s,
            parameter=self._spec.name,
        )

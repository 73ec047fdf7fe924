"""Opens a parameter on all shards of a cluster, and tells whether they agree on where it stands."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

from shardwell.errors import (
    CorruptChunkError,
    StepOrderError,
    UnknownParameterError,
)
from shardwell.numerics.codec import CODECS
from shardwell.parameter.exchange import ShardSlice
from shardwell.parameter.first_weights import confirm
from shardwell.placement.slices import Slice, slice_of
from shardwell.rpc.asking import ask_all
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters
from shardwell.rpc.take_over import check_next_step, claim_seat, common_tenure
from shardwell.specs.names import check_name
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES


def find_spec(name: str, channels: list[ShardChannel], attempts: Attempts) -> ParameterSpec | None:
    """The spec of a parameter that a shard holds; None if none does.

    Raises:
        ArgumentError: no parameter can have that name, or its spec can't be read.
        WrongShardError: another shard answers at an address.
    """
    check_name("parameter name", name)
    for channel in channels:
        for found in _status(channel, name, attempts).parameters:
            return ParameterSpec.from_proto(found.spec)
    return None


def _status(channel: ShardChannel, name: str, attempts: Attempts) -> pb.GetStatusResponse:
    return attempts.run(lambda: ask_parameters(channel, attempts.rest_s, name))


class ParameterOpening:
    """One worker's calls about one parameter as a whole; all are safe to repeat, and repeated."""

    def __init__(self, spec: ParameterSpec, channels: list[ShardChannel], worker_id: str) -> None:
        self._spec = spec
        self._channels = channels
        self._worker_id = worker_id
        self.tenure = 0
        """Of this worker's seats, which its gradients name; 0: none, or they are for good."""
        self.incarnation = 0
        """Of the parameter that was opened; see CreateParameterResponse."""
        self._opened_in = 0
        self.has_seat = False
        """Whether this worker had a seat when it opened: an earlier process of it contributed."""

    def open(self, attempts: Attempts, *, is_known: bool = False) -> tuple[list[ShardSlice], int]:
        """Creates or joins the parameter on all shards.

        Args:
            attempts: Those of the call.
            is_known: Whether it is to be the one that was opened before, and none is created.

        Returns:
            The parts that have elements, in the order of the shards, and the step at which this
            worker is to go on.

        Raises:
            SpecMismatchError, LimitError: a shard refuses.
            StepOrderError: the shards do not have the same past.
            UnknownParameterError: with `is_known`: it was deleted.
            CorruptChunkError: a shard cuts the parameter in another way.
        """
        # While one shard is waited for the others go on, so all are asked again.
        join = partial(
            join_all,
            self._spec,
            self._channels,
            attempts,
            worker_id=self._worker_id,
            incarnation=self.incarnation if is_known else 0,
        )
        answers = attempts.run(join)
        unconfirmed: StepOrderError | None = None
        if answers[0].initialized and not all(answer.initialized for answer in answers):
            # Whoever set the first weights, or restored them, did not come so far, or not yet.
            confirmed = partial(
                confirm,
                self._spec.name,
                self._channels,
                answers[0].init_epoch,
                attempts,
                answers[0].incarnation,
            )
            try:
                attempts.run(confirmed)
            except StepOrderError as error:
                unconfirmed = error
            answers = attempts.run(join)
        parts: list[ShardSlice] = []
        for channel, answer in zip(self._channels, answers, strict=True):
            first_chunk = parts[-1].first_chunk + len(parts[-1].chunks) if parts else 0
            part = self._part(channel, answer, first_chunk)
            if part.where.size:
                parts.append(part)
        next_steps = [answer.next_step for answer in answers if answer.slice_size]
        if self._spec.mode == "sync" and max(next_steps) - min(next_steps) > 1:
            # Training may go on between two answers: who seems to be behind is asked once more.
            newest = max(next_steps)
            answers = attempts.run(join)
            next_steps = [min(a.next_step, newest) for a in answers if a.slice_size]
        if self._spec.mode == "sync" and max(next_steps) - min(next_steps) > 1:
            raise StepOrderError(
                f"shards disagree on where parameter {self._spec.name!r} stands: this worker's "
                f"next step is {min(next_steps)} on one and {max(next_steps)} on another; a shard "
                "lost its memory; start the training again under another name",
                parameter=self._spec.name,
            )
        if unconfirmed is not None:
            raise unconfirmed
        self.has_seat = any(answer.has_seat for answer in answers)
        self.incarnation = answers[0].incarnation
        tenures = {answer.tenure for answer in answers}
        self.tenure = self._opened_in = common_tenure(tenures)
        return parts, min(next_steps) if len(tenures) == 1 else 0

    def take_seat(self, opened_at: int, attempts: Attempts) -> None:
        """Takes this worker's seat among worker_count: shard 0 decides, the others follow.

        Args:
            opened_at: The step at which the worker was to go on when it opened the parameter.
            attempts: Those of the call.

        Raises:
            SeatsTakenError, NotInitializedError, WorkerIdInUseError: see the errors.
            StepOrderError: an earlier process of this worker went on since, or its seat was given
                to another one.
            UnknownParameterError: the parameter that was opened was deleted.
        """
        tenure = secrets.randbits(63) + 1
        take = partial(
            join_all,
            self._spec,
            self._channels,
            attempts,
            worker_id=self._worker_id,
            take_seat=True,
            tenure=tenure,
            incarnation=self.incarnation,
        )
        answers = claim_seat(attempts, take)
        if len({answer.tenure for answer in answers}) > 1:  # some were given away, and others not
            answers = claim_seat(attempts, partial(take, begins_anew=True))
        self.tenure = common_tenure(answer.tenure for answer in answers)
        name = self._spec.name
        check_next_step(
            f"parameter {name!r}",
            min(answer.next_step for answer in answers if answer.slice_size),
            opened_at,
            took_over=any(answer.took_over for answer in answers),
            lost_seat=self._opened_in not in (0, self.tenure),
            parameter=name,
        )

    def first_step_ahead(self, next_step: int, attempts: Attempts) -> int:
        """The first step from now on that no chunk of any shard has passed.

        That is this worker's next step, or, when that was interrupted and some chunks closed it,
        the one after it. A worker that takes part is never further behind.

        Raises:
            StepOrderError: a chunk is further on, or shard 0 lost its memory and has another one.
            UnknownParameterError: the parameter that was opened was deleted, or a shard lost it.
        """
        name, own = self._spec.name, attempts.beside
        held = ask_all(self._channels, lambda channel: _status(channel, name, own()).parameters)
        lacking = next((index for index, here in enumerate(held) if not here), None)
        newest = max((here[0].version_max for here in held if here), default=0)
        if lacking is not None or newest > next_step + 1:
            # Status is that of whatever has the name: joining says what became of what was opened.
            join = partial(
                join_all,
                self._spec,
                self._channels,
                attempts,
                worker_id=self._worker_id,
                incarnation=self.incarnation,
            )
            try:
                attempts.run(join)
            except StepOrderError:
                if lacking is None:
                    raise
        if lacking is not None:
            raise UnknownParameterError(
                f"shard {lacking} has no parameter {name!r} any more; it lost its memory",
                shard_index=lacking,
                parameter=name,
            )
        if newest > next_step + 1:
            raise StepOrderError(
                f"learning rate of {name!r} from step {next_step}, this worker's next: "
                f"chunks have reached step {newest}; pass now=True, or open the parameter again",
                parameter=name,
            )
        return max(newest, next_step)

    def set_learning_rate(
        self, learning_rate: float, from_step: int | None, attempts: Attempts
    ) -> None:
        """Changes the rate on all shards; `from_step` None: at once."""

        def tell(channel: ShardChannel) -> pb.SetLearningRateResponse:
            return channel.call(
                "SetLearningRate",
                pb.SetLearningRateRequest(
                    shard=channel.identity,
                    parameter=self._spec.name,
                    learning_rate=learning_rate,
                    from_step=from_step,
                    incarnation=self.incarnation,
                ),
                pb.SetLearningRateResponse,
                timeout_s=attempts.rest_s,
                parameter=self._spec.name,
            )

        for channel in self._channels:
            attempts.run(partial(tell, channel))

    def _part(
        self, channel: ShardChannel, answer: pb.CreateParameterResponse, first_chunk: int
    ) -> ShardSlice:
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
        return ShardSlice(channel, where, answer.chunk_element_count, first_chunk)


def join_all(
    spec: ParameterSpec,
    channels: Sequence[ShardChannel],
    attempts: Attempts,
    *,
    worker_id: str = "",
    take_seat: bool = False,
    tenure: int = 0,
    begins_anew: bool = False,
    incarnation: int = 0,
) -> list[pb.CreateParameterResponse]:
    """Creates or joins a parameter on shard 0, then on all others at once.

    Shard 0 says which parameter of its name it has, and whether it has begun: a shard that has
    another, or none, lost its memory.

    Args:
        spec: The parameter's.
        channels: All shards, in order.
        attempts: Bounds the calls.
        worker_id: Who joins; "": somebody who will not contribute.
        take_seat: Whether the worker takes its seat.
        tenure: See CreateParameterRequest.
        begins_anew: The same.
        incarnation: Of the parameter that is meant, which must exist; 0: whatever has the name.

    Raises:
        StepOrderError: a shard lost its memory.
        UnknownParameterError: the one that is meant was deleted.
        ShardwellError: a shard refuses.
    """

    def join(
        channel: ShardChannel, *, incarnation: int = 0, must_exist: bool = False
    ) -> pb.CreateParameterResponse:
        channel.has_seats |= take_seat
        return channel.call(
            "CreateParameter",
            pb.CreateParameterRequest(
                shard=channel.identity,
                worker_id=worker_id,
                spec=spec.to_proto(),
                take_seat=take_seat,
                incarnation=incarnation,
                must_exist=must_exist,
                session=channel.session.number,
                tenure=tenure,
                begins_anew=begins_anew,
            ),
            pb.CreateParameterResponse,
            timeout_s=attempts.rest_s,
            parameter=spec.name,
        )

    first = join(channels[0], incarnation=incarnation, must_exist=incarnation > 0 and not take_seat)
    others = partial(join, incarnation=first.incarnation, must_exist=first.begun)
    return [first, *ask_all(channels[1:], others)]

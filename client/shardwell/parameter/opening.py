"""One worker's calls about a parameter as a whole: opening, seats, learning rates, contributors.

All are safe to repeat, and repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from shardwell.errors import (
    ArgumentError,
    OtherIncarnationError,
    StepOrderError,
    UnknownParameterError,
)
from shardwell.numerics.codec import CODECS
from shardwell.parameter.exchange import ShardSlice
from shardwell.parameter.first_weights import confirm
from shardwell.placement.slices import Slice, slice_of
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters
from shardwell.rpc.take_over import common_tenure
from shardwell.specs.names import check_name
from shardwell.specs.parameter import ParameterSpec
from shardwell.steps.opening import KindCalls, Opening
from shardwell.threads.asking import ask_all
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire.chunks import PAYLOAD_SIZE_MAX_BYTES


def find_spec(name: str, channels: list[ShardChannel], attempts: Attempts) -> ParameterSpec | None:
    """Returns the spec of a parameter that a shard holds; None if none does."""
    check_name("parameter name", name)
    for channel in channels:
        for found in _status(channel, name, attempts).parameters:
            return ParameterSpec.from_proto(found.spec)
    return None


def _status(channel: ShardChannel, name: str, attempts: Attempts) -> pb.GetStatusResponse:
    return attempts.run(lambda: ask_parameters(channel, attempts.rest_s, name))


class ParameterOpening(Opening[ParameterSpec, pb.CreateParameterResponse]):
    """The calls of one worker about one parameter as a whole."""

    calls = KindCalls(
        "parameter",
        ("CreateParameter", pb.CreateParameterRequest, pb.CreateParameterResponse),
        ("SetLearningRate", pb.SetLearningRateRequest, pb.SetLearningRateResponse),
    )
    oldest_version = 0
    """The fewest updates that a chunk had seen when this worker joined as an elastic member."""

    def open(self, attempts: Attempts, *, is_known: bool = False) -> tuple[list[ShardSlice], int]:
        """Creates or joins it; returns its parts with elements, and this worker's next step."""
        # While one shard is waited for the others go on, so all are asked again.
        known = self.incarnation if is_known else 0
        join = partial(self.join_all, attempts, incarnation=known)
        answers = attempts.run(join)
        unconfirmed: OtherIncarnationError | None = None
        if answers[0].initialized and not all(answer.initialized for answer in answers):
            # The worker that set the first weights, or restored them, did not come so far, or not
            # yet.
            name, epoch, incarnation = self.spec.name, answers[0].init_epoch, answers[0].incarnation
            try:
                attempts.run(lambda: confirm(name, self._channels, epoch, attempts, incarnation))
            except OtherIncarnationError as error:
                unconfirmed = error
            answers = attempts.run(join)
        parts: list[ShardSlice] = []
        for channel, answer in zip(self._channels, answers, strict=True):
            first_chunk = parts[-1].first_chunk + len(parts[-1].chunks) if parts else 0
            part = self._part(channel, answer, first_chunk)
            if part.where.size:
                parts.append(part)
        next_steps = [answer.next_step for answer in answers if answer.slice_size]
        is_strict = self.spec.mode == "sync" and not self.spec.has_open_sets
        if is_strict and max(next_steps) - min(next_steps) > 1:
            # Training may go on between two answers: who seems to be behind is asked once more.
            newest = max(next_steps)
            answers = attempts.run(join)
            next_steps = [min(a.next_step, newest) for a in answers if a.slice_size]
            if max(next_steps) - min(next_steps) > 1:
                raise OtherIncarnationError(
                    f"shards disagree on the step of parameter {self.spec.name!r}: this worker's "
                    f"next step is {min(next_steps)} on one and {max(next_steps)} on another; a "
                    "shard lost its memory; start the training again under another name",
                    **self.of,
                )
        if unconfirmed is not None:
            raise unconfirmed
        self.has_seat = any(answer.has_seat for answer in answers)
        self.incarnation = answers[0].incarnation
        tenures = {answer.tenure for answer in answers}
        self._opened_in = common_tenure(tenures)
        if self.spec.members is not None:
            return parts, min(next_steps)
        return parts, min(next_steps) if len(tenures) == 1 else 0

    def take_seat(self, opened_at: int, attempts: Attempts) -> None:
        """Takes this worker's seat; its next step was `opened_at` when it opened the parameter."""
        answers = self._seated(attempts)
        next_step = min(answer.next_step for answer in answers if answer.slice_size)
        self.tenure = self._check_seat(answers, next_step, opened_at)

    @override
    def _first_spec(self) -> ParameterSpec:
        return dataclasses.replace(self.spec, cuts_blocks=False)

    @override
    def _learn(self, first: pb.CreateParameterResponse) -> None:
        if first.cuts_blocks != self.spec.cuts_blocks:
            self.spec = dataclasses.replace(self.spec, cuts_blocks=first.cuts_blocks)

    @override
    def _join_members(
        self, attempts: Attempts, tenure: int, from_step: int | None
    ) -> list[pb.CreateParameterResponse]:
        answers = super()._join_members(attempts, tenure, from_step)
        self.oldest_version = min(each.version for each in answers if each.slice_size)
        return answers

    @staticmethod
    @override
    def _newest(answer: pb.CreateParameterResponse) -> int:
        return answer.version_max

    @override
    def first_step_ahead(self, next_step: int, attempts: Attempts) -> int:
        name, own = self.spec.name, attempts.beside
        held = ask_all(self._channels, lambda channel: _status(channel, name, own()).parameters)
        lacking = next((index for index, here in enumerate(held) if not here), None)
        newest = max((here[0].version_max for here in held if here), default=0)
        if lacking is not None or newest > next_step + 1:
            # Status is that of whatever has the name: joining says what became of what was opened.
            join = partial(self.join_all, attempts, incarnation=self.incarnation)
            try:
                attempts.run(join)
            except OtherIncarnationError:
                if lacking is None:
                    raise
        if lacking is not None:
            raise UnknownParameterError(
                f"shard {lacking} has no parameter {name!r} any more; it lost its memory",
                shard_index=lacking,
                **self.of,
            )
        if newest > next_step + 1:
            raise StepOrderError(
                f"learning rate of {name!r} from step {next_step}, this worker's next: "
                f"chunks have reached step {newest}; pass now=True, or open the parameter again",
                **self.of,
            )
        return max(newest, next_step)

    def check_first_weights(self, load_id: int, attempts: Attempts) -> None:
        """Refuses first weights of another `restore`."""
        ask = partial(_status, name=self.spec.name)
        found = ask_all(self._channels, lambda channel: ask(channel, attempts=attempts.beside()))
        if any(each.load_id != load_id for status in found for each in status.parameters):
            raise ArgumentError(
                f"{self.what} has first weights already, which are others than these; delete it "
                "before, or give these another name",
                **self.of,
            )

    def contributions(
        self, parts: Sequence[ShardSlice], step: int, attempts: Attempts
    ) -> list[tuple[Slice, tuple[str, ...]]]:
        """Returns the ranges that have closed a step, in order, each with its workers."""
        ask = partial(self._contributions, step=step)
        found: list[tuple[Slice, tuple[str, ...]]] = []
        of_parts = ask_all(parts, lambda part: ask(part, attempts=attempts.beside()))
        for where, workers in itertools.chain(*of_parts):
            last = found[-1] if found else (Slice(0, 0), ())
            if last[0].stop == where.offset and last[1] == workers:
                found[-1] = Slice(last[0].offset, last[0].size + where.size), workers
            else:
                found.append((where, workers))
        if not found:
            raise StepOrderError(
                f"no shard knows who contributed to step {step} of {self.what}: it is open, or not "
                "among the last 16 that closed; the shards' --contribution-log keeps all steps",
                **self.of,
            )
        return found

    def _contributions(
        self, part: ShardSlice, step: int, attempts: Attempts
    ) -> list[tuple[Slice, tuple[str, ...]]]:
        channel = part.channel
        request = pb.GetContributionsRequest(
            shard=channel.identity, step=step, incarnation=self.incarnation, **self.of
        )

        def ask() -> pb.GetContributionsResponse:
            request.shard.CopyFrom(channel.identity)
            answer = channel.call(
                "GetContributions",
                request,
                pb.GetContributionsResponse,
                timeout_s=attempts.rest_s,
                **self.of,
            )
            first, stop = request.first_chunk_index, len(part.chunks)
            indexes = [index for each in answer.sets for index in each.chunk_indexes]
            following = answer.next_chunk_index if answer.HasField("next_chunk_index") else stop
            if len(set(indexes)) < len(indexes) or not all(
                first <= index < following for index in indexes
            ):
                following = 0
            if not first <= following <= stop or (following < stop and not indexes):
                raise self.damaged(
                    channel,
                    f"names chunks of {self.what} that it does not have: expected indexes from "
                    f"{first} to {stop - 1}, each once; run the same version everywhere",
                )
            return answer

        workers: dict[int, tuple[str, ...]] = {}
        while True:
            answer = attempts.run(ask)
            for each in answer.sets:
                workers.update(dict.fromkeys(each.chunk_indexes, tuple(each.worker_ids)))
            if not answer.HasField("next_chunk_index"):
                return [(part.chunks[index], workers[index]) for index in sorted(workers)]
            request.first_chunk_index = answer.next_chunk_index

    def _part(
        self, channel: ShardChannel, answer: pb.CreateParameterResponse, first_chunk: int
    ) -> ShardSlice:
        if answer.cuts_blocks != self.spec.cuts_blocks:
            raise OtherIncarnationError(
                f"shard {channel.shard_index} has {self.spec.name!r} as an earlier version cut it, "
                "and shard 0 does not: it lost its memory; delete the parameter (Client.delete, or "
                "shardwell delete), then open it again",
                shard_index=channel.shard_index,
                **self.of,
            )
        where = Slice(answer.slice_offset, answer.slice_size)
        bytes_ = CODECS[self.spec.codec_name].item_size * answer.chunk_element_count
        expected = slice_of(
            self.spec.size, channel.shard_index, len(self._channels), self.spec.slice_unit
        )
        is_cut = answer.chunk_element_count % self.spec.slice_unit
        if where != expected or is_cut or not 0 < bytes_ <= PAYLOAD_SIZE_MAX_BYTES:
            raise self.damaged(
                channel,
                f"answers {where} in chunks of {answer.chunk_element_count} elements for "
                f"{self.spec.name!r}; expected {expected}; run the same version everywhere",
            )
        return ShardSlice(channel, where, answer.chunk_element_count, first_chunk)

"""One parameter's streams to all shards that own some of it: one attempt of each verb.

Every attempt ends with its calls ended, but for the lanes of an exchange that succeeded, which are
kept for the next. Whether another attempt is made, and from which chunk on, is for the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from shardwell.channel import ANSWER_MARGIN_S
from shardwell.codec import Float32
from shardwell.errors import ClosedError, CorruptChunkError
from shardwell.lane import Lane
from shardwell.siblings import Siblings
from shardwell.specs import ParameterSpec
from shardwell.transfer import Gradient, Part, Progress, Transfer
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.values import milliseconds
from shardwell.watchdog import Watchdog


class Streams:
    """Any thread may fetch weights; the rest is for one thread at a time."""

    def __init__(
        self,
        spec: ParameterSpec,
        parts: list[Part],
        transfer: Transfer,
        *,
        worker_id: str,
        watchdog: Watchdog,
    ) -> None:
        self.parts = parts
        """Where the elements are, in the order of the shards."""
        self._spec = spec
        self._transfer = transfer
        self._worker_id = worker_id
        self._watchdog = watchdog
        self._lanes: list[Lane] = []
        self._siblings = Siblings()
        self._closed = False

    def get_weights(self, weights: Float32, min_version: int, wait_s: float) -> int:
        """Fills `weights`; returns the fewest updates that a chunk of them has seen."""
        siblings = Siblings()
        try:
            calls = [
                siblings.add(
                    part.channel,
                    part.channel.get_weights(
                        pb.GetWeightsRequest(
                            shard=part.channel.identity,
                            parameter=self._spec.name,
                            worker_id=self._worker_id,
                            min_version=min_version,
                            wait_timeout_ms=milliseconds(wait_s),
                        ),
                        timeout=wait_s + ANSWER_MARGIN_S,
                    ),
                )
                for part in self.parts
            ]
            return self._transfer.receive(
                self.parts,
                weights,
                lambda number: next(calls[number], b""),
                min_version,
                siblings,
                Progress(),
            )
        finally:
            siblings.cancel()

    def put_gradient(self, work: Gradient, wait_s: float, progress: Progress) -> None:
        """Sends a gradient to all shards that have not told yet that they counted all of it."""
        failures: list[BaseException] = []
        siblings = Siblings()
        parts = [
            part for part in self.parts if part.channel.shard_index not in progress.counted_shards
        ]
        try:
            calls = [
                siblings.add(
                    part.channel,
                    part.channel.put_gradient.future(
                        _guarded(
                            self._transfer.messages(
                                pb.PutGradientRequest, part, work, milliseconds(wait_s), opens=True
                            ),
                            failures,
                        ),
                        timeout=wait_s + ANSWER_MARGIN_S,
                    ),
                )
                for part in parts
            ]
            for part, call in zip(parts, calls, strict=True):
                try:
                    answer = call.result()
                except (grpc.RpcError, grpc.FutureCancelledError):
                    channel, error = siblings.failure(part.channel, call)
                    raise channel.translate(error, self._spec.name) from None
                if failures:
                    raise failures[0]
                counted = answer.counted_chunk_count + answer.duplicate_chunk_count
                if counted != len(part.chunks):
                    raise CorruptChunkError(
                        f"shard {part.channel.shard_index} counted {counted} of "
                        f"{len(part.chunks)} chunks of {self._spec.name!r}; call again",
                        shard_index=part.channel.shard_index,
                        parameter=self._spec.name,
                    )
                progress.counted_shards.add(part.channel.shard_index)
        finally:
            siblings.cancel()

    def exchange(self, work: Gradient, weights: Float32, wait_s: float, progress: Progress) -> int:
        """Sends a gradient and fills `weights` with what comes of it, from `progress` on.

        Returns the fewest updates that a chunk has seen. On failure all lanes are closed, so that
        no late answer can be mistaken for another's.
        """
        min_version = work.step + 1 if self._spec.mode == "sync" else 0
        first = self._transfer.first_row(self.parts, progress)
        wait_ms = milliseconds(wait_s)
        opens = not self._lanes or not all(lane.is_open for lane in self._lanes)
        if opens:
            self._close_lanes()
            self._siblings = Siblings()
        lanes = self._lanes

        def give_up() -> None:
            for lane in list(lanes):
                lane.close()

        with self._watchdog.watch(wait_s + ANSWER_MARGIN_S, give_up) as watch:
            try:
                for number, part in enumerate(self.parts):
                    if opens:
                        lanes.append(Lane(part.channel, part.channel.exchange, self._siblings))
                    if self._closed:  # looked at after the lane could be seen by `close`
                        raise ClosedError(
                            f"parameter {self._spec.name!r} was closed; connect again",
                            parameter=self._spec.name,
                        )
                    lanes[number].submit(
                        self._transfer.messages(
                            pb.ExchangeRequest, part, work, wait_ms, opens=opens, first=first
                        )
                    )
                return self._transfer.receive(
                    self.parts,
                    weights,
                    lambda number: lanes[number].read(),
                    min_version,
                    self._siblings,
                    progress,
                    watch,
                )
            except BaseException:
                self._close_lanes()
                give_up()
                for lane in lanes:
                    if lane.failure is not None:
                        raise lane.failure from None
                raise

    def close(self) -> None:
        """Ends all lanes, and lets no exchange begin. From any thread; safe to repeat."""
        self._closed = True
        self._close_lanes()

    def _close_lanes(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in list(lanes):
            lane.close()


def _guarded(messages: Iterator[bytes], failures: list[BaseException]) -> Iterator[bytes]:
    """Ends a stream early when a message can't be made, and keeps the reason for the caller."""
    try:
        yield from messages
    except Exception as error:
        failures.append(error)

"""One parameter's streams to all shards that own some of it: one attempt of each verb.

Every attempt ends with its calls ended, except the streams of an exchange that succeeded, which are
kept for the next. Whether another attempt is made, and from which chunk on, is for the caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from shardwell.errors import CorruptChunkError
from shardwell.numerics.arguments import wait_milliseconds
from shardwell.numerics.codec import Float32
from shardwell.parameter.transfer import Gradient, Progress, ShardSlice, Transfer
from shardwell.rpc.call_group import CallGroup
from shardwell.rpc.retry import Attempts
from shardwell.rpc.stream_pool import StreamPool
from shardwell.specs.parameter import ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb


class Streams:
    """Any thread may fetch weights; the rest is for one thread at a time.

    Args:
        spec: The parameter.
        parts: Where its elements are, in the order of the shards.
        transfer: Of its chunks.
        pool: Lanes of its exchanges.
        worker_id: Whose calls they are.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        parts: list[ShardSlice],
        transfer: Transfer,
        pool: StreamPool,
        *,
        worker_id: str,
    ) -> None:
        self.parts = parts
        """Where the elements are, in the order of the shards."""
        self._spec = spec
        self._transfer = transfer
        self._pool = pool
        self._worker_id = worker_id

    def get_weights(self, weights: Float32, min_version: int, attempts: Attempts) -> int:
        """Fills `weights`; returns the fewest updates that a chunk of them has seen."""
        with CallGroup() as call_group:
            calls = [
                call_group.add(
                    part.channel,
                    part.channel.get_weights(
                        pb.GetWeightsRequest(
                            shard=part.channel.identity,
                            parameter=self._spec.name,
                            worker_id=self._worker_id,
                            min_version=min_version,
                            wait_timeout_ms=wait_milliseconds(attempts.rest_s),
                        ),
                        timeout=attempts.rest_s,
                    ),
                )
                for part in self.parts
            ]
            return self._transfer.receive(
                self.parts,
                weights,
                lambda number: next(calls[number], b""),
                min_version,
                call_group,
                Progress(),
            )

    def put_gradient(self, work: Gradient, progress: Progress, attempts: Attempts) -> None:
        """Sends a gradient to all shards that have not told yet that they counted all of it."""
        failures: list[BaseException] = []
        wait_ms = wait_milliseconds(attempts.rest_s)
        parts = [
            part for part in self.parts if part.channel.shard_index not in progress.counted_shards
        ]
        with CallGroup() as call_group:
            calls = [
                call_group.add(
                    part.channel,
                    part.channel.put_gradient.future(
                        _guarded(
                            self._transfer.messages(
                                pb.PutGradientRequest, part, work, wait_ms, opens=True
                            ),
                            failures,
                        ),
                        timeout=attempts.rest_s,
                    ),
                )
                for part in parts
            ]
            for part, call in zip(parts, calls, strict=True):
                try:
                    answer = part.channel.received(call.result(), self._spec.name)
                except (grpc.RpcError, grpc.FutureCancelledError):
                    channel, error = call_group.failure(part.channel, call)
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

    def exchange(
        self, work: Gradient, weights: Float32, progress: Progress, attempts: Attempts
    ) -> int:
        """Sends a gradient and fills `weights` with what comes of it, from `progress` on.

        Returns the fewest updates that a chunk has seen.
        """
        min_version = work.step + 1 if self._spec.mode == "sync" else 0
        first = self._transfer.first_row(self.parts, progress)
        wait_ms = wait_milliseconds(attempts.rest_s)
        with self._pool.borrowed(attempts.rest_s) as streams:
            opened = []
            for part in self.parts:
                stream, opens = streams.stream(
                    part.channel, (self._spec.name, self._transfer.tenure)
                )
                opened.append(stream)
                stream.submit(
                    self._transfer.messages(
                        pb.ExchangeRequest, part, work, wait_ms, opens=opens, first=first
                    )
                )
            return self._transfer.receive(
                self.parts,
                weights,
                lambda number: opened[number].read(),
                min_version,
                streams.call_group,
                progress,
                is_exchange=True,
            )


def _guarded(messages: Iterator[bytes], failures: list[BaseException]) -> Iterator[bytes]:
    """Ends a stream early when a message can't be made, and keeps the reason for the caller."""
    try:
        yield from messages
    except Exception as error:
        failures.append(error)

"""One worker's calls about a table as a whole: opening, seats, learning rates, eviction, scans.

All are safe to repeat, and repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from shardwell.errors import (
    ArgumentError,
    OtherIncarnationError,
    StepOrderError,
    UnknownTableError,
)
from shardwell.placement.rows import Ids
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import TableStatus, ask_tables
from shardwell.rpc.take_over import common_tenure
from shardwell.specs.deadlines import wait_milliseconds, with_answer
from shardwell.specs.names import check_name
from shardwell.specs.table import TableSpec
from shardwell.steps.opening import KindCalls, Opening
from shardwell.threads.asking import ask_all
from shardwell.threads.calls import cancelled_by
from shardwell.v1 import table_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire import messages as framing
from shardwell.wire.rows import RowCodec, rows_per_message_max


class Joined(NamedTuple):
    """The shards' answer to a worker that joins: where it goes on."""

    next_step: int
    """The first step that it has not ended on every shard."""
    is_begun: bool
    """True if some shard has counted some of that step."""
    version: int
    row_count_max: int
    incarnation: int
    tenure: int
    """Tenure of the worker's seats; 0: it has none, or they are for good."""
    has_seat: bool


def find_table_spec(
    name: str, channels: list[ShardChannel], attempts: Attempts
) -> TableSpec | None:
    """Returns the spec of a table that a shard holds; None if none does."""
    check_name("table name", name)
    for channel in channels:
        with contextlib.suppress(UnknownTableError):
            for found in _held(channel, name, attempts):
                return TableSpec.from_proto(found.spec)
    return None


def _held(
    channel: ShardChannel, name: str, attempts: Attempts, incarnation: int = 0
) -> Sequence[pb.TableStatus]:
    return attempts.run(lambda: ask_tables(channel, attempts.rest_s, name, incarnation))


class TableOpening(Opening[TableSpec, pb.OpenTableResponse]):
    """The calls of one worker about one table as a whole. Any thread may use it."""

    calls = KindCalls(
        "table",
        ("OpenTable", pb.OpenTableRequest, pb.OpenTableResponse),
        ("SetTableLearningRate", pb.SetTableLearningRateRequest, pb.SetTableLearningRateResponse),
    )

    def open(self, attempts: Attempts) -> Joined:
        """Creates or joins the table on all shards, which must have one past."""
        joined = self._joined(
            attempts.run(partial(self.join_all, attempts)), attempts, takes_seat=False
        )
        self._opened_in, self.has_seat = joined.tenure, joined.has_seat
        return joined

    def take_seat(self, opened_at: int, attempts: Attempts) -> Joined:
        """Takes this worker's seat; its next step was `opened_at` when it opened the table."""
        answers = self._seated(attempts)
        joined = self._joined(answers, attempts, takes_seat=True)
        self._check_seat(answers, joined.next_step, opened_at)
        return joined

    def _joined(
        self, answers: list[pb.OpenTableResponse], attempts: Attempts, *, takes_seat: bool
    ) -> Joined:
        incarnation = answers[0].incarnation
        is_known = len({answer.tenure for answer in answers}) == 1
        most = rows_per_message_max(self.spec)
        for channel, answer in zip(self._channels, answers, strict=True):
            if not 1 <= answer.rows_per_message_max <= most:
                raise self.damaged(
                    channel,
                    f"has messages of up to {answer.rows_per_message_max} rows for {self.what}; "
                    f"expected 1 to {most}; run the same version everywhere",
                )
        is_known |= self.spec.has_open_sets
        steps = [answer.next_step if is_known else 0 for answer in answers]
        # A synchronous table may go on between two answers, until this worker has its seats.
        if self.spec.has_open_sets:
            pass  # a shard may be steps ahead of another that awaits other workers
        elif takes_seat or self.spec.mode == "async":
            self._check_same_past("this worker's next step is", steps, attempts, incarnation)
        else:
            versions = [answer.version for answer in answers]
            self._check_versions(versions, attempts, incarnation)
        return Joined(
            next_step=min(steps),
            # What an elastic member has begun is at its end with its tenure.
            is_begun=not self.spec.has_open_sets
            and (
                max(steps) > min(steps)
                or (is_known and any(answer.counted_part_count for answer in answers))
            ),
            version=min(answer.version for answer in answers),
            row_count_max=min(answer.rows_per_message_max for answer in answers),
            incarnation=incarnation,
            tenure=common_tenure(answer.tenure for answer in answers),
            has_seat=any(answer.has_seat for answer in answers),
        )

    def _check_versions(self, versions: list[int], attempts: Attempts, incarnation: int) -> None:
        """Refuses a synchronous table of which a shard is more than a step behind another.

        No training makes it so: a worker sends a step when all shards have counted its last one.
        Meanwhile it may go on, so the shard that seems to be behind is asked once more.
        """
        newest = max(versions)
        if newest - min(versions) > 1:
            found = self._statuses(attempts, incarnation)
            since = [min(status.version, newest) for status in found]
            self._check_same_past("the step that is open is", since, attempts, incarnation)

    def _check_same_past(
        self, what: str, steps: list[int], attempts: Attempts, incarnation: int
    ) -> None:
        """Refuses shards further apart than by training; later calls report one being restored."""
        low, high = min(steps), max(steps)
        if high - low <= 1:
            return
        if not any(status.loading for status in self._statuses(attempts, incarnation)):
            raise OtherIncarnationError(
                f"shards disagree on the step of table {self.spec.name!r}: {what} {low} on shard "
                f"{steps.index(low)} and {high} on shard {steps.index(high)}; a shard lost its "
                "memory; restore a checkpoint, or start the training again under another name",
                **self.of,
            )

    @staticmethod
    @override
    def _newest(answer: pb.OpenTableResponse) -> int:
        return answer.version

    @override
    def first_step_ahead(self, next_step: int, attempts: Attempts) -> int:
        newest = max(status.version for status in self.status(attempts))
        if newest > next_step + 1:
            raise StepOrderError(
                f"learning rate of table {self.spec.name!r} from step {next_step}, this worker's "
                f"next: a shard has reached step {newest}; pass now=True, or open the table again",
                **self.of,
            )
        return max(newest, next_step)

    def evict(self, older_than_step: int, attempts: Attempts) -> int:
        """Removes rows on all shards; returns how many."""
        answers = self._tell_each(
            "EvictRows",
            lambda channel: pb.EvictRowsRequest(
                shard=channel.identity,
                table=self.spec.name,
                older_than_step=older_than_step,
                incarnation=self.incarnation,
            ),
            pb.EvictRowsResponse,
            attempts,
        )
        return sum(answer.evicted_row_count for answer in answers)

    def status(self, attempts: Attempts) -> list[TableStatus]:
        """Returns the status of the table on each shard, in order."""
        return self._statuses(attempts, self.incarnation)

    def _statuses(self, attempts: Attempts, incarnation: int) -> list[TableStatus]:
        def ask(channel: ShardChannel) -> TableStatus:
            own = attempts.beside()
            for found in _held(channel, self.spec.name, own, incarnation):
                return TableStatus.from_proto(found)
            raise UnknownTableError(
                f"shard {channel.shard_index} has no table {self.spec.name!r} any more; it lost "
                "its memory",
                shard_index=channel.shard_index,
                **self.of,
            )

        return ask_all(self._channels, ask)

    def row_ids(self, attempts: Attempts) -> Ids:
        """Returns the ids of the rows on all shards, (n,) int64, ascending."""

        def scan(channel: ShardChannel) -> Ids:
            own = attempts.beside()
            return own.run(partial(self._scanned, channel, own))

        return np.unique(np.concatenate(ask_all(self._channels, scan)))

    def _scanned(self, channel: ShardChannel, attempts: Attempts) -> Ids:
        codec = RowCodec.of_scans(self.spec)
        request = pb.ScanRowsRequest(
            shard=channel.identity,
            table=self.spec.name,
            content=pb.ScanRowsRequest.CONTENT_IDS,
            incarnation=self.incarnation,
            wait_timeout_ms=wait_milliseconds(attempts.rest_s),
        )
        found = [np.empty(0, np.int64)]
        context = checksum.context(checksum.Kind.ROWS_SCAN, self.spec.name, request.content)
        with channel.translated(**self.of):
            call = channel.streaming("ScanRows")(request, timeout=with_answer(attempts.rest_s))
            try:
                with cancelled_by(call.cancel):
                    for message in call:
                        header, payload = framing.parse(pb.ScanRowsResponse, message)
                        start = checksum.rows_scan(context, header)
                        rows = codec.open(
                            header.rows, payload, start=start, with_ids=True, with_values=False
                        )
                        found.append(rows.ids)
            except ArgumentError as error:
                raise self.damaged(
                    channel, f"answered for {self.spec.name!r}: {error.message}"
                ) from None
            finally:
                call.cancel()
        return np.concatenate(found)

"""A worker on tables made of the generated stubs, NumPy and a CRC, following what table.proto says.

It shares no code with the SDK and no more with the shards than the generated messages; where it
trains a table, table.proto suffices.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.wire_client import crc as wire_crc
from harness.wire_client.worker import CALL_TIMEOUT_S, Float32, WireWorker, decode, encode, sgd
from shardwell.v1 import table_pb2 as pb
from shardwell.v1 import table_pb2_grpc as pb_grpc
from shardwell.v1 import types_pb2 as types

_MASK = 2**64 - 1


def mix(word: int) -> int:
    """The hash of table.proto."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def owner(row_id: int, row_count: int, shard_count: int) -> int:
    """The shard of a row."""
    if not row_count:
        return mix(row_id & _MASK) % shard_count
    return (row_id + mix(row_id // shard_count) % shard_count) % shard_count


def uniform(low: float, high: float, seed: int, row_id: int, dim: int) -> list[np.float32]:
    """A row before its first gradient."""
    word = mix((mix((seed + 0x9E3779B97F4A7C15) & _MASK) + row_id) & _MASK)
    row = []
    for column in range(dim):
        x = (((word & 0xFFFFFFFF) + column * 0x9E3779B9) & 0xFFFFFFFF) ^ (word >> 32)
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        x ^= x >> 15
        row.append(np.float32(low + (high - low) * (((x >> 8) + 0.5) / 2**24)))
    return row


def table_spec(name: str = "t", row_count: int = 100, dim: int = 3, **fields: Any) -> pb.TableSpec:
    """A TableSpec with what most tests want."""
    values: dict[str, Any] = {
        "codec": types.CODEC_FP32,
        "compression": types.COMPRESSION_NONE,
        "mode": types.MODE_SYNC,
        "optimizer": sgd(1.0),
        "initializer": pb.Initializer(zeros=pb.Zeros()),
    }
    values.update(fields)
    if values["mode"] == types.MODE_SYNC:
        values.setdefault("worker_count", 1)
    return pb.TableSpec(name=name, row_count=row_count, dim=dim, **values)


class WireTable:
    """A table as the wire knows it.

    Args:
        worker: Its connections.
        spec: The table; it is opened on every shard.
        take_seat: Whether to take a seat on every shard then.
    """

    def __init__(self, worker: WireWorker, spec: pb.TableSpec, *, take_seat: bool = False) -> None:
        self.worker = worker
        self.spec = spec
        self.stubs = [pb_grpc.TableServiceStub(channel) for channel in worker.channels]
        self.incarnation = 0
        self.answers = self.open()
        if take_seat:
            self.answers = self.open(take_seat=True)
        self.next_step = min(answer.next_step for answer in self.answers)
        self.tenure = self.answers[0].tenure

    def take_seat(self) -> None:
        """Takes this worker's seats, and begins anew where some of them were given away."""
        self.answers = self.open(take_seat=True)
        if len({answer.tenure for answer in self.answers}) > 1:
            self.answers = self.open(take_seat=True, begins_anew=True)
        (self.tenure,) = {answer.tenure for answer in self.answers}
        self.next_step = min(answer.next_step for answer in self.answers)

    def open(self, *, take_seat: bool = False, **fields: Any) -> list[pb.OpenTableResponse]:
        """OpenTable on every shard, in order; for a seat a tenure is drawn.

        Shard 0 says which incarnation is meant on the others, unless this worker knows its own.
        """
        if take_seat:
            fields.setdefault("tenure", secrets.randbits(64) or 1)
        fields.setdefault("incarnation", self.incarnation)
        answers: list[pb.OpenTableResponse] = []
        for stub, identity in zip(self.stubs, self.worker.identities, strict=True):
            request = pb.OpenTableRequest(
                shard=identity,
                worker_id=self.worker.worker_id,
                spec=self.spec,
                take_seat=take_seat,
                session=self.worker.session,
                **fields,
            )
            answers.append(stub.OpenTable(request, timeout=CALL_TIMEOUT_S))
            self.incarnation = fields["incarnation"] = answers[0].incarnation
        return answers

    def opening(self, shard_index: int) -> pb.TableOpen:
        """What a stream's first message has."""
        opening = pb.TableOpen(
            shard=self.worker.identities[shard_index],
            table=self.spec.name,
            worker_id=self.worker.worker_id,
            session=self.worker.session,
            tenure=self.tenure,
            incarnation=self.incarnation,
        )
        return wire_crc.seal_message(opening)

    def split(self, ids: Iterable[int]) -> list[list[int]]:
        """Distinct ids by shard, ascending."""
        shards: list[list[int]] = [[] for _ in self.stubs]
        for row_id in sorted(set(ids)):
            shards[owner(row_id, self.spec.row_count, len(self.stubs))].append(row_id)
        return shards

    def parts(
        self,
        ids: list[int],
        gradients: npt.ArrayLike,
        *,
        step: int | None = None,
        sample_count: int = 1,
        rows_per_part: int | None = None,
        wait_timeout_s: float = 0.0,
    ) -> list[pb.ExchangeRowsRequest]:
        """The messages of one step to one shard, the last of which ends the step."""
        if self.spec.mode == types.MODE_ASYNC and not self.tenure:
            self.take_seat()
        values = np.asarray(gradients, np.float32).reshape(len(ids), self.spec.dim)
        size = rows_per_part or self.answers[0].rows_per_message_max
        starts = range(0, max(len(ids), 1), size)
        return [
            self._part(
                ids[start : start + size],
                values[start : start + size],
                step=self.next_step if step is None else step,
                part_index=index,
                end_of_step=index == len(starts) - 1,
                sample_count=sample_count,
                wait_timeout_ms=int(wait_timeout_s * 1000),
            )
            for index, start in enumerate(starts)
        ]

    def fetch(
        self, ids: list[int], *, min_version: int = 0, wait_timeout_s: float = 0.0
    ) -> pb.ExchangeRowsRequest:
        """A question for rows of one shard."""
        payload = np.array(ids, "<i8").tobytes()
        return self.seal(
            pb.ExchangeRowsRequest(
                fetch=pb.RowsFetch(
                    rows=pb.Rows(row_count=len(ids)),
                    min_version=min_version,
                    wait_timeout_ms=int(wait_timeout_s * 1000),
                ),
                payload=payload,
            )
        )

    def seal(self, message: pb.ExchangeRowsRequest) -> pb.ExchangeRowsRequest:
        """A message whose CRC fits this table and worker; changed in place."""
        if message.HasField("fetch"):
            return wire_crc.seal(message, wire_crc.ROWS_FETCH, self.spec.name)
        return wire_crc.seal(message, wire_crc.ROW_GRADIENTS, self.spec.name, self.worker.worker_id)

    def _part(self, ids: list[int], values: Float32, **fields: Any) -> pb.ExchangeRowsRequest:
        written = encode(values.reshape(-1), self.spec.codec, self.spec.dim)
        rows = pb.Rows(row_count=len(ids))
        gradient = pb.RowGradients(rows=rows, **fields)
        payload = np.array(ids, "<i8").tobytes() + written
        return self.seal(pb.ExchangeRowsRequest(gradient=gradient, payload=payload))

    def stream(self, shard_index: int, messages: Iterable[pb.ExchangeRowsRequest]) -> Any:
        """ExchangeRows with one shard: a call that yields the answers."""
        opened = self._opened(shard_index, messages)
        return self.stubs[shard_index].ExchangeRows(opened, timeout=CALL_TIMEOUT_S)

    def _opened(
        self, shard_index: int, messages: Iterable[pb.ExchangeRowsRequest]
    ) -> Iterator[pb.ExchangeRowsRequest]:
        yield pb.ExchangeRowsRequest(open=self.opening(shard_index))
        yield from messages

    def put(
        self, ids: list[int], gradients: npt.ArrayLike, **options: Any
    ) -> list[pb.ExchangeRowsResponse]:
        """One step: rows of several shards, each id once; the answer of every shard."""
        values = np.asarray(gradients, np.float32).reshape(len(ids), self.spec.dim)
        row_of = {row_id: values[place] for place, row_id in enumerate(ids)}
        calls = []
        for shard_index, mine in enumerate(self.split(ids)):
            rows = np.array([row_of[row_id] for row_id in mine], np.float32)
            calls.append(self.stream(shard_index, self.parts(mine, rows, **options)))
        answers = [list(call) for call in calls]
        assert all(len(answer) == 1 for answer in answers)
        for (answer,) in answers:
            assert answer.counted.crc32c == wire_crc.of_counted(self.spec.name, answer)
        self.next_step = answers[0][0].counted.step + 1
        return [answer for (answer,) in answers]

    def get(self, ids: list[int], **options: Any) -> Float32:
        """(n, dim): rows in the order of the ids."""
        rows: dict[int, Float32] = {}
        for shard_index, mine in enumerate(self.split(ids)):
            (answer,) = self.stream(shard_index, [self.fetch(mine, **options)])
            rows.update(zip(mine, self.read(answer, mine), strict=True))
        return np.array([rows[row_id] for row_id in ids], np.float32).reshape(-1, self.spec.dim)

    def read(self, answer: pb.ExchangeRowsResponse, ids: list[int]) -> Float32:
        """(n, dim): the rows of an answer to a question for `ids`."""
        asked = np.array(ids, "<i8").tobytes()
        assert wire_crc.fits(answer, wire_crc.ROWS_ANSWER, self.spec.name, asked)
        assert not answer.rows.lz4
        count = answer.rows.row_count * self.spec.dim
        values = decode(answer.payload, self.spec.codec, self.spec.dim, count)
        return values.reshape(answer.rows.row_count, self.spec.dim)

    def abandon(self, step: int | None = None) -> list[pb.ExchangeRowsResponse]:
        """Ends a step on every shard with what was counted."""
        step = self.next_step if step is None else step
        part = self.seal(
            pb.ExchangeRowsRequest(
                gradient=pb.RowGradients(step=step, end_of_step=True, abandons=True)
            )
        )
        self.next_step = step + 1
        return [next(self.stream(index, [part])) for index in range(len(self.stubs))]

    def row_ids(self) -> list[int]:
        """ScanRows with ids on every shard."""
        return sorted(self.scan(pb.ScanRowsRequest.CONTENT_IDS))

    def scan(self, content: int) -> dict[int, list[float]]:
        """ScanRows on every shard: ids, and values if they are asked for."""
        found: dict[int, list[float]] = {}
        for stub, identity in zip(self.stubs, self.worker.identities, strict=True):
            request = pb.ScanRowsRequest(shard=identity, table=self.spec.name, content=content)
            first, *rest = stub.ScanRows(request, timeout=CALL_TIMEOUT_S)
            assert not first.rows.row_count
            for answer in (first, *rest):
                assert wire_crc.fits(answer, wire_crc.ROWS_SCAN, self.spec.name, content)
            for answer in rest:
                count = answer.rows.row_count
                ids = np.frombuffer(answer.payload[: 8 * count], "<i8").tolist()
                values = np.frombuffer(answer.payload[8 * count :], "<f4").reshape(count, -1)
                assert not set(ids) & set(found), "an id twice"
                found.update(zip(ids, values.tolist(), strict=True))
        return found

    def status(self) -> list[pb.TableStatus]:
        """GetTableStatus of every shard."""
        return [
            stub.GetTableStatus(
                pb.GetTableStatusRequest(shard=identity, table=self.spec.name),
                timeout=CALL_TIMEOUT_S,
            ).tables[0]
            for stub, identity in zip(self.stubs, self.worker.identities, strict=True)
        ]

    def evict(self, older_than_step: int) -> int:
        """EvictRows on every shard: how many rows went."""
        return sum(
            stub.EvictRows(
                pb.EvictRowsRequest(
                    shard=identity, table=self.spec.name, older_than_step=older_than_step
                ),
                timeout=CALL_TIMEOUT_S,
            ).evicted_row_count
            for stub, identity in zip(self.stubs, self.worker.identities, strict=True)
        )

    def set_learning_rate(self, rate: float, from_step: int | None = None) -> None:
        """SetTableLearningRate on every shard."""
        for stub, identity in zip(self.stubs, self.worker.identities, strict=True):
            request = pb.SetTableLearningRateRequest(
                shard=identity, table=self.spec.name, learning_rate=rate, from_step=from_step
            )
            stub.SetTableLearningRate(request, timeout=CALL_TIMEOUT_S)

"""Shards of an elastic parameter in this process, without sockets or time, for tests of members.

Who lives is what a test says, and what a timer would do is done when a test says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.data.sessions import session_of
from harness.inside import tracker_of
from shardwell import SGD, Elastic, ParameterSpec
from shardwell.process.spans import Spans
from shardwell.rpc.session import Session
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.config import Limits, ShardConfig
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.deletions import Deletions
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.quotas import ByteBudget, Usages
from shardwell_server.shard.registry import Parameters
from shardwell_server.shard.slice import SharedParts
from shardwell_server.store.contract import Store
from shardwell_server.store.memory import MemoryStore

CHUNK_ELEMENT_COUNT = 16


def elastic_spec(
    *,
    size: int = 32,
    min_count: int = 1,
    max_count: int = 4,
    clip_norm: float = 0.0,
    **fields: Any,
) -> ParameterSpec:
    """Of plain SGD with momentum, in float32."""
    return ParameterSpec(
        name="p",
        size=size,
        optimizer=SGD(learning_rate=0.5, momentum=0.5, clip_norm=clip_norm),
        worker_count=max_count,
        members=Elastic(min_count=min_count, max_count=max_count),
        codec="fp32",
        **fields,
    )


class Living:
    """Sessions that attend are those that a test has put into `attending`; the others are gone."""

    def __init__(self) -> None:
        self.attending: set[int] = set()

    def alive_for_s(self, number: int, process: str = "") -> float:
        return math.inf if number in self.attending else 0.0

    def spare_in_s(self, number: int) -> float:
        return math.inf if number in self.attending else -1.0

    def gone_for_s(self, number: int) -> float:
        return 0.0 if number in self.attending else math.inf

    def silent_for_s(self, number: int) -> float:
        return 0.0


class HandTimer:
    """Does what is due when `fire` is called, all of it once."""

    def __init__(self) -> None:
        self.due: list[Callable[[], float | None]] = []

    def after(self, delay_s: float, act: Callable[[], float | None]) -> None:
        self.due.append(act)

    def fire(self) -> None:
        """Time passes: grace is over, and members that are gone are found."""
        due, self.due = self.due, []
        for act in due:
            if act() is not None:
                self.due.append(act)


def deadline(timeout_s: float = 0.0) -> RequestDeadline:
    """Of a request that may wait so long."""
    return RequestDeadline(timeout_s)


def gradient_message(
    spec: ParameterSpec,
    part: ParameterSlice,
    worker_id: str,
    chunk_index: int,
    step: int,
    values: np.ndarray,
    sample_count: int = 1,
) -> tuple[pb.ExchangeRequest, np.ndarray]:
    """A chunk of a gradient, as its worker writes it; the payload apart."""
    where = part.where.chunk(chunk_index, part.chunk_element_count)
    header = pb.ExchangeRequest()
    header.gradient.step, header.gradient.sample_count = step, sample_count
    context = checksum.context(checksum.Kind.GRADIENT, spec.name, worker_id)
    sealed = ChunkCodec.of(spec).encode(
        header,
        header.gradient.chunk,
        where,
        chunk_index,
        np.asarray(values, np.float32),
        start=checksum.gradient(context, header.gradient),
    )
    message = pb.ExchangeRequest.FromString(sealed)
    return message, np.frombuffer(message.payload, np.uint8)


class ElasticShard:
    """One shard, on a store that may be recovered by another object of this class."""

    def __init__(
        self,
        spec: ParameterSpec,
        index: int = 0,
        shard_count: int = 1,
        store: Store | None = None,
        living: Living | None = None,
    ) -> None:
        self.spec = spec
        self.index = index
        self.living = living or Living()
        self.timer = HandTimer()
        self.lines: list[tuple[int, int, tuple[str, ...]]] = []
        """What would go to the contribution log: step, chunk, who."""
        store = store or MemoryStore()
        config = ShardConfig(
            shard_index=index,
            shard_count=shard_count,
            cluster_id="elastic",
            chunk_size_bytes=4 * CHUNK_ELEMENT_COUNT,
            limits=Limits(),
        )
        parameters, tables = store.recover(), store.recover_tables()
        assert not tables
        shared = SharedParts(
            config=config,
            sessions=self.living,  # type: ignore[arg-type]
            spans=Spans(),
            timer=self.timer,
            log=lambda closed: self.lines.append(
                (closed.step, closed.chunk_index, closed.worker_ids)
            ),
        )
        stored = ByteBudget(config.limits.stored_bytes_max)
        self.registry = Parameters(
            shared, store, threading.Lock(), stored, Usages(), Deletions(store)
        )
        self.registry.recover(parameters)
        store.recovered()
        self.part: ParameterSlice = self.registry.open(spec)[0]
        self.part.go_on_after_start()

    def initialize(self) -> None:
        """Sets first weights of zeros, on any shard."""
        size, epoch = self.part.where.size, 1
        if self.index == 0:
            epoch = self.part.loading.claim("w", deadline()).epoch
        self.part.loading.set(epoch, self.part.where, np.zeros(size, np.float32))
        self.part.loading.finish(epoch)
        if self.index:
            self.part.loading.confirm(epoch)

    def ask(
        self,
        worker_id: str,
        tenure: int,
        *,
        from_step: int | None = None,
        session: Session | None = None,
    ) -> pb.CreateParameterResponse:
        """A worker asks for its seat, or says from which step on it is awaited."""
        session = session or session_of(worker_id)
        self.living.attending.add(session.number)
        asks: Contributor[Any] = Contributor(
            worker_id, session, tenure, asks=True, from_step=from_step
        )
        return self.part.join(worker_id, session.number, seat_for=asks)

    def give(
        self,
        worker_id: str,
        tenure: int,
        chunk_index: int,
        step: int,
        values: np.ndarray | float = 1.0,
        *,
        sample_count: int = 1,
        session: Session | None = None,
        timeout_s: float = 0.0,
    ) -> str:
        """Sends one chunk of a gradient, and says what became of it.

        "counted", "duplicate", "superseded", "late", "over" where its tenure is, or "unknown".

        Raises:
            NotYet: it waits, with a `timeout_s`.
        """
        size = self.part.where.chunk(chunk_index, self.part.chunk_element_count).size
        full = np.broadcast_to(np.asarray(values, np.float32), (size,))
        message, payload = gradient_message(
            self.spec, self.part, worker_id, chunk_index, step, full, sample_count
        )
        sender: Contributor[Any] = Contributor(worker_id, session or session_of(worker_id), tenure)
        is_new = self.part.contribute(sender, message.gradient, payload, deadline(timeout_s))
        if sender.may_have_counted:
            return "unknown"
        if chunk_index in sender.superseded:
            return "superseded"
        if chunk_index in sender.late:
            return "over" if sender.is_over else "late"
        return "counted" if is_new else "duplicate"

    def vanish(self, worker_id: str) -> None:
        """The worker's session does not attend any more."""
        self.living.attending.discard(session_of(worker_id).number)

    @property
    def versions(self) -> list[int]:
        """Of each chunk."""
        return [record.version for record in tracker_of(self.part).records]

    @property
    def open_sets(self) -> list[tuple[str, ...]]:
        """Of each chunk: who has contributed to its open step, in order."""
        return [tuple(s.worker_id for s in each) for each in tracker_of(self.part).open_sets]

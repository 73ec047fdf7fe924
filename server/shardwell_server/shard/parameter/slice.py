"""One parameter's slice on this shard: gradients in, each counted once, in its turn; weights out.

The tracker decides, averaging.py moves bytes, the storage keeps them; here threads meet. Locks: a
chunk's lock guards its arrays and its entries of the tracker; the register's lock guards what
changes rarely. Order: the register's lock is never taken while a chunk's is held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from shardwell.errors import ArgumentError, StepOrderError, WrongShardError
from shardwell.numerics.codec import Bytes, peak_of
from shardwell.numerics.scratch import thread_scratch
from shardwell.numerics.update_rules import SAFE_MAGNITUDE
from shardwell.placement.ranges import flat
from shardwell.process.spans import now_ns
from shardwell.specs.grouped_rate import rate_of
from shardwell.specs.parameter import SAMPLE_COUNT_MAX, STEP_MAX, ParameterSpec
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2
from shardwell.v1.trace_pb2 import (
    SPAN_KIND_ADD,
    SPAN_KIND_LATE,
    SPAN_KIND_UPDATE,
)
from shardwell.wire import checksum
from shardwell.wire.chunks import ChunkCodec
from shardwell_server.shard.crews import Contributor
from shardwell_server.shard.deadline import RequestDeadline
from shardwell_server.shard.errors import await_version, non_finite
from shardwell_server.shard.parameter.averaging import (
    Contribution,
)
from shardwell_server.shard.parameter.chunk import ImageWriter, come_to_rest
from shardwell_server.shard.parameter.ledger import Holder
from shardwell_server.shard.parameter.loading import ParameterLoading
from shardwell_server.shard.parameter.reports import Reports
from shardwell_server.shard.parameter.state import ParameterState
from shardwell_server.shard.parameter.steps import (
    Steps,
    StepsByNorm,
)
from shardwell_server.shard.parameter.training_states import Given, Held
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.shard.sessions import Attendance
from shardwell_server.shard.slice import ShardSlice, SharedParts
from shardwell_server.shard.step_tracker import Decision, ParameterSeat
from shardwell_server.store.contract import (
    JournalEntry,
    ParameterStorage,
)

_NOTHING = nullcontext()


class ParameterSlice(ShardSlice[ParameterSeat, pb.CreateParameterResponse, pb.ParameterStatus]):
    """The slice of one parameter. All methods may be called from any thread."""

    kind = "parameter"

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        stored_bytes: OwnedBytes,
        shared: SharedParts,
    ) -> None:
        state = ParameterState(spec, storage, stored_bytes, shared)
        super().__init__(spec.name, state, shared)
        self.spec: ParameterSpec = spec
        self.storage: ParameterStorage = storage
        self.where = state.where
        self.chunk_element_count: int = storage.layout.chunk_element_count
        self._spans = state.spans
        self._rules = state.rules
        self._codec = ChunkCodec.of(spec)
        self._summed = self._codec.codec.summed
        """The codec of contributions as sums have them."""
        self._chunks = state.chunks
        self.chunk_count = len(state.chunks)
        self._tracker = state.tracker
        self._register = state.register
        self._encoded = state.encoded
        self.has_open_sets = spec.has_open_sets
        """True if a step may close without a worker, so that each gradient has an outcome."""
        self.sets = state.sets
        self.snapshots = state.snapshots
        self.steps = (StepsByNorm if spec.closes_by_norm else Steps)(state)
        self._images = ImageWriter(storage, self._chunks, self._register.keep_norm)
        self.loading = ParameterLoading(state, self._images)
        self.reports = Reports()
        self.sets.restore()
        self.steps.replay()
        self.sets.is_restoring = False
        self.samples = state.samples
        self.samples.restore()
        self.states = state.states
        self.states.restore()
        self.times.begin_anew()  # what was replayed was another process's
        self.steps.recovered()
        if storage.is_torn:
            for index in range(self.chunk_count):
                self.verify(index)

    # Opening and initializing.

    def _meet_incarnation(self, incarnation: int) -> int:
        return self._register.meet_incarnation(incarnation)

    def _opened(self, worker_id: str) -> pb.CreateParameterResponse:
        initialized = self._register.is_initialized  # what is only staged may have any version
        return pb.CreateParameterResponse(
            slice_offset=self.where.offset,
            slice_size=self.where.size,
            chunk_element_count=self.chunk_element_count,
            version=self._tracker.version_min() if initialized else 0,
            next_step=self._tracker.next_step(worker_id) if initialized else 0,
            initialized=initialized,
            init_epoch=self._register.committed_epoch,
            begun=self._register.has_begun,
            cuts_blocks=self.spec.cuts_blocks,
        )

    def _say_when(self, response: pb.CreateParameterResponse, worker_id: str) -> None:
        super()._say_when(response, worker_id)
        response.version_max = self._tracker.version_max()

    def _wake_all(self) -> None:
        for chunk in self._chunks:
            with chunk.changed.lock:
                chunk.changed.notify_all()

    def _at_rest(self) -> AbstractContextManager[object]:
        return self._images.at_rest()

    # Keeping.

    def make_image(self, is_stopping: Callable[[], bool] = lambda: False) -> None:
        if self.storage.wants_image and self._register.is_initialized:
            self._images.write(is_stopping)

    def verify(self, chunk_index: int) -> None:
        """Checks a chunk that an earlier process left, ahead of its first use."""
        if self._register.is_initialized:
            chunk = self._chunks[chunk_index]
            with chunk.changed.lock:
                chunk.verify()

    # Gradients in.

    def contribute(
        self,
        contributor: Contributor[ParameterSeat],
        gradient: types_pb2.GradientChunk,
        payload: Bytes,
        deadline: RequestDeadline,
    ) -> bool:
        """Counts a gradient chunk, once; blocks while an earlier step is open.

        Everything is checked before anything is changed; the worker's seat is taken only then.
        Returns False if it had been counted before; `contributor.superseded` has those of which
        another gradient was.
        """
        begin_ns = now_ns()
        header = gradient.chunk
        context = checksum.context(checksum.Kind.GRADIENT, self.spec.name, contributor.worker_id)
        start = checksum.gradient(context, gradient)
        intact = self._codec.check(header, payload, start, thread_scratch())
        index, step = header.chunk_index, gradient.step
        if index >= len(self._chunks):
            raise self._no_chunk(index)
        chunk = self._chunks[index]
        if gradient.sample_count > SAMPLE_COUNT_MAX:
            raise ArgumentError(
                f"sample_count must be at most {SAMPLE_COUNT_MAX}; got {gradient.sample_count}"
            )
        values = self._codec.open(intact, chunk.where)
        peak = self._codec.peak(intact, values)
        bad = self._codec.first_non_finite(values) if peak == math.inf else None
        if bad is not None:
            whose = f"gradient of {contributor.worker_id!r}"
            raise non_finite(self.spec, chunk.where.offset + bad, whose)
        contribution = Contribution(values, gradient.sample_count)
        if contributor.seat is None:
            with self._register.lock:
                contributor.seat = self._seat(contributor)
        seat = contributor.seat
        is_empty = gradient.after_refusal and not gradient.sample_count
        rate = None
        if gradient.HasField("learning_rate") or gradient.rate_factors:
            rate = self._brought_rate(gradient)
        if rate is not None and seat is not None and self._tracker.is_sync:
            self._register.bring_learning_rate(contributor, step, rate)
        with chunk.changed.lock:
            self._crew.check(contributor)  # another one may take the seat over at any time
            if seat is None:
                found = self.sets.of_step(step).get(index)
                decision = self._tracker.decide_past(
                    contributor.worker_id, index, step, header.crc32c, found, is_empty=is_empty
                )
            else:
                decision = self._tracker.decide(
                    seat,
                    index,
                    step,
                    header.crc32c,
                    after_refusal=gradient.after_refusal,
                    is_empty=is_empty,
                )
            if decision is Decision.WAIT:
                await_version(self._tracker, step, chunk.changed, deadline, index)
            if decision in (Decision.LATE, Decision.UNKNOWN):
                contributor.note_late(index, may_have_counted=decision is Decision.UNKNOWN)
                chunk.late_count += 1
                self._spans.add(
                    SPAN_KIND_LATE, self.spec.name, step, index, contributor.worker_id, begin_ns
                )
                return False
            if decision is not Decision.COUNT:
                chunk.duplicate_count += 1
                if decision is Decision.SUPERSEDED:
                    contributor.superseded.append(index)
                return False
            assert seat is not None
            if is_empty and peak == 0.0 and not self._tracker.is_sync:
                chunk.verify()
                nothing = np.empty(0, np.uint8)
                first_step = seat.tenure.first_step
                self.storage.journal(
                    JournalEntry(index, seat.index, first_step + step, 0, 0.0, nothing)
                )
                self.steps.pass_over(index, seat, step, header.crc32c)
                return True
            summed = contribution
            if self._codec.codec is not self._summed:
                summed = contribution.summed(self._codec.codec)
            if not chunk.is_verified:
                chunk.verify()
            version = self._tracker.records[index].version
            learning_rate = self._register.rates.at(version)
            if rate is not None and not self._tracker.is_sync:
                learning_rate = rate
            decay = self._rules.decay_into_state
            decayed = decay and decay * peak_of(chunk.state.weights)
            if not peak + decayed < SAFE_MAGNITUDE:
                what = "gradient" if peak >= SAFE_MAGNITUDE else "weight decay"
                self.steps.check_state(chunk, index, summed, seat, learning_rate, what)
            is_grace_over = self.sets.grace_over[index] == version
            closes = self._tracker.is_complete(index, seat, is_grace_over=is_grace_over)
            entry = JournalEntry(
                index,
                seat.index,
                seat.tenure.first_step + step,
                contribution.sample_count,
                learning_rate,
                contribution.payload,
                closes=closes and self.has_open_sets,
            )
            is_noted = self.samples.void is not None or gradient.HasField("samples")
            with self.samples.noted(index, seat, step, gradient) if is_noted else _NOTHING:
                self.storage.journal(entry)
                # What overflows is found where weights are encoded.
                begun_s = self.steps.count(
                    chunk, index, summed, seat, step, learning_rate, header.crc32c, closes=closes
                )
            chunk.counted_count += 1
            closed = self._tracker.records[index].version != version
            if closes:
                chunk.changed.notify_all()
            elif self.has_open_sets and self._tracker.begins_grace(index):
                self._begin_grace(index, version)
            kind = SPAN_KIND_UPDATE if closed else SPAN_KIND_ADD
            end_ns = self._spans.add(
                kind, self.spec.name, step, index, contributor.worker_id, begin_ns
            )
            seat.contributed(contributor.session, end_ns / 1e9, begun_s)
            return True

    def _brought_rate(self, gradient: types_pb2.GradientChunk) -> float:
        if not gradient.HasField("learning_rate"):
            raise ArgumentError("a gradient has rate_factors, and no learning_rate")
        return self.spec.check_rate(rate_of(gradient.learning_rate, gradient.rate_factors))

    def _no_chunk(self, index: int) -> ArgumentError:
        return ArgumentError(
            f"chunk {index} of parameter {self.spec.name!r}: this shard's slice of "
            f"{self.where.size} elements has {len(self._chunks)} chunks",
            parameter=self.spec.name,
        )

    # Steps that may close without a worker.

    def _begin_grace(self, index: int, version: int) -> None:
        def end() -> None:
            if self._tracker.records[index].version == version:
                self.sets.grace_over[index] = version
                self.steps.settle(index)

        self._after(self.spec.grace_s, end)

    def go_on_after_start(self) -> None:
        super().go_on_after_start()
        for index, record in enumerate(self._tracker.records):
            if self._tracker.has_grace_begun(index):
                self._begin_grace(index, record.version)

    def _settle_all(self) -> None:
        for index in range(self.chunk_count):
            self.steps.settle(index)

    def _come_to_rest(self) -> None:
        come_to_rest(self._chunks)

    # Samples.

    def deal(self, request: pb.DealSamplesRequest) -> pb.DealSamplesResponse:
        """Does what a request about samples asks for; docs/adr/0042-samples.md has the protocol.

        Raises:
            ArgumentError, SpecMismatchError: as DealSamples says.
            StepOrderError: the tenure of a member that asks for a deal is over, or the samples of
                a step are not known.
        """
        stages = pb.DealSamplesRequest.Stage
        worker_id, tenure = request.worker_id, request.tenure
        if request.stage == stages.STAGE_END:
            self.end_tenure(worker_id, tenure)
            self._come_to_rest()
            data, given = self.samples.last_given(Holder(worker_id, tenure))
            return pb.DealSamplesResponse(
                step=given.step,
                ranges=flat(given.ranges),
                data=data,
                whole_before=given.whole_before,
                carried=flat(given.carried),
            )
        if not self.samples.has_first_chunk:
            raise WrongShardError("samples are dealt by shard 0 alone; ask there")
        with self._register.lock:
            rank = self._crew.rank_of(worker_id)
            living = {number: name for name, number, _ in self._crew.living()}
            has_seat = self._crew.find(worker_id) is not None
            is_member = self._crew.member(worker_id, tenure) is not None
        response = pb.DealSamplesResponse()
        with self._chunks[0].changed.lock:
            match request.stage:
                case stages.STAGE_LOOK:
                    return self.samples.of_step(request.step)
                case stages.STAGE_DEAL:
                    if self.spec.members is not None and request.batch_count and not is_member:
                        raise StepOrderError(
                            f"worker {worker_id!r} asks for samples in a tenure that is over; join "
                            "anew",
                            worker_id=worker_id,
                        )
                    if self.spec.members is None and not has_seat:
                        raise ArgumentError(
                            f"worker {worker_id!r} asks for samples without a seat; take it before",
                            worker_id=worker_id,
                        )
                    response = self.samples.deal(request, rank, living)
                case stages.STAGE_RETURN:
                    self.samples.give_back(request)
                case stages.STAGE_SETTLE:
                    self.samples.settle(request)
                case stages.STAGE_LOAD:
                    if self._register.has_begun:
                        raise ArgumentError(
                            f"parameter {self.spec.name!r} has first weights, so its samples have "
                            "an account of their own; delete it before",
                            parameter=self.spec.name,
                        )
                    self.samples.load(request.account)
                case _:
                    raise ArgumentError(
                        f"stage must be one of DealSamplesRequest; got {request.stage}"
                    )
        self.make_durable()
        return response

    def account_of_samples(self, version: int) -> bytes:
        """Returns the account of the samples in a version of chunk 0, for a checkpoint."""
        if not self.samples.has_first_chunk:
            return b""
        with self._chunks[0].changed.lock:
            return self.samples.account(version)

    # States beside the weights.

    def keep_state(self, request: pb.KeepStateRequest) -> pb.KeepStateResponse:
        """Keeps or returns what a worker has beside the weights, as KeepState says.

        Raises:
            ArgumentError: as KeepState says.
        """
        if not self.samples.has_first_chunk:
            raise WrongShardError("shard 0 alone keeps states; ask there")
        stages = pb.KeepStateRequest.Stage
        if request.stage == stages.STAGE_GET:
            return self._kept_state(request)
        if request.stage == stages.STAGE_GET_PAGE:
            return pb.KeepStateResponse(state=self.states.page(b"".join(request.pages)))
        most = self._tracker.version_max() + 1
        if request.stage == stages.STAGE_LOAD:
            most = STEP_MAX
            if self._register.has_begun:
                raise ArgumentError(
                    f"parameter {self.spec.name!r} has first weights, so its workers have states "
                    "of their own; delete it before",
                    parameter=self.spec.name,
                )
        elif request.stage not in (stages.STAGE_PUT, stages.STAGE_PUT_PAGE):
            raise ArgumentError(f"stage must be one of KeepStateRequest; got {request.stage}")
        elif request.step > most and (
            request.stage == stages.STAGE_PUT or self._register.has_begun  # else of a checkpoint
        ):
            raise ArgumentError(
                f"a state of step {request.step} of parameter {self.spec.name!r}, which is at step "
                f"{most - 1}; give it with the gradient of that step",
                parameter=self.spec.name,
            )
        if request.stage == stages.STAGE_PUT_PAGE:
            self.states.put_page(request.state, request.step)
            return pb.KeepStateResponse()
        given = Given(request.worker_id, request.step, request.state, tuple(request.pages))
        missing = self.states.put(given, most)
        return pb.KeepStateResponse(missing=missing.own, is_awaited=missing.are_others_awaited)

    def _kept_state(self, request: pb.KeepStateRequest) -> pb.KeepStateResponse:
        of_fragment = self.spec.fragment is not None
        is_past = of_fragment and self.samples.has_counted(request.worker_id, request.step)
        found = self.states.get(request.worker_id, request.step + is_past)
        if found is None:
            return pb.KeepStateResponse()
        others = self._living() - {request.worker_id}
        is_awaited = found.step < request.step and bool(others)
        return pb.KeepStateResponse(**found._asdict(), is_awaited=is_awaited)

    def _living(self) -> set[str]:
        with self._register.lock:
            return {worker_id for worker_id, _, _ in self._crew.living()}

    def held_states(self, version: int) -> AbstractContextManager[Held]:
        """Holds the states that a snapshot of a version has at its end."""
        return self.states.held(version)

    def page_of_states(self, digest: bytes) -> bytes:
        """Returns a page of states that are held."""
        return self.states.page(digest)

    def states_of(self, held: Held, deadline: RequestDeadline) -> list[Given]:
        """Returns a snapshot's states; its request waits for those of workers on their way.

        Learners have given theirs before the version came, or have missed its step.
        """
        awaited = self._living() if self.spec.fragment is None else ()
        return self.states.whole(held, awaited, deadline)

    def _give_on(self, seat: ParameterSeat) -> None:
        self.sets.give_on(seat)

    @property
    def version_min(self) -> int:
        """The fewest updates that a chunk has seen."""
        return self._tracker.version_min()

    # Weights out.

    def is_ready(self, chunk_index: int, min_version: int) -> bool:
        """Returns True if `weights_message` would not wait."""
        return self._tracker.records[chunk_index].version >= min_version

    def weights_message(
        self,
        chunk_index: int,
        min_version: int,
        deadline: RequestDeadline,
        max_version: int | None = None,
        held_version: int | None = None,
    ) -> bytes:
        """Returns a chunk's weights as a sealed message, once it has seen `min_version` updates.

        GetWeightsResponse and ExchangeResponse have the same fields, so it serves both.
        GetWeightsRequest has `max_version`, GradientChunk `held_version`.
        """
        self._register.check_initialized()
        chunk = self._chunks[chunk_index]
        with chunk.changed.lock:
            version = self._tracker.records[chunk_index].version
            if version < min_version:
                await_version(self._tracker, min_version, chunk.changed, deadline, chunk_index)
            if max_version is not None and version > max_version >= min_version:
                kept = self.storage.kept(chunk_index, max_version)
                if kept and self._encoded.fits(chunk, chunk_index, max_version, kept):
                    return kept
            return self._encoded.message(chunk, chunk_index, version, held_version)

    # The rest.

    def change_learning_rate(self, from_step: int | None, learning_rate: float) -> None:
        self._register.change_learning_rate(from_step, learning_rate)

    def describe(
        self, name_count_max: int, attending: Mapping[str, Attendance] | None = None
    ) -> pb.ParameterStatus:
        with self._register.lock:
            initialized = self._register.is_initialized
            oldest = self._tracker.version_min() if initialized else 0
            status = pb.ParameterStatus(
                spec=self.spec.to_proto(),
                slice_offset=self.where.offset,
                slice_size=self.where.size,
                initialized=initialized,
                version_min=oldest,
                version_max=self._tracker.version_max() if initialized else 0,
                counted_chunk_count=sum(chunk.counted_count for chunk in self._chunks),
                duplicate_chunk_count=sum(chunk.duplicate_count for chunk in self._chunks),
                late_chunk_count=sum(chunk.late_count for chunk in self._chunks),
                learning_rate=self._register.rates.at(oldest),
                load_id=self._register.committed_load_id,
            )
            contributed_count, missing_count = self._add_members(
                status, oldest, name_count_max, attending
            )
            status.learners.extend(self.reports.learners(name_count_max))
            status.samples.extend(self.samples.describe())
            for name, value in self.reports.newest().items():
                status.figures.add(name=name, value=value)
            status.contributed_worker_count = contributed_count
            status.missing_worker_count = missing_count
            return status

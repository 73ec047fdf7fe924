"""The parts of a parameter's slice."""

from __future__ import annotations

import time

from shardwell.numerics.update_rules import TensorRules
from shardwell.placement.slices import slice_of
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.encoded_weights import EncodedWeights
from shardwell_server.shard.parameter.open_sets import OpenSets
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.parameter.samples import Samples
from shardwell_server.shard.parameter.snapshot import Snapshots
from shardwell_server.shard.parameter.training_states import TrainingStates
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.shard.slice import SharedParts, SliceState
from shardwell_server.shard.step_times import StepTimes
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store.contract import ParameterStorage


class ParameterState(SliceState[ParameterSeat]):
    """A chunk's lock guards the chunk; the register's, which is taken first, all that is rare."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        stored_bytes: OwnedBytes,
        shared: SharedParts,
    ) -> None:
        config, limits = shared.config, shared.config.limits
        self.spec = spec
        self.storage: ParameterStorage = storage
        self.spans = shared.spans
        self.where = slice_of(spec.size, config.shard_index, config.shard_count, spec.slice_unit)
        self.rules = TensorRules(spec.optimizer, spec.layout)
        size = storage.layout.chunk_element_count
        self.chunks = [
            Chunk(self.where.chunk(index, size), index, index * size, storage, spec)
            for index in range(self.where.chunk_count(size))
        ]
        self.times = StepTimes(len(self.chunks), time.monotonic)
        self.tracker: StepTracker = StepTracker(
            spec, storage.records(), shared.sessions, limits.worker_count_max
        )
        self.register: Register = Register(
            spec,
            storage,
            self.tracker,
            learning_rate=self.rules.learning_rate,
            is_first_shard=config.shard_index == 0,
            limits=limits,
        )
        self.lock = self.register.lock
        self.sets = OpenSets(spec, storage, self.tracker, self.register, self.chunks, shared.log)
        """The contributors to its steps, where sets are open."""
        size = self.where.size
        self.samples = Samples(
            spec,
            storage,
            self.tracker,
            has_first_chunk=config.shard_index == 0 and size > 0,
            is_whole=size == spec.size,
        )
        self.states = TrainingStates(
            spec, storage, stored_bytes, self.tracker.crew.seated_worker_ids
        )
        self.snapshots = Snapshots(
            spec,
            self.chunks,
            self.tracker,
            self.register,
            spool_dir=shared.spool_dir,
            count_max=limits.snapshot_count_max,
        )
        self.encoded = EncodedWeights(
            spec, storage, shared.spans, count_max=limits.encoded_chunk_count_max
        )

"""The parts of a parameter's slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell.numerics.update_rules import TensorRules
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.shard.parameter.chunk import Chunk
from shardwell_server.shard.parameter.encoded_weights import EncodedWeights
from shardwell_server.shard.parameter.open_sets import OpenSets
from shardwell_server.shard.parameter.register import Register
from shardwell_server.shard.parameter.snapshot import Snapshots
from shardwell_server.shard.slice import SliceState
from shardwell_server.shard.step_tracker import ParameterSeat, StepTracker
from shardwell_server.store import ParameterStorage


@dataclass(frozen=True, kw_only=True)
class ParameterState(SliceState[ParameterSeat]):
    """A chunk's lock guards the chunk; the register's, which is taken first, all that is rare."""

    spec: ParameterSpec
    storage: ParameterStorage
    tracker: StepTracker
    register: Register
    chunks: Sequence[Chunk]
    rules: TensorRules
    encoded: EncodedWeights
    snapshots: Snapshots
    sets: OpenSets
    """The contributors to its steps, where sets are open."""

"""The samples that a step had, as shard 0 knows them of the last steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwell.errors import CorruptChunkError, UnknownParameterError
from shardwell.numerics.permutation import Int64, samples_at
from shardwell.placement.ranges import NumberRanges, paired
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters
from shardwell.v1 import parameter_server_pb2 as pb


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSamples:
    """The samples that one worker's gradient was made from, in one step.

    Examples:
        >>> net = client.parameter("step_seen", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> for batch in net.batches(shardwell.Samples(4, 2, shuffle=False), epochs=1):
        ...     weights = net.exchange(np.ones(3), batch=batch)
        >>> [given] = client.step_samples("step_seen", 1)
        >>> given.name, given.indices
        ('train', array([2, 3]))
    """

    worker_id: str
    name: str
    """The name of the `Samples`."""
    epoch: int
    """The epoch of the first of them, from 0."""
    ranges: NumberRanges
    """Their positions: the first of each range, and the one behind its last."""
    indices: Int64
    """(n,) int64: which samples of the dataset."""


def samples_of_step(
    name: str, step: int, shard: ShardChannel, attempts: Attempts
) -> list[StepSamples]:
    """Asks shard 0 which samples a step of a parameter has, in the order of the gradients."""
    here = attempts.run(lambda: ask_parameters(shard, attempts.rest_s, name)).parameters
    if not here:
        raise UnknownParameterError(f"there is no parameter {name!r}", parameter=name)
    datasets = {each.dataset.name: each.dataset for each in here[0].samples}
    request = pb.DealSamplesRequest(
        shard=shard.identity, parameter=name, stage=pb.DealSamplesRequest.STAGE_LOOK, step=step
    )

    def ask() -> pb.DealSamplesResponse:
        return shard.call(
            "DealSamples",
            request,
            pb.DealSamplesResponse,
            timeout_s=attempts.rest_s,
            parameter=name,
        )

    found = []
    for each in attempts.run(ask).counted:
        data, ranges = datasets.get(each.data), paired(each.ranges)
        if data is None or not ranges:
            raise CorruptChunkError(
                f"shard 0 names samples {each.data!r} of step {step}, which are none; call again",
                parameter=name,
            )
        positions = np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges])
        indices = samples_at(positions, data.length, data.seed, shuffles=data.shuffles)
        found.append(
            StepSamples(
                worker_id=each.worker_id,
                name=each.data,
                epoch=ranges[0][0] // data.length,
                ranges=ranges,
                indices=indices,
            )
        )
    return found

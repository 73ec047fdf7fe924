"""Collectives of real messages, carried in memory, and what NumPy makes of the same arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.group.plans import plan_of
from harness.oracles.relay import ORDERS, Order, Relay
from shardwell.group.schedule.arithmetic import ChunkArithmetic, Reduction
from shardwell.group.schedule.collective import Arrival, Collective
from shardwell.group.schedule.plan import Operation
from shardwell.group.schedule.strategies import Centralized, Ring, Strategy, Tree
from shardwell.numerics.codec import Float32
from shardwell.numerics.weighted_mean import MeanFactors
from shardwell.v1 import peer_pb2 as pb
from shardwell.wire import messages as framing

STRATEGIES: tuple[Strategy, ...] = (Ring(), Tree(1), Tree(2), Tree(3), Centralized())
LOSSY = ("fp16", "bf16")
FLOAT32_MAX = float(np.finfo(np.float32).max)


def to_arrival(source: int, message: bytes) -> Arrival:
    header, payload = framing.parse(pb.ReceiveChunksResponse, message)
    return Arrival(source, header, payload, message)


def run(
    operation: Operation,
    strategy: Strategy,
    arrays: Sequence[Float32],
    *,
    root: int = 0,
    codec: str = "fp32",
    reduction: Reduction = Reduction.SUM,
    sample_counts: Sequence[int] | None = None,
    order: Order = ORDERS[0],
    chunk: int = 5,
) -> list[Float32]:
    """What each rank has in its array afterwards."""
    size = len(arrays)
    results = [array.copy() for array in arrays]
    plans, collectives = [], []
    for rank, array in enumerate(results):
        plan = plan_of(
            rank, size, array.size, chunk, operation=operation, strategy=strategy, root=root
        )
        is_mean = reduction is Reduction.MEAN
        weights = MeanFactors(list(sample_counts or [1] * size))
        arithmetic = ChunkArithmetic(
            array,
            call_index=0,
            context=11,
            codec_name=codec,
            reduction=reduction,
            factor=weights.factor(rank) if is_mean else 1.0,
            divisor=weights.divisor if is_mean else 1.0,
        )
        plans.append(plan)
        collectives.append(Collective(plan, arithmetic))
    Relay(plans, collectives, to_arrival, order).run()
    return results


def integers(size: int, length: int, seed: int = 0) -> list[Float32]:
    random = np.random.default_rng(seed)
    return [random.integers(-50, 50, length).astype(np.float32) for _ in range(size)]


def normal(size: int, length: int, magnitude: float = 1.0) -> list[Float32]:
    random = np.random.default_rng(3)
    return [(random.standard_normal(length) * magnitude).astype(np.float32) for _ in range(size)]


def exactly(arrays: Sequence[Float32]) -> npt.NDArray[np.float64]:
    """(size, length) float64."""
    return np.stack(arrays).astype(np.float64)


def segment(length: int, rank: int, size: int) -> slice:
    """As peer.proto cuts it: NumPy cuts alike."""
    parts = np.array_split(np.arange(length), size)
    start = sum(len(part) for part in parts[:rank])
    return slice(start, start + len(parts[rank]))


def expected(
    operation: Operation, arrays: Sequence[Float32], rank: int, root: int
) -> npt.NDArray[np.float64]:
    """A sum's result on a rank."""
    values, size = exactly(arrays), len(arrays)
    total, length = values.sum(axis=0), values.shape[1]
    result = values[rank].copy()
    match operation:
        case Operation.ALL_REDUCE:
            return total
        case Operation.REDUCE:
            return total if rank == root else result
        case Operation.BROADCAST:
            return values[root]
        case Operation.REDUCE_SCATTER:
            mine = segment(length, rank, size)
            result[mine] = total[mine]
            return result
        case Operation.ALL_GATHER:
            for other in range(size):
                theirs = segment(length, other, size)
                result[theirs] = values[other][theirs]
            return result


def bits(array: Float32) -> bytes:
    return array.tobytes()


def one_result(results: Sequence[Float32]) -> Float32:
    """The result of all, which has the same bits on each."""
    assert len({bits(result) for result in results}) == 1
    return results[0]

"""Ways of synchronising gradients that a training loop can exchange for one another.

A loop calls `sync_gradients` once a step and goes on with the mean of all workers. The object that
the loop is given computes it: alone (LocalSync), with the threads of this process (ThreadedSync), a
group of processes (GroupSync) or the shards of a cluster (ServerSync).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import as_output, check_finite, check_integer
from shardwell.numerics.codec import Float32
from shardwell.parameter.dealing import Batch
from shardwell.parameter.parameter import Parameter
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import SAMPLE_COUNT_MAX

if TYPE_CHECKING:
    from shardwell.group.group import Group


@runtime_checkable
class GradientSync(Protocol):
    """Makes each worker's gradient the mean of all workers' gradients.

    Examples:
        >>> def train(sync: shardwell.GradientSync) -> None:
        ...     gradient = np.ones(3, np.float32)
        ...     sync.sync_gradients(gradient, sample_count=32)  # now the mean of all workers
        >>> train(shardwell.LocalSync())  # or ServerSync, GroupSync, ThreadedSync
    """

    def sync_gradients(self, array: Float32, *, sample_count: int = 1) -> None:
        """Replaces the array by the mean of all workers' arrays; blocks until it has come.

        Every worker calls it equally often, with arrays of one length. All get the same bits.

        Args:
            array: float32 of any shape, writable and C-contiguous; written in place.
            sample_count: Weight of this worker's array, 0 to 2^24; 0 for all makes zeros.

        Raises:
            ArgumentError: the array or the count can't be used.
            ShardwellError: see each kind; the array was not written, unless it says otherwise.
        """

    @property
    def worker_count(self) -> int:
        """The workers that take part, this one included."""
        raise NotImplementedError

    @property
    def is_distributed(self) -> bool:
        """True if other workers are to be waited for."""
        return self.worker_count > 1


class LocalSync(GradientSync):
    """One worker alone: its gradient is the mean. Checks as the others do; any thread may call.

    Args:
        allow_non_finite: Let NaN and infinity through; the default refuses them.

    Examples:
        >>> sync = shardwell.LocalSync()
        >>> sync.worker_count, sync.is_distributed
        (1, False)
    """

    rank = 0

    def __init__(self, *, allow_non_finite: bool = False) -> None:
        self._allow_non_finite = allow_non_finite

    def __repr__(self) -> str:
        return "LocalSync()"

    @property
    def worker_count(self) -> int:
        """The worker alone: 1."""
        return 1

    def sync_gradients(self, array: Float32, *, sample_count: int = 1) -> None:
        """Leaves the array as it is; a `sample_count` of 0 makes zeros, as with several workers.

        Raises:
            ArgumentError: the array or the count can't be used.
            NonFiniteError: an element is NaN or infinite.
        """
        flat = as_output(array, None, "array")
        if check_integer("sample_count", sample_count, 0, SAMPLE_COUNT_MAX) == 0:
            flat.fill(0.0)
            return
        if not self._allow_non_finite:
            remedy = "skip or mend the step, or use LocalSync(allow_non_finite=True)"
            check_finite("array", flat, None, remedy=remedy, rank=0)


class GroupSync(GradientSync):
    """The workers of a group reduce among themselves.

    Args:
        group: What `shardwell.join_group` gave. It stays the caller's to close.
        timeout_s: Bound of each call; None is the group's own.

    Examples:
        >>> sync = shardwell.GroupSync(group)
        >>> gradient = np.ones(3, np.float32)
        >>> sync.sync_gradients(gradient)
        >>> sync.worker_count
        1
    """

    def __init__(self, group: Group, timeout_s: float | None = None) -> None:
        self.group = group
        """The group."""
        self._timeout_s = None if timeout_s is None else check_timeout(timeout_s)

    def __repr__(self) -> str:
        return f"GroupSync({self.group!r})"

    @property
    def rank(self) -> int:
        """This worker's rank among the group's members now."""
        return self.group.rank

    @property
    def worker_count(self) -> int:
        """The group's members now."""
        return self.group.size

    def sync_gradients(self, array: Float32, *, sample_count: int = 1) -> None:
        """Replaces the array by the mean of all members'; it travels in the group's codec.

        Raises:
            ShardwellError: as `Group.all_reduce`. After an error in the middle of it, each element
                is what it was, or final.
        """
        self.group.all_reduce(
            as_output(array, None, "array"),
            "mean",
            sample_count=sample_count,
            timeout_s=self._timeout_s,
        )


class ServerSync(GradientSync):
    """The shards of a cluster average. Each worker has its own client and parameter.

    It keeps one array as long as the parameter: an exchange reads the gradient until all of the
    mean has come. Threads that share it take turns.

    Args:
        parameter: Opened with `optimizer=shardwell.Average()` and in sync mode. A trainer's
            synchronises the loss too: its size is that of the weights and 1.
        timeout_s: Bound of each call; None is the client's.

    Raises:
        ArgumentError: the parameter has another optimizer or mode, or its steps may close without
            a worker (`members`, `min_contributors`): that one would have missed a mean, which the
            others have applied to their copies of the weights.

    Examples:
        >>> mean = client.parameter("synced", size=3, optimizer=shardwell.Average())
        >>> sync = shardwell.ServerSync(mean)
        >>> gradient = np.ones(3, np.float32)
        >>> sync.sync_gradients(gradient, sample_count=32)
    """

    def __init__(self, parameter: Parameter, timeout_s: float | None = None) -> None:
        if not isinstance(parameter, Parameter):
            raise ArgumentError(
                f"parameter must be made by Client.parameter(...); got {parameter!r:.80}"
            )
        spec = parameter.spec
        if not isinstance(spec.optimizer, Average) or spec.mode != "sync":
            raise ArgumentError(
                f"ServerSync needs a parameter with optimizer=shardwell.Average() and mode='sync'; "
                f"{spec.name!r} has {type(spec.optimizer).__name__} and mode={spec.mode!r}; "
                "open one of another name",
                parameter=spec.name,
            )
        if spec.has_open_sets:
            raise ArgumentError(
                f"ServerSync needs a parameter whose steps have all workers, for each applies the "
                f"means to weights of its own, and one that missed a step would have others; "
                f"{spec.name!r} has {spec.crew}, min_contributors={spec.min_contributors}; where "
                "workers come and go, the shards hold the weights: client.parameter(..., "
                "optimizer=shardwell.AdamW(...), members=...), or "
                "shardwell.join_group(elastic=True) and GroupSync",
                parameter=spec.name,
            )
        self.parameter = parameter
        """The parameter."""
        self._timeout_s = None if timeout_s is None else check_timeout(timeout_s)
        self._lock = threading.Lock()
        self._mean = np.empty(parameter.size, np.float32)

    def __repr__(self) -> str:
        return f"ServerSync({self.parameter!r})"

    @property
    def worker_count(self) -> int:
        """The parameter's workers."""
        return self.parameter.spec.worker_count

    def sync_gradients(
        self, array: Float32, *, sample_count: int = 1, batch: Sequence[Batch] = ()
    ) -> None:
        """Replaces `parameter.size` elements by the mean; they travel in the parameter's codec.

        Args:
            array: See `GradientSync`.
            sample_count: See `GradientSync`.
            batch: See `Parameter.put_gradient`.

        Raises:
            ShardwellError: as `Parameter.exchange`: call again, and nothing counts twice.
        """
        flat = as_output(array, None, "array")
        with self._lock:
            self.parameter.exchange(
                flat,
                sample_count=sample_count,
                batch=batch,
                out=self._mean,
                timeout_s=self._timeout_s,
            )
            np.copyto(flat, self._mean)

"""What a worker holds of a parameter or table: its spec, its calls, its learning rate, its end."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from typing_extensions import override

from shardwell.process.connected import Closing, Connected
from shardwell.rpc.call_scope import CallScope
from shardwell.rpc.cluster import Shards
from shardwell.rpc.retry import Attempts
from shardwell.specs.optimizers import Optimizer, check_learning_rate
from shardwell.steps.opening import Opening


class Spec(Protocol):
    """What specs of parameters and of tables have."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def mode(self) -> str:
        """When gradients count: "sync" or "async"."""

    @property
    def optimizer(self) -> Optimizer:
        """How it is trained."""


SpecT = TypeVar("SpecT", bound=Spec)


class Handle(Connected, Closing, Generic[SpecT]):
    """A context manager; leaving it closes the handle in this worker."""

    kind: ClassVar[str]
    """"parameter" or "table"."""
    _opening: Opening[Any, Any]

    def __init__(self, spec: SpecT, shards: Shards, *, timeout_s: float) -> None:
        self.spec: SpecT = spec
        """What all workers agreed on."""
        self.name: str = spec.name
        """Its name in the cluster."""
        self._what = f"{self.kind} {spec.name!r}"
        self._of: dict[str, Any] = {self.kind: spec.name}
        self._elsewhere = (
            f"connect in the other process, and open the {self.kind} there by its name"
        )
        self._shards = shards
        self._calls = CallScope(shards, timeout_s, self._what, **self._of)

    @property
    @abstractmethod
    def next_step(self) -> int:
        """The step that this worker's next gradient joins; a restarted worker goes on here.

        In asynchronous mode it is this worker's own count, from 0, and from 0 again when the shards
        have given its seat away meanwhile, for want of seats: see `Limits.worker_count_max`.
        """

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._calls.is_closed

    def set_learning_rate(
        self, learning_rate: float, *, now: bool = False, timeout_s: float | None = None
    ) -> None:
        """Changes the optimizer's learning rate on all shards, for all workers.

        Synchronous mode: takes effect at this worker's next step, which is the same update on every
        shard and chunk if this worker takes part. Asynchronous mode, or with `now`: at the first
        step that no chunk or row of a shard has reached, which may be another step on another
        shard.

        Raises:
            ArgumentError: the rate is negative or not finite, 0 with FTRL, or the optimizer has
                none.
            StepOrderError: shards are past this worker's next step; use `now`.
        """
        rate = check_learning_rate("learning_rate", learning_rate, self.spec.optimizer)

        def set_rate(attempts: Attempts) -> None:
            step = None
            if not now and self.spec.mode == "sync":
                step = self._opening.first_step_ahead(self.next_step, attempts)
            self._opening.set_learning_rate(rate, step, attempts)

        self._calls.run(set_rate, timeout_s, in_turn=True)

    @override
    def close(self) -> None:
        """Ends this worker's calls; what it opened lives on in the cluster.

        Calls of other threads end with ClosedError. From any thread; safe to repeat.
        """
        self._calls.close()

"""A watch over an update between two calls of `server_updates`, on the host.

The shards have made a step when an update returns. A wrapper that throws its state away, or weights
that something else has changed, are noticed at the next update, before that one is sent: a sample
of the weights, a few elements of each leaf, is compared with what the shards gave out last.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardwell.errors import ArgumentError
from shardwell.jax.tree_shape import TreeShape
from shardwell.numerics.codec import Float32

_LOG = logging.getLogger("shardwell")
_SAMPLE_COUNT = 4
"""Elements of each leaf that are compared, at most."""


class _Given(NamedTuple):
    step: int
    sample: Float32


class UpdateWatch:
    """Compares state and weights of each update with what the last one returned."""

    def __init__(self, name: str, shape: TreeShape) -> None:
        self._name = name
        self._names: list[str] = []
        self._places: list[Any] = []
        for tensor in shape.layout:
            count = min(_SAMPLE_COUNT, tensor.size)
            self._places.append(np.linspace(0, tensor.size - 1, count).astype(np.int64))
            self._names += [tensor.name] * count
        self._last: _Given | None = None
        self._has_returned = False
        self._given_out: dict[str, Float32] = {}
        """A sample of the weights that each call has returned last."""

    def sample(self, leaves: Sequence[Any]) -> Any:
        """A few elements of each leaf, one behind the other, as float32; traced where these are."""
        picked = [
            jnp.reshape(leaf, -1)[places].astype(jnp.float32)
            for leaf, places in zip(leaves, self._places, strict=True)
        ]
        return jnp.concatenate(picked)

    def rounding(self, leaves: Sequence[Any]) -> Float32:
        """The rounding error that a sum may have, relative to its terms, by element."""
        return np.concatenate(
            [
                np.full(
                    len(places), 2 * max(float(jnp.finfo(leaf.dtype).eps), 2.0**-23), np.float32
                )
                for leaf, places in zip(leaves, self._places, strict=True)
            ]
        )

    def gives_out(self, call: str, arrays: Sequence[Any]) -> None:
        """Notes weights that a call returns: "exchange" or "get_weights"."""
        with np.errstate(over="ignore"):
            picked = [
                np.asarray(array).reshape(-1)[places].astype(np.float32)
                for array, places in zip(arrays, self._places, strict=True)
            ]
        self._given_out[call] = np.concatenate(picked)
        self._has_returned |= call == "exchange"

    def begin(
        self, state_step: int, next_step: int, sample: Float32, rounding: Float32, follows: bool
    ) -> None:
        """Checks what an update is called with, before its gradient is sent.

        The first update of a process takes any state: one that was restored beside a cluster which
        has gone on. So does the one after an update that failed. `follows` says that the learning
        rate is computed of `next_step`, or stays as it is.
        """
        last = self._last if self._has_returned else None
        if last is not None and state_step not in (last.step + 1, next_step):
            raise ArgumentError(
                f"server_updates of {self._name!r}: the cluster has made step {last.step} with the "
                f"last update, and this one has a state of step {state_step}; expected that of "
                f"step {last.step + 1}: what called it, such as a wrapper that makes an update at "
                "each call and keeps one of several, has thrown the last state away; for "
                "accumulation take shardwell.jax.accumulate(transformation, every=4), and to go "
                "on with the cluster a new state, transformation.init(weights)"
            )
        if state_step != next_step:
            self._is_at_another_step(state_step, next_step, follows)
        if last is not None:
            self._check_weights(last, sample, rounding)
        self._last, self._has_returned = _Given(next_step, sample), False

    def _is_at_another_step(self, state_step: int, next_step: int, follows: bool) -> None:
        if not follows:
            raise ArgumentError(
                f"server_updates of {self._name!r}: the state is of step {state_step}, the cluster "
                f"is at step {next_step}, and the learning rate was computed before, such as by "
                "optax.inject_hyperparams; pass the schedule itself, server_updates(net, "
                "learning_rate=schedule), which has the cluster's step, or begin with a new state, "
                "transformation.init(weights)"
            )
        if self._last is None:
            _LOG.warning(
                "parameter %r: the optax state is of step %d, and the cluster is at step %d; "
                "server_updates goes on with the cluster's step and the learning rate of that; "
                "other transformations of the chain count in their own states",
                self._name,
                state_step,
                next_step,
            )

    def _check_weights(self, last: _Given, sample: Float32, rounding: Float32) -> None:
        others = []
        for given_out in self._given_out.values():
            with np.errstate(invalid="ignore", over="ignore"):
                bound = rounding * (np.abs(given_out) + np.abs(last.sample)) + 1e-37
                is_near = np.abs(sample - given_out) <= bound
            is_same = (sample == given_out) | (np.isnan(sample) & np.isnan(given_out))
            others.append(np.flatnonzero(~(is_near | is_same)))
        if all(len(found) for found in others):
            place = int(others[0][0])
            expected = next(iter(self._given_out.values()))
            raise ArgumentError(
                f"server_updates of {self._name!r}: leaf {self._names[place]!r} has a weight of "
                f"{sample[place]:.7g}, and the shards gave out {expected[place]:.7g} at step "
                f"{last.step}; their next weights would undo the change: nothing may follow "
                "server_updates in a chain or wrap it that changes updates or weights "
                "(optax.lookahead, add_decayed_weights), and weights are those of "
                "optax.apply_updates or net.get_weights(); decay and clipping are options of the "
                "shards' optimizer"
            )

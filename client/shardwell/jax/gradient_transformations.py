"""Gradient transformations as optax has them, that speak with shards or with a group's workers.

`optax.chain` takes them, and optax is not needed: a transformation is a pair of functions. Both
work inside `jax.jit` and outside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.group.group import Group
from shardwell.jax.callbacks import on_host
from shardwell.jax.tree_parameter import TreeParameter
from shardwell.jax.tree_shape import TreeShape
from shardwell.numerics.arguments import check_integer
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import WireName

_ACCUMULATED_MAX = 2**20


class GradientTransformation(NamedTuple):
    """A gradient transformation, which optax takes as its own.

    Examples:
        >>> transformation = shardwell.jax.mean_gradients(group)
        >>> isinstance(transformation, shardwell.jax.GradientTransformation)
        True
    """

    init: Callable[[Any], Any]
    """Takes the weights, returns the first state."""
    update: Callable[..., tuple[Any, Any]]
    """Takes gradients, state and weights; returns updates and the next state."""


class ServerState(NamedTuple):
    """The state of `server_updates`."""

    step: Any
    """The step that the next gradient joins, int32; a schedule's argument."""


def server_updates(
    net: TreeParameter,
    *,
    learning_rate: float | Callable[[Any], Any] | None = None,
    sample_count: int = 1,
    timeout_s: float | None = None,
) -> GradientTransformation:
    """Returns updates that make weights what the shards make of all workers' gradients.

        weights = optax.apply_updates(weights, updates)

    gives the shards' weights, up to the last bit's rounding. It comes last in a chain: what lies
    before it, such as `optax.clip_by_global_norm`, changes this worker's gradient. Its state begins
    at the cluster's next step, also where a worker starts again; a state that was saved at another
    step is taken once, with a log line, and the step is the cluster's.

    Each update is a step of the cluster, for good. An update that throws the last one's state away,
    or whose weights are not those that came of it, is an ArgumentError, and is not sent; a sample
    of the weights is compared. `accumulate` makes one update of several gradients.

    Args:
        net: The weights on the shards, whose optimizer makes the update.
        learning_rate: The optimizer's, or a schedule as optax has them: a function of the cluster's
            step. Default: as it is.
        sample_count: This worker's weight in the mean.
        timeout_s: See `Client`.

    Raises:
        ArgumentError: the optimizer of `net` is `Average`, which makes no updates. `init` raises it
            inside `optax.MultiSteps`, and `update` where optax has not kept the last update.

    Examples:
        >>> weights = {"kernel": jnp.ones(2)}
        >>> rule = shardwell.SGD(lr=0.5)
        >>> net = shardwell.jax.TreeParameter(client, "chain", weights, optimizer=rule)
        >>> transformation = shardwell.jax.server_updates(net)  # the last of an optax.chain
        >>> updates, state = transformation.update(weights, transformation.init(weights), weights)
        >>> updates["kernel"].tolist()
        [-0.5, -0.5]
    """
    if isinstance(net.parameter.spec.optimizer, Average):
        raise ArgumentError(
            f"{net!r} has the optimizer Average, whose weights are the mean gradient; take "
            "net.exchange for that, or give it an update rule, as shardwell.AdamW(3e-4)"
        )

    def init(weights: Any) -> ServerState:
        del weights
        if _is_inside_multi_steps():
            raise ArgumentError(
                "server_updates is inside optax.MultiSteps, which asks for an update at each "
                "mini-step and throws all but one of them away, and each is a step of the "
                "cluster; expected shardwell.jax.accumulate(transformation, every=4), which gives "
                "the numbers of optax.MultiSteps(transformation, 4)"
            )
        return ServerState(jnp.asarray(net.parameter.next_step, jnp.int32))

    def update(gradient: Any, state: ServerState, weights: Any = None) -> tuple[Any, ServerState]:
        if weights is None:
            raise ArgumentError(
                "server_updates needs the weights, too: call update(gradients, state, weights)"
            )
        follows = not isinstance(learning_rate, jax.Array)
        step = net._begin_update(state.step, weights, follows=follows)
        new = net.exchange(
            gradient,
            sample_count=sample_count,
            learning_rate=learning_rate(step) if callable(learning_rate) else learning_rate,
            timeout_s=timeout_s,
        )
        return jax.tree_util.tree_map(_difference, new, weights), ServerState(step + 1)

    return GradientTransformation(init, update)


class AccumulatedState(NamedTuple):
    """The state of `accumulate`."""

    count: Any
    """Gradients in the mean, int32."""
    mean: Any
    inner: Any


def accumulate(inner: Any, every: int) -> GradientTransformation:
    """Makes one update of the mean of several gradients, and none of the cluster's steps before.

        optimizer = shardwell.jax.accumulate(optax.chain(clip, server_updates(net)), every=4)

    The numbers of `optax.MultiSteps(inner, every)`, which asks `inner` for an update at each call
    and throws it away. This one asks at the last call, with the mean; updates are zeros before. A
    worker that starts again without its state begins the mean anew.

    Args:
        inner: A gradient transformation, such as `server_updates` or a chain that it ends.
        every: Calls for an update, 1 at least; all workers have the same.

    Raises:
        ArgumentError: `every` is no such number.

    Examples:
        >>> weights = {"kernel": jnp.ones(2)}
        >>> rule = shardwell.SGD(lr=0.5)
        >>> net = shardwell.jax.TreeParameter(client, "every", weights, optimizer=rule)
        >>> transformation = shardwell.jax.accumulate(shardwell.jax.server_updates(net), every=2)
        >>> state = transformation.init(weights)
        >>> updates, state = transformation.update({"kernel": jnp.zeros(2)}, state, weights)
        >>> updates["kernel"].tolist()
        [0.0, 0.0]
        >>> updates, state = transformation.update(weights, state, weights)
        >>> updates["kernel"].tolist()
        [-0.25, -0.25]
    """
    check_integer("every", every, 1, _ACCUMULATED_MAX)

    def init(weights: Any) -> AccumulatedState:
        zeros = jax.tree_util.tree_map(lambda leaf: jnp.zeros_like(leaf, _wide(leaf)), weights)
        return AccumulatedState(jnp.zeros((), jnp.int32), zeros, inner.init(weights))

    def update(
        gradient: Any, state: AccumulatedState, weights: Any = None, **extra: Any
    ) -> tuple[Any, AccumulatedState]:
        mean = jax.tree_util.tree_map(
            lambda new, mean: mean + (new - mean) / (state.count + 1), gradient, state.mean
        )

        def make_update() -> tuple[Any, AccumulatedState]:
            given = jax.tree_util.tree_map(
                lambda leaf, new: leaf.astype(jnp.result_type(new)), mean, gradient
            )
            updates, after = inner.update(given, state.inner, weights, **extra)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, mean)
            return updates, AccumulatedState(jnp.zeros_like(state.count), zeros, after)

        def wait() -> tuple[Any, AccumulatedState]:
            updates = jax.tree_util.tree_map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make_update)[0]
            )
            return updates, AccumulatedState(state.count + 1, mean, state.inner)

        made: tuple[Any, AccumulatedState] = jax.lax.cond(
            state.count == every - 1, make_update, wait
        )
        return made

    return GradientTransformation(init, update)


def mean_gradients(
    group: Group,
    *,
    sample_count: int = 1,
    codec: WireName | None = None,
    timeout_s: float | None = None,
) -> GradientTransformation:
    """Each gradient's mean over the workers of a group, which needs no server.

        optimizer = optax.chain(shardwell.jax.mean_gradients(group), optax.adamw(3e-4))

    All ranks end with the same bits, so that weights that were the same stay the same. Ranks make
    the same calls, with trees of the same size.

    Args:
        group: Made by `shardwell.join_group`.
        sample_count: This worker's weight in the mean.
        codec: See `Group.all_reduce`.
        timeout_s: See `Group.all_reduce`.

    Examples:
        >>> transformation = shardwell.jax.mean_gradients(group)  # the first of an optax.chain
        >>> gradients = {"kernel": jnp.ones(2)}
        >>> means, state = transformation.update(gradients, transformation.init(gradients))
        >>> means["kernel"].tolist()
        [1.0, 1.0]
    """

    def init(weights: Any) -> tuple[()]:
        del weights
        return ()

    def update(gradient: Any, state: Any, weights: Any = None) -> tuple[Any, Any]:
        del weights
        shape = TreeShape("gradient", gradient)

        def reduce(*leaves: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
            flat = shape.flat(leaves)
            group.all_reduce(
                flat, "mean", sample_count=sample_count, codec=codec, timeout_s=timeout_s
            )
            return shape.split(flat)

        leaves = shape.leaves_of("gradient", gradient)
        return shape.tree(on_host(reduce, shape.as_structs(), leaves)), state

    return GradientTransformation(init, update)


def _difference(new: Any, old: Any) -> Any:
    """Returns new - old, in float32 at least: added to weights of fewer bits, it gives `new`."""
    return jnp.asarray(new, _wide(new)) - jnp.asarray(old, _wide(new))


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(jnp.result_type(leaf), jnp.float32)


def _is_inside_multi_steps() -> bool:
    """Returns True in a call of `init` of `optax.MultiSteps`.

    Nothing in the first update's values says that its result will be thrown away, and it would
    count.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_qualname == "MultiSteps.init" and module.startswith("optax."):
            return True
        frame = frame.f_back
    return False

"""Gradient transformations as optax has them, that speak with shards or with a group's workers.

`optax.chain` takes them, and optax is not needed: a transformation is a pair of functions. Both
work inside `jax.jit` and outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.group.group import Group
from shardwell.jax.callbacks import on_host
from shardwell.jax.tree_parameter import TreeParameter
from shardwell.jax.tree_shape import TreeShape
from shardwell.specs.optimizers import Average
from shardwell.specs.parameter import WireName


class GradientTransformation(NamedTuple):
    """What optax calls so, and takes as one.

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
    """State of `server_updates`."""

    step: Any
    """The step that the next gradient joins, int32; a schedule's argument."""


def server_updates(
    net: TreeParameter,
    *,
    learning_rate: float | Callable[[Any], Any] | None = None,
    sample_count: int = 1,
    timeout_s: float | None = None,
) -> GradientTransformation:
    """Updates that make weights what the shards make of all workers' gradients.

        weights = optax.apply_updates(weights, updates)

    gives the shards' weights, up to the last bit's rounding. It comes last in a chain: what lies
    before it, such as `optax.clip_by_global_norm`, changes this worker's gradient. Its state begins
    at the cluster's next step, also where a worker starts again.

    Args:
        net: The weights on the shards, whose optimizer makes the update.
        learning_rate: The optimizer's, or a schedule as optax has them: a function of the step.
            Default: as it is.
        sample_count: This worker's weight in the mean.
        timeout_s: See `Client`.

    Raises:
        ArgumentError: the optimizer of `net` is `Average`, which makes no updates.

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
        return ServerState(jnp.asarray(net.parameter.next_step, jnp.int32))

    def update(gradient: Any, state: ServerState, weights: Any = None) -> tuple[Any, ServerState]:
        if weights is None:
            raise ArgumentError(
                "server_updates needs the weights, too: call update(gradients, state, weights)"
            )
        new = net.exchange(
            gradient,
            sample_count=sample_count,
            learning_rate=learning_rate(state.step) if callable(learning_rate) else learning_rate,
            timeout_s=timeout_s,
        )
        return jax.tree_util.tree_map(_difference, new, weights), ServerState(state.step + 1)

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
    """In float32 at least: added to weights of fewer bits, it gives the new ones."""
    wide = jnp.promote_types(jnp.result_type(new), jnp.float32)
    return jnp.asarray(new, wide) - jnp.asarray(old, wide)

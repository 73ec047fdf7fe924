"""Shardwell for JAX; needs the extra `jax`.

net = shardwell.jax.TreeParameter(client, "net", weights, optimizer=shardwell.AdamW(3e-4))

@jax.jit
def train_step(weights, batch):
    return net.exchange(jax.grad(loss_of)(weights, batch))

weights = net.get_weights(min_version=net.parameter.next_step)
for batch in batches:
    weights = train_step(weights, batch)
"""

from shardwell.process.environment import install_command

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        f"shardwell.jax needs JAX; run: {install_command('jax>=0.4.38')}", name="jax"
    ) from None

from shardwell.jax.callbacks import named_errors
from shardwell.jax.gradient_transformations import (
    GradientTransformation,
    accumulate,
    mean_gradients,
    server_updates,
)
from shardwell.jax.tree_parameter import TreeParameter

__all__ = [
    "GradientTransformation",
    "TreeParameter",
    "accumulate",
    "mean_gradients",
    "named_errors",
    "server_updates",
]

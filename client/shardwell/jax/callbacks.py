"""Calls of the SDK out of programs that JAX has compiled, and their errors.

A function that blocks on the network can't be compiled: inside `jit` it becomes an ordered
`io_callback`, which runs in the order of the program, once each time. Its error ends the program;
XLA hands on the error's text alone, in a JaxRuntimeError where the results are waited for, and JAX
gives the same error again to every later ordered callback of the thread. `named_errors` mends both.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import io_callback

from shardwell.errors import ShardwellError

_raised: collections.deque[BaseException] = collections.deque(maxlen=16)
"""The last errors of callbacks, without their frames. Global, as nothing but an error's text comes
from the thread on which XLA runs a callback to the one that waits for the program."""


def is_traced(values: Sequence[Any]) -> bool:
    """True if JAX is tracing: values are tracers, or what is computed now would be one."""
    is_tracer = [isinstance(value, jax.core.Tracer) for value in values]
    return any(is_tracer) or isinstance(jnp.zeros(()), jax.core.Tracer)


def on_host(
    function: Callable[..., list[npt.NDArray[Any]]],
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Any],
) -> list[Any]:
    """Calls a function of NumPy arrays for JAX's, inside `jit` and outside.

    It takes the operands, all fetched at once, and returns arrays that no code changes again.
    """
    if is_traced(operands):

        def called(*arrays: Any) -> list[npt.NDArray[Any]]:
            try:
                return function(*[np.asarray(array) for array in arrays])
            except BaseException as error:
                _raised.append(copy.copy(error).with_traceback(None))
                raise

        arrays = io_callback(called, list(results), *operands, ordered=True)
        # What a callback returns is on one of a program's devices, in a way that JAX knows no more
        # of outside; what lies behind a barrier is where the program's other arrays are.
        return list(jax.lax.optimization_barrier(arrays))
    return list(jax.device_put(function(*jax.device_get(list(operands)))))


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Raises what failed inside compiled functions as the ShardwellError that it was.

        with shardwell.jax.named_errors():
            weights = train_step(weights, batch)

    The block ends when the ordered callbacks that this thread has dispatched have ended. After an
    error the same functions may be called again; without the block, JAX would give the same error
    to each later call of this thread.

    Raises:
        ShardwellError: of an exchange, or of a group's call, in the block.
        KeyboardInterrupt: it came while one waited.

    Examples:
        >>> with shardwell.jax.named_errors():  # errors inside jit come out as what they are
        ...     total = jax.jit(jnp.sum)(jnp.ones(3))
    """
    _forget_failure()
    try:
        yield
        jax.effects_barrier()
    except Exception as error:
        if isinstance(error, ShardwellError):
            raise
        named = _raised_as(str(error))
        if named is None:
            raise
        _forget_failure()
        raise named from None


def _raised_as(text: str) -> BaseException | None:
    """The last error of a callback that a text tells of."""
    for error in reversed(_raised):
        said = str(error)
        if (f"{type(error).__name__}: {said}" if said else type(error).__name__) in text:
            return copy.copy(error)
    return None


def _forget_failure() -> None:
    """Lets ordered callbacks of this thread run again, after one has failed."""
    try:
        jax.effects_barrier()
    except Exception:
        # A failed order is kept for the thread, and JAX has no public way to begin another.
        from jax._src import dispatch

        dispatch.runtime_tokens.clear()

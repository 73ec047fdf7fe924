"""A pytree of weights that live on the shards."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shardwell.client import Client, check_client
from shardwell.errors import ArgumentError, ShardwellError
from shardwell.jax.callbacks import is_traced, on_host
from shardwell.jax.tree_shape import TreeShape
from shardwell.jax.update_watch import UpdateWatch
from shardwell.numerics.arguments import check_integer
from shardwell.numerics.codec import Float32
from shardwell.parameter.dealing import Batch
from shardwell.parameter.feedback import Outcome
from shardwell.parameter.parameter import LateName, Parameter
from shardwell.parameter.values import NamedArrays, TensorViews
from shardwell.process.connected import Connected
from shardwell.specs.layout import TensorGroup
from shardwell.specs.members import Elastic
from shardwell.specs.optimizers import Optimizer
from shardwell.specs.parameter import CodecName, ModeName
from shardwell.specs.samples import Samples

ResultT = TypeVar("ResultT")
_PER_STEP_MAX = 2**20


class _Gradient(NamedTuple):
    step: int
    values: Float32
    sample_count: Any
    learning_rate: float | None
    batches: tuple[Batch, ...] = ()

    def is_same(self, other: _Gradient) -> bool:
        bits = self.values.view(np.uint32), other.values.view(np.uint32)
        return self[2:4] == other[2:4] and np.array_equal(*bits)


class TreeParameter(Connected):
    """Weights on the shards, as a pytree: gradients out, weights in, inside `jit` and outside.

    Each leaf is a tensor of one parameter, named by its path, as "dense/kernel". The shards have
    float32; weights come back in the structure, shapes and dtypes of `weights`, as new arrays on
    the default device, or inside `jit` on those of the program, which exchanges once.

    `exchange` and `get_weights` work inside `jax.jit`, `lax.scan` and the like, where they become
    ordered callbacks; not under `vmap` or `grad`, which don't know what the shards do. An error
    inside is a JaxRuntimeError with the text; `shardwell.jax.named_errors` makes it the
    ShardwellError. One thread at a time uses a TreeParameter.

    A gradient that failed because a shard or a worker was away is made good by the next call: with
    the same gradient it counts once, and before another one it is counted first.

    Args:
        client: Made by `shardwell.connect`. It stays the caller's to close.
        name: Name of the parameter on the cluster.
        weights: First weights, of which the first worker's count, and what the tree looks like:
            floating point arrays. A worker that starts again goes on with the cluster's. Of a flax
            `nnx.State` the Params are trained and returned, as `nnx.grad` and `nnx.update` have
            them; what else is in it stays the worker's own.
        optimizer: The update rule on the shards, such as `shardwell.AdamW(3e-4)`.
        worker_count: Workers that make a step; default: 1.
        members: In place of worker_count: workers come and go; see `Elastic`. Each loops over
            `batches`, or while `parameter.next_step` is below the last: it may skip steps.
        min_contributors: See `Client.parameter`.
        grace_s: See `Client.parameter`.
        late: See `Client.parameter`.
        groups: Tensors that are updated in their own way, such as `TensorGroup("*/bias", ...)`.
        codec: How gradients and weights travel; see `Client.parameter`.
        mode: "sync" or "async"; see `Client.parameter`.
        allow_non_finite: See `Client.parameter`.

    Raises:
        ArgumentError: a leaf can't be a tensor; names it. Or it is made inside `jit`.
        SpecMismatchError: the cluster has another tree under that name; names the tensor.
        ShardwellError: as `Client.parameter` and `Parameter.init`.

    Examples:
        >>> weights = {"kernel": jnp.zeros((2, 2))}
        >>> rule = shardwell.SGD(lr=0.5)
        >>> net = shardwell.jax.TreeParameter(client, "tree", weights, optimizer=rule)
        >>> weights = jax.jit(net.exchange)({"kernel": jnp.ones((2, 2))})
        >>> weights["kernel"][0].tolist()
        [-0.5, -0.5]
    """

    _elsewhere = "connect in the other process, and make a TreeParameter there"

    def __init__(
        self,
        client: Client,
        name: str,
        weights: Any,
        *,
        optimizer: Optimizer,
        worker_count: int | None = None,
        members: Elastic | None = None,
        min_contributors: int = 0,
        grace_s: float = 0.0,
        late: LateName = "drop",
        groups: Sequence[TensorGroup] = (),
        codec: CodecName = "fp16",
        mode: ModeName = "sync",
        allow_non_finite: bool = False,
    ) -> None:
        check_client(client)
        what = f"weights of {name!r}"
        self._shape = TreeShape(what, weights)
        leaves = self._shape.leaves_of(what, weights)
        _refuse_traced(leaves, "a TreeParameter is made")
        self.parameter: Parameter[NamedArrays] = client.parameter(
            name,
            tensors={tensor.name: tensor.shape for tensor in self._shape.layout},
            groups=groups,
            optimizer=optimizer,
            **Elastic.crew(worker_count, members),
            min_contributors=min_contributors,
            grace_s=grace_s,
            late=late,
            codec=codec,
            mode=mode,
            allow_non_finite=allow_non_finite,
        )
        """The parameter beneath: `next_step`, `version`, `reopen`."""
        self._owed: _Gradient | None = None
        """The gradient of a call that failed, which may be counted in part or as a whole."""
        self._drawn: deque[Batch] = deque()
        """Batches that `batches` has yielded, and no gradient was given of."""
        self._per_step = 1
        self._watch = UpdateWatch(name, self._shape)
        self.parameter.init(self._views(self._shape.flat(jax.device_get(leaves))))

    def __repr__(self) -> str:
        return f"TreeParameter({self.parameter!r})"

    @property
    def outcome(self) -> Outcome | None:
        """The part of this worker's last gradient that the shards counted; None: it gave none.

        Inside `jit` that is when its program has run: wait for the weights before.
        """
        return self.parameter.outcome

    def get_weights(self, *, min_version: int = 0, timeout_s: float | None = None) -> Any:
        """The weights, as the shards have them now: a tree of new arrays. Inside `jit`, too.

        Args:
            min_version: See `Parameter.get_weights`.
            timeout_s: See `Client`.

        Raises:
            ShardwellError: as `Parameter.get_weights`.
        """

        def get() -> list[npt.NDArray[Any]]:
            weights = self.parameter.get_weights(min_version=min_version, timeout_s=timeout_s)
            return self._arrays("get_weights", weights)

        return self._shape.tree(on_host(get, self._shape.as_structs(), ()))

    def batches(
        self, samples: Samples, *, epochs: int | None = None, per_step: int = 1
    ) -> Iterator[Batch]:
        """Yields batches of a dataset, so that each sample counts once an epoch, on all workers.

            for batch in net.batches(shardwell.Samples(len(data), batch_size=32), epochs=10):
                weights = step(weights, data[batch.indices])  # which exchanges a gradient

        Gradients are of the batches in their order, inside `jit` too, where a program may run
        later: the next one to be exchanged is of the first that none was given of. So each batch
        that is yielded is for one gradient; `give_back` takes one for which there is none. See
        `Parameter.batches`.

        Args:
            samples: The dataset; all workers give the same.
            epochs: Times that each sample is to count in all. Default: no end.
            per_step: Batches of a gradient, as `every` of `accumulate` says.

        Raises:
            ArgumentError: `per_step` is not 1 at least.
            ShardwellError: as `Parameter.batches`.
        """
        self._per_step = check_integer("per_step", per_step, 1, _PER_STEP_MAX)
        for batch in self.parameter.batches(samples, epochs=epochs):
            self._drawn.append(batch)
            yield batch

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Gives back batches of which no gradient will come: they are dealt again."""
        for batch in batches:
            with contextlib.suppress(ValueError):
                self._drawn.remove(batch)
        self.parameter.give_back(batches)

    def exchange(
        self,
        gradient: Any,
        *,
        sample_count: Any = 1,
        learning_rate: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Adds a gradient to this worker's next step; returns the weights after it. Blocks.

        Inside `jit`, too: there the program waits for the other workers.

        Args:
            gradient: A tree as the weights, of any floating point types and on any device.
            sample_count: Weight in the step's mean; see `Parameter.put_gradient`. A number, or
                inside `jit` an integer that was computed there.
            learning_rate: The optimizer's from this step on; see `Parameter.put_gradient`. The
                same, as float32 where it was computed.
            timeout_s: See `Client`.

        Returns:
            The weights after this step, a tree of new arrays.

        Raises:
            ArgumentError: the gradient is another tree, or a leaf has another shape or no floating
                point numbers; names it. Nothing was sent.
            ShardwellError: as `Parameter.exchange`. The step is still this worker's next: call
                again.
        """
        leaves = self._shape.leaves_of(self._what, gradient)
        options = [sample_count, learning_rate]
        computed = [place for place, option in enumerate(options) if isinstance(option, jax.Array)]

        def exchange(*operands: Any) -> list[npt.NDArray[Any]]:
            given = list(options)
            for place, value in zip(computed, operands[len(leaves) :], strict=True):
                given[place] = value[()]
            made = self._gradient(operands[: len(leaves)], *given)
            weights = self._counted(made, self.parameter.exchange, timeout_s)
            return self._arrays("exchange", weights)

        operands = [*leaves, *(options[place] for place in computed)]
        return self._shape.tree(on_host(exchange, self._shape.as_structs(), operands))

    def put_gradient(
        self,
        gradient: Any,
        *,
        sample_count: int = 1,
        learning_rate: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Adds a gradient to this worker's next step, without waiting for the weights.

        Not inside `jit`. See `exchange`, and `Parameter.put_gradient`.

        Returns:
            The step that it joined; `get_weights(min_version=step + 1)` has its effect.
        """
        leaves = self._shape.leaves_of(self._what, gradient)
        _refuse_traced(leaves, "put_gradient is called")
        made = self._gradient(jax.device_get(leaves), sample_count, learning_rate)
        return self._counted(made, self.parameter.put_gradient, timeout_s)

    def _begin_update(self, state_step: Any, weights: Any, *, follows: bool) -> Any:
        """Returns the next step of `server_updates`; raises what `UpdateWatch.begin` does."""
        leaves = self._shape.leaves_of(f"weights of {self.parameter.name!r}", weights)
        rounding = self._watch.rounding([jnp.asarray(leaf) for leaf in leaves])

        def begin(state_step: Any, sample: Any) -> list[npt.NDArray[Any]]:
            step = self.parameter.next_step
            self._watch.begin(int(state_step), step, np.array(sample), rounding, follows)
            return [np.asarray(step, np.int32)]

        operands = [jnp.asarray(state_step, jnp.int32), self._watch.sample(leaves)]
        return on_host(begin, [jax.ShapeDtypeStruct((), jnp.int32)], operands)[0]

    @property
    def _what(self) -> str:
        return f"gradient of {self.parameter.name!r}"

    def _gradient(self, leaves: Sequence[Any], sample_count: Any, learning_rate: Any) -> _Gradient:
        rate = None if learning_rate is None else float(learning_rate)
        return _Gradient(self.parameter.next_step, self._shape.flat(leaves), sample_count, rate)

    def _counted(
        self, work: _Gradient, send: Callable[..., ResultT], timeout_s: float | None
    ) -> ResultT:
        """Makes a call that counts a gradient, once the one that is owed is counted."""
        owed = self._owed
        if owed is not None and owed.step == self.parameter.next_step:
            if owed.is_same(work):
                return self._owing(owed, send, timeout_s)
            self._owing(owed, self.parameter.put_gradient, timeout_s)
        count = min(self._per_step, len(self._drawn))
        batches = tuple(self._drawn.popleft() for _ in range(count))
        work = work._replace(step=self.parameter.next_step, batches=batches)
        return self._owing(work, send, timeout_s)

    def _owing(
        self, work: _Gradient, send: Callable[..., ResultT], timeout_s: float | None
    ) -> ResultT:
        """Makes a call; the gradient is owed if it failed for want of a shard or a worker."""
        self._owed = None
        try:
            return send(
                self._views(work.values),
                sample_count=work.sample_count,
                learning_rate=work.learning_rate,
                batch=work.batches,
                timeout_s=timeout_s,
            )
        except BaseException as error:
            is_refused = isinstance(error, ShardwellError) and not error.retryable
            if not is_refused and self.parameter.next_step == work.step:
                self._owed = work
            raise

    def _views(self, flat: Float32) -> TensorViews:
        assert self.parameter.spec.layout is not None
        return TensorViews(self.parameter.spec.layout, flat)

    def _arrays(self, call: str, weights: NamedArrays) -> list[npt.NDArray[Any]]:
        """The leaves in their dtypes. These weights do not change again: each call has new ones."""
        arrays = self._shape.cast(list(weights.values()))
        self._watch.gives_out(call, arrays)
        return arrays


def _refuse_traced(leaves: Sequence[Any], what: str) -> None:
    if is_traced(leaves):
        raise ArgumentError(
            f"{what} inside jit, where values are traced and not there yet; do it outside; "
            "exchange and get_weights work inside"
        )

"""A pytree's leaves as named tensors that lie one behind the other in one vector, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32
from shardwell.specs.layout import TensorLayout

_ONLY_LEAF = "array"


class _Leaf(NamedTuple):
    path: str
    """As jax writes it: "['dense']['kernel']"."""
    name: str
    dtype: Any
    """Dtype of the array that the caller gets; a floating point type of JAX's."""
    shape: tuple[int, ...]


class TreeShape:
    """The structure of a tree, and the name, shape and dtype of each leaf.

    Names are the leaves' paths, as "dense/kernel" or "layers/0/bias"; the order is JAX's, which
    sorts the keys of dicts. Of a flax `nnx.State` they are those of `nnx.to_pure_dict`, and its
    Params are the tree: statistics and random keys stay the worker's own.
    """

    def __init__(self, what: str, tree: Any) -> None:
        tree = _trained(tree)
        is_variable = _variables(tree)
        found, structure = jax.tree_util.tree_flatten_with_path(tree)
        self._structure: Any = structure
        self._leaves = [
            _Leaf(
                jax.tree_util.keystr(path),
                name := _name(path[:-1] if path[:-1] in is_variable else path),
                _float_type(f"{what}: leaf {name!r}", leaf),
                tuple(jnp.shape(leaf)),
            )
            for path, leaf in found
        ]
        if not self._leaves:
            raise ArgumentError(f"{what} must have an array at least; got {tree!r:.80}")
        by_name: dict[str, _Leaf] = {}
        for leaf in self._leaves:
            other = by_name.setdefault(leaf.name, leaf)
            if other is not leaf:
                raise ArgumentError(
                    f"{what}: leaves {other.path} and {leaf.path} would both be tensor "
                    f"{leaf.name!r}; rename one"
                )
        self.layout = TensorLayout.of({leaf.name: leaf.shape for leaf in self._leaves})

    def leaves_of(self, what: str, tree: Any) -> list[Any]:
        """The leaves of another tree, which has this structure and these shapes."""
        tree = _trained(tree)
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._structure:
            raise self._other_structure(what, tree)
        for leaf, value in zip(self._leaves, leaves, strict=True):
            _float_type(f"{what}: leaf {leaf.name!r}", value)
            if jnp.shape(value) != leaf.shape:
                raise ArgumentError(
                    f"{what}: leaf {leaf.name!r} must have shape {leaf.shape}; got "
                    f"{jnp.shape(value)}"
                )
        return list(leaves)

    def flat(self, leaves: Sequence[Any]) -> Float32:
        """Returns the vector, (size,) float32, copied, of leaves that `leaves_of` has checked."""
        flat: Float32 = np.empty(self.layout.size, np.float32)
        with np.errstate(over="ignore"):  # what becomes infinite is found by the check
            for tensor, leaf in zip(self.layout, leaves, strict=True):
                flat[tensor.offset : tensor.stop] = np.asarray(leaf).reshape(-1)
        return flat

    def split(self, flat: Float32) -> list[npt.NDArray[Any]]:
        """The leaves that lie in a vector, each in its dtype: views of it where that is float32."""
        return self.cast([flat[t.offset : t.stop].reshape(t.shape) for t in self.layout])

    def cast(self, leaves: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """The leaves, each in its dtype; the same arrays where they have it."""
        with np.errstate(over="ignore"):  # float16 has infinity for what is beyond it
            return [
                each.astype(leaf.dtype, copy=False)
                for leaf, each in zip(self._leaves, leaves, strict=True)
            ]

    def as_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the leaves, as JAX's callbacks want them."""
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._leaves]

    def tree(self, leaves: Sequence[Any]) -> Any:
        """The tree that has these leaves."""
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def _other_structure(self, what: str, tree: Any) -> ArgumentError:
        is_variable = _variables(tree)
        found = [
            _name(path[:-1] if path[:-1] in is_variable else path)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        expected = [leaf.name for leaf in self._leaves]
        for name in expected:
            if name not in found:
                return ArgumentError(
                    f"{what} lacks leaf {name!r}; its structure must be that of the weights"
                )
        for name in found:
            if name not in expected:
                return ArgumentError(
                    f"{what} has a leaf {name!r}, which the weights have not; its structure must "
                    "be theirs"
                )
        return ArgumentError(
            f"{what} has the leaves of the weights in other containers: expected "
            f"{self._structure!s:.400}; got {jax.tree_util.tree_structure(tree)!s:.400}"
        )


def _trained(tree: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")  # a tree of its types comes from who has imported it
    return nnx.filter_state(tree, nnx.Param) if nnx and isinstance(tree, nnx.State) else tree


def _variables(tree: Any) -> set[tuple[Any, ...]]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return set()
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda each: isinstance(each, nnx.Variable)
    )
    return {path for path, leaf in found if isinstance(leaf, nnx.Variable)}


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(_key, path)) if path else _ONLY_LEAF


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _float_type(what: str, leaf: Any) -> Any:
    try:
        dtype = jnp.result_type(leaf)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{what} must be an array of floating point numbers; got {type(leaf).__name__}; take "
            "it out of the tree"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentError(
            f"{what} is {dtype}; only floating point numbers are trained; take it out of the tree "
            "(of a flax model, pass nnx.state(model, nnx.Param))"
        )
    return dtype

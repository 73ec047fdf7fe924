"""A learner's saved state of outer training, read from a file that may be anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwell.errors import ArgumentError
from shardwell.numerics.codec import Float32
from shardwell.specs.checks import brief
from shardwell.specs.parameter import STEP_MAX


@dataclass(frozen=True)
class SavedFragment:
    """One fragment of a state."""

    version: int
    """Outer steps that its image had seen."""
    sample_count: int
    moved: Float32 | None
    """(size,): local weights less the image; None: they were not kept."""
    residual: Float32 | None
    """(size,): what rounding has left to send; None: nothing."""


def checked_state(
    state: Any, name: str, fragments: Sequence[tuple[Sequence[str], int]]
) -> tuple[int, list[SavedFragment]]:
    """Returns the inner steps and fragments of a state of the family of that name.

    `fragments` has the names of each one's tensors, and its element count.
    """
    if not isinstance(state, Mapping) or not {"name", "inner_step", "fragments"} <= set(state):
        raise ArgumentError(
            f"load_state_dict of {name!r}: expected name, inner_step and fragments, as "
            f"state_dict() returns them; got {brief(state)}"
        )
    if state["name"] != name:
        raise ArgumentError(
            f"load_state_dict: the state is of {brief(state['name'])}, and this family is {name!r}"
        )
    inner_step = _number(name, "inner_step", state["inner_step"], STEP_MAX)
    saved = state["fragments"]
    if not isinstance(saved, list) or len(saved) != len(fragments):
        count = len(saved) if isinstance(saved, list) else brief(saved)
        raise ArgumentError(
            f"load_state_dict of {name!r}: the state has {count} fragments, and the family "
            f"{len(fragments)}"
        )
    return inner_step, [
        _fragment(f"{name!r}, fragment {index}", each, tensors, size)
        for index, (each, (tensors, size)) in enumerate(zip(saved, fragments, strict=True))
    ]


def _fragment(what: str, saved: Any, tensors: Sequence[str], size: int) -> SavedFragment:
    known = {"tensors", "version", "sample_count", "moved", "residual"}
    if not isinstance(saved, Mapping) or set(saved) != known:
        raise ArgumentError(
            f"load_state_dict of {what}: expected {', '.join(sorted(known))}; got {brief(saved)}"
        )
    if saved["tensors"] != list(tensors):
        raise ArgumentError(
            f"load_state_dict of {what}: the state has the tensors {brief(saved['tensors'])}, and "
            f"the family {brief(list(tensors))}; give it the same model, fragments and assignment"
        )
    return SavedFragment(
        _number(what, "version", saved["version"], STEP_MAX),
        _number(what, "sample_count", saved["sample_count"], STEP_MAX),
        _array(what, "moved", saved["moved"], size),
        _array(what, "residual", saved["residual"], size),
    )


def _number(what: str, field: str, value: Any, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise ArgumentError(
            f"load_state_dict of {what}: {field} must be a whole number from 0 to {high}; got "
            f"{brief(value)}"
        )
    return value


def _array(what: str, field: str, value: Any, size: int) -> Float32 | None:
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != (size,):
        got = (
            f"{value.dtype} of shape {value.shape}"
            if isinstance(value, np.ndarray)
            else brief(value)
        )
        raise ArgumentError(
            f"load_state_dict of {what}: {field} must be float32 of shape ({size},); got {got}"
        )
    if not np.isfinite(value).all():
        raise ArgumentError(f"load_state_dict of {what}: {field} has values that are not finite")
    return value

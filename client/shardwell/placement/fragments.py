"""The dealing of a model's tensors into fragments, which are exchanged one at a time. Pure.

The same on every machine: learners that open one family at once must agree on it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from shardwell.errors import ArgumentError

FRAGMENT_COUNT_MAX = 128
"""Fragments of a family, which may all be under way at once: half of a client's calls."""
STRIDED, BALANCED = "strided", "balanced"
ASSIGNMENTS = (STRIDED, BALANCED)
Patterns: TypeAlias = Sequence[str | Sequence[str]]
"""Regular expressions, one or several a fragment."""


def deal_fragments(
    sizes: Mapping[str, int], fragments: int | Patterns, assignment: str = STRIDED
) -> list[list[str]]:
    """The names of each fragment's tensors, in the order in which they were given.

    "strided": a tensor's layer is the first whole number among the parts of its name, and layers
    are dealt in turn, so that each fragment has some of every depth: of "blocks.3.mlp.w", with 4
    fragments, the fourth (Douillard et al., Streaming DiLoCo, 2025). Each module whose tensors have
    no number is a layer behind those. "balanced": the largest tensor first, of equal ones by name,
    each to the fragment that has the fewest elements. Patterns: the first that is found in a name
    decides.

    Raises:
        ArgumentError: a fragment would have no tensor, or a tensor no fragment; names it.
    """
    if not isinstance(fragments, int):
        return _by_patterns(sizes, checked_patterns(fragments))
    if isinstance(fragments, bool) or not 1 <= fragments <= FRAGMENT_COUNT_MAX:
        raise ArgumentError(
            f"fragments must be from 1 to {FRAGMENT_COUNT_MAX}, or patterns; got {fragments!r}"
        )
    if assignment == STRIDED:
        return _strided(sizes, fragments)
    if assignment == BALANCED:
        return _balanced(sizes, fragments)
    raise ArgumentError(f"assignment must be one of {ASSIGNMENTS}; got {assignment!r:.80}")


def assignment_name(fragments: int | Patterns, assignment: str = STRIDED) -> str:
    """The name of a way to deal tensors in a family's spec; other patterns have another."""
    if isinstance(fragments, int):
        return assignment
    patterns = json.dumps(checked_patterns(fragments), separators=(",", ":"))
    return f"patterns:{hashlib.sha256(patterns.encode()).hexdigest()[:16]}"


def checked_patterns(patterns: Patterns) -> list[list[str]]:
    """Compiles each fragment's regular expressions; ArgumentError: one is none."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise ArgumentError(
            "fragments must be a number, or a list with the patterns of each fragment, such as "
            f"['encoder', 'decoder|head']; got {patterns!r:.80}"
        )
    if not 1 <= len(patterns) <= FRAGMENT_COUNT_MAX:
        raise ArgumentError(
            f"fragments must be from 1 to {FRAGMENT_COUNT_MAX}; got {len(patterns)} patterns"
        )
    found = [[each] if isinstance(each, str) else list(each) for each in patterns]
    for number, own in enumerate(found):
        for pattern in own:
            try:
                re.compile(pattern)
            except (re.error, TypeError, RecursionError) as error:
                raise ArgumentError(
                    f"fragments[{number}]: {pattern!r:.80} is no regular expression: {error}"
                ) from None
    return found


def _strided(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    layers: dict[int | str, list[str]] = {}
    for name in sizes:
        layers.setdefault(_layer(name), []).append(name)
    if count > len(layers):
        raise ArgumentError(
            f"fragments={count}: the tensors are of {_counted(len(layers), 'layer')}, by the "
            "numbers in their names or their modules, and a fragment has one at least; pass "
            f"fragments={len(layers)} or fewer, assignment='balanced', or patterns"
        )
    numbers = sorted(layer for layer in layers if isinstance(layer, int))
    modules = [layer for layer in layers if isinstance(layer, str)]
    fragment_of = {layer: place % count for place, layer in enumerate([*numbers, *modules])}
    return _grouped(sizes, count, {name: fragment_of[_layer(name)] for name in sizes})


def _layer(name: str) -> int | str:
    parts = re.split(r"[./]", name)
    number = next((part for part in parts if re.fullmatch(r"[0-9]{1,9}", part)), None)
    if number is not None:
        return int(number)
    return name[: -len(parts[-1]) - 1] if len(parts) > 1 else name


def _balanced(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    if count > len(sizes):
        raise ArgumentError(
            f"fragments={count}: got {_counted(len(sizes), 'tensor')}, and a fragment has one at "
            f"least; pass fragments={len(sizes)} or fewer"
        )
    totals = [0] * count
    fragment_of: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        number = totals.index(min(totals))
        fragment_of[name] = number
        totals[number] += sizes[name]
    return _grouped(sizes, count, fragment_of)


def _by_patterns(names: Iterable[str], patterns: list[list[str]]) -> list[list[str]]:
    compiled = [[re.compile(pattern) for pattern in own] for own in patterns]
    fragment_of: dict[str, int] = {}
    for name in names:
        matches = (
            number
            for number, own in enumerate(compiled)
            if any(pattern.search(name) for pattern in own)
        )
        number = next(matches, None)
        if number is None:
            raise ArgumentError(
                f"fragments: no pattern matches tensor {name!r}; add one for it, such as '.*' as "
                "the last"
            )
        fragment_of[name] = number
    return _grouped(names, len(patterns), fragment_of, patterns)


def _grouped(
    names: Iterable[str],
    count: int,
    fragment_of: Mapping[str, int],
    patterns: list[list[str]] | None = None,
) -> list[list[str]]:
    dealt: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        dealt[fragment_of[name]].append(name)
    for number, own in enumerate(dealt):
        if not own and patterns is not None:
            raise ArgumentError(
                f"fragments[{number}]: no tensor is left for {patterns[number]!r:.80}, as the "
                "first pattern that matches counts; take it out, or put it in front"
            )
    return dealt


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"

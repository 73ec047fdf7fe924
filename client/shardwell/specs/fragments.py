"""Of which family a parameter is a fragment: a part of a model that travels by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_whole_number
from shardwell.specs.names import NAME_LENGTH_MAX, check_name
from shardwell.specs.wire_form import Record
from shardwell.v1 import types_pb2

FRAGMENT_COUNT_MAX = 4096
"""Fragments of a family."""
_LISTED_MAX = 8
"""Fragments that an error names."""
_VERSIONS_MAX = 16
"""Versions that are spelled out one by one."""


@dataclass(frozen=True, kw_only=True)
class Fragment(Record[types_pb2.Fragment]):
    """What the parameters of one family agree on; checked when made.

    A family is a model whose tensors are dealt into parameters, each `FAMILY.fragment-INDEX`. It is
    shown, saved, restored and deleted as one thing, under its own name.

    Raises:
        ArgumentError: a value is out of its range.

    Examples:
        >>> shardwell.Fragment(family="model", index=0, count=4, assignment="strided").parameter
        'model.fragment-0'
    """

    family: str
    """Name of the family: 1 to 128 letters, digits, `.`, `_`, `-`."""
    index: int
    """Index of the fragment, from 0."""
    count: int
    """Fragments of the family, 1 to 4,096."""
    assignment: str
    """How tensors were dealt: "strided", "balanced", or the digest of patterns. Learners that deal
    otherwise would mix tensors up."""

    MESSAGE: ClassVar[Any] = types_pb2.Fragment

    def __post_init__(self) -> None:
        check_name("family", self.family)
        check_whole_number("fragment count", self.count, 1, FRAGMENT_COUNT_MAX)
        check_whole_number("fragment index", self.index, 0, self.count - 1)
        if not isinstance(self.assignment, str) or not 0 < len(self.assignment) <= NAME_LENGTH_MAX:
            raise ArgumentError(
                f"a fragment's assignment is text of 1 to {NAME_LENGTH_MAX} characters; got "
                f"{brief(self.assignment)}"
            )

    @property
    def parameter(self) -> str:
        """The name that its parameter has."""
        return f"{self.family}.fragment-{self.index}"


@dataclass(frozen=True)
class Deal:
    """The fragments of one family that are at one place, such as a checkpoint or a cluster."""

    family: str
    """Its name."""
    fragments: tuple[Fragment, ...]
    """The existing fragments, by index; with one twice, they are not of one deal."""

    @property
    def count(self) -> int:
        """How many there are to be."""
        return max(each.count for each in self.fragments)

    @property
    def names(self) -> list[str]:
        """Names of the existing parameters."""
        return [each.parameter for each in self.fragments]

    @property
    def lacking(self) -> list[int]:
        """Fragments that are not there."""
        return sorted(set(range(self.count)) - {each.index for each in self.fragments})

    @property
    def damage(self) -> str:
        """Why it is not a whole family; empty: it is."""
        deals = sorted({(each.count, each.assignment) for each in self.fragments})
        if len(deals) > 1:
            words = " and ".join(f"{assignment!r} into {count}" for count, assignment in deals)
            return f"has fragments of several deals, {words}"
        lacking = self.lacking
        if not lacking:
            return ""
        listed = ", ".join(map(str, lacking[:_LISTED_MAX]))
        more = f" and {len(lacking) - _LISTED_MAX} more" if len(lacking) > _LISTED_MAX else ""
        return f"lacks fragment {listed}{more} of {self.count}"


def deals_of(fragments: Iterable[Fragment | None]) -> dict[str, Deal]:
    """The families of fragments, by name; None is that of what is no fragment."""
    found: dict[str, set[Fragment]] = {}
    for each in fragments:
        if each is not None:
            found.setdefault(each.family, set()).add(each)
    return {
        family: Deal(family, tuple(sorted(own, key=lambda each: (each.index, each.count))))
        for family, own in sorted(found.items())
    }


def with_fragments(
    names: Iterable[str], fragments: Mapping[str, Fragment | None], where: str
) -> list[str]:
    """Names of parameters, with all fragments in place of a family's name.

    Args:
        names: Names of parameters or families; each counts once.
        fragments: The family of each parameter, by its name; None: it belongs to none.
        where: What has them, for an error.

    Raises:
        ArgumentError: a family is not whole; names it.
    """
    deals = deals_of(fragments.values())
    found: dict[str, None] = {}
    for name in names:
        own = [name]
        if name in deals and name not in fragments:
            check_whole(deals[name], where)
            own = deals[name].names
        found |= dict.fromkeys(own)
    return list(found)


def check_whole(deal: Deal, where: str) -> None:
    """Refuses a family that is not whole.

    Raises:
        ArgumentError: a fragment is missing, or one is of another deal.
    """
    if deal.damage:
        raise ArgumentError(
            f"{where} {deal.damage} of family {deal.family!r}; restore it from a checkpoint that "
            f"has all of it, or name what is to be taken of it, such as {deal.names[0]!r}"
        )


def versions_words(versions: Sequence[int | None]) -> str:
    """Such as "versions 12 12 11 11"; "-": of a fragment that is missing."""
    if len(versions) > _VERSIONS_MAX:
        known = [each for each in versions if each is not None]
        missing = len(versions) - len(known)
        words = f"versions {min(known)} to {max(known)} of {len(versions)} fragments"
        return words + (f", of which {missing} are missing" if missing else "")
    listed = " ".join("-" if each is None else str(each) for each in versions)
    return f"version{'s' * (len(versions) > 1)} {listed}"


def first_fragment(family: str) -> str:
    """The name of the parameter that a family has first, and loses last."""
    return f"{family}.fragment-0"

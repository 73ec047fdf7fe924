"""Families, models that are cut into several parameters: their names, and parts by name. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_whole_number
from shardwell.specs.names import NAME_LENGTH_MAX, check_name
from shardwell.specs.wire_form import Record
from shardwell.v1 import types_pb2

FRAGMENT_COUNT_MAX = 4096
_LISTED_MAX = 8
_VERSIONS_MAX = 16
"""More versions are counted, and not spelled out one by one."""

PartT = TypeVar("PartT")


@dataclass(frozen=True, kw_only=True)
class Fragment(Record[types_pb2.Fragment]):
    """The place of a parameter in its family; checked when made.

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
        return _name(self.family, self.index)


@dataclass(frozen=True)
class Family(Generic[PartT]):
    """The fragments of one family that are at one place, such as a checkpoint or a cluster."""

    name: str
    parts: Mapping[int, tuple[PartT, ...]]
    """The parts of each fragment, by its index, in order; a missing one has no entry."""
    deals: tuple[tuple[int, str], ...]
    """Count and assignment that its fragments agree on; several: they are not of one family."""

    @property
    def count(self) -> int:
        """The number of fragments that the family is to have."""
        return max(count for count, _ in self.deals)

    @property
    def names(self) -> list[str]:
        """The names of the existing parameters."""
        return [_name(self.name, index) for index in self.parts]

    @property
    def all(self) -> list[PartT]:
        """All parts, in the order of the fragments."""
        return [each for parts in self.parts.values() for each in parts]

    @property
    def lacking(self) -> list[int]:
        """The fragments that are missing."""
        return sorted(set(range(self.count)) - set(self.parts))

    @property
    def damage(self) -> str:
        """The reason why it is not a whole family; empty: it is."""
        if len(self.deals) > 1:
            words = " and ".join(f"{assignment!r} into {count}" for count, assignment in self.deals)
            return f"has fragments of several deals, {words}"
        lacking = self.lacking
        if not lacking:
            return ""
        listed = ", ".join(map(str, lacking[:_LISTED_MAX]))
        more = f" and {len(lacking) - _LISTED_MAX} more" if len(lacking) > _LISTED_MAX else ""
        return f"lacks fragment {listed}{more} of {self.count}"

    def check_whole(self, where: object) -> None:
        """Refuses a family of which a fragment is missing, or is of another deal."""
        if self.damage:
            raise ArgumentError(
                f"{where} {self.damage} of family {self.name!r}; restore it from a checkpoint that "
                f"has all of it, or name what is to be taken of it, such as {self.names[0]!r}"
            )


class Grouped(NamedTuple, Generic[PartT]):
    """The parts of parameters or tables, by the name under which they are shown."""

    alone: dict[str, list[PartT]]
    """The parts of those that are no fragments, by name."""
    families: dict[str, Family[PartT]]

    def names_of(self, names: Iterable[str], where: object) -> list[str]:
        """The names, each once, with all fragments of a whole family in place of its name."""
        known = {*self.alone, *(each for family in self.families.values() for each in family.names)}
        found: dict[str, None] = {}
        for name in names:
            family = None if name in known else self.families.get(name)
            if family is not None:
                family.check_whole(where)
            found |= dict.fromkeys([name] if family is None else family.names)
        return list(found)


def grouped(
    parts: Iterable[PartT], spec_of: Callable[[Any], Any] = operator.attrgetter("spec")
) -> Grouped[PartT]:
    """The parts of parameters or tables, by family or else by name."""
    alone: dict[str, list[PartT]] = {}
    fragments: dict[str, dict[int, list[PartT]]] = {}
    deals: dict[str, set[tuple[int, str]]] = {}
    for part in parts:
        spec = spec_of(part)
        fragment = spec.fragment
        if fragment is None:
            alone.setdefault(spec.name, []).append(part)
        else:
            of_family = fragments.setdefault(fragment.family, {})
            of_family.setdefault(fragment.index, []).append(part)
            deals.setdefault(fragment.family, set()).add((fragment.count, fragment.assignment))
    families = {
        name: Family(
            name,
            {index: tuple(own) for index, own in sorted(fragments[name].items())},
            tuple(sorted(deals[name])),
        )
        for name in sorted(fragments)
    }
    return Grouped(alone, families)


def versions_words(versions: Sequence[int | None]) -> str:
    """The versions in words, such as "versions 12 12 11 11"; "-": of a missing fragment."""
    if len(versions) > _VERSIONS_MAX:
        known = [each for each in versions if each is not None]
        missing = len(versions) - len(known)
        words = f"versions {min(known)} to {max(known)} of {len(versions)} fragments"
        return words + (f", of which {missing} are missing" if missing else "")
    listed = " ".join("-" if each is None else str(each) for each in versions)
    return f"version{'s' * (len(versions) > 1)} {listed}"


def first_fragment(family: str) -> str:
    """The name of the parameter that a family has first, and loses last."""
    return _name(family, 0)


def _name(family: str, index: int) -> str:
    return f"{family}.fragment-{index}"

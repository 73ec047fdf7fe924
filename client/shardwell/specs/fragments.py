"""Of which family a parameter is a fragment: a part of a model that travels by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.specs.checks import brief, check_whole_number
from shardwell.specs.names import NAME_LENGTH_MAX, check_name
from shardwell.v1 import types_pb2

FRAGMENT_COUNT_MAX = 4096
"""Fragments of a family."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """What the parameters of one family agree on; checked when made.

    A family is a model whose tensors are dealt into parameters, each `FAMILY.fragment-INDEX`. It is
    shown, saved, restored and deleted as one thing, under its own name.

    Raises:
        ArgumentError: a value is out of its range.
    """

    family: str
    """Name of the family: 1 to 128 letters, digits, `.`, `_`, `-`."""
    index: int
    """Which fragment, from 0."""
    count: int
    """Fragments of the family, 1 to 4,096."""
    assignment: str
    """How tensors were dealt: "strided", "balanced", or the digest of patterns. Learners that deal
    otherwise would mix tensors up."""

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

    def to_proto(self) -> types_pb2.Fragment:
        """The wire's form."""
        return types_pb2.Fragment(
            family=self.family, index=self.index, count=self.count, assignment=self.assignment
        )

    @staticmethod
    def from_proto(message: types_pb2.Fragment) -> Fragment:
        """The value that a message describes.

        Raises:
            ArgumentError: a value is out of its range.
        """
        return Fragment(
            family=message.family,
            index=message.index,
            count=message.count,
            assignment=message.assignment,
        )


def with_fragments(names: Iterable[str], fragments: Mapping[str, Fragment | None]) -> list[str]:
    """Names of parameters, where a family's name stands for all of its fragments.

    Args:
        names: Of parameters or families; each counts once.
        fragments: Of which family each parameter is, by its name; None: of none.

    Raises:
        ArgumentError: a family lacks a fragment; names it.
    """
    found: dict[str, None] = {}
    for name in names:
        of_family = [each for each in fragments.values() if each and each.family == name]
        if name in fragments or not of_family:
            found[name] = None
            continue
        for index in range(of_family[0].count):
            parameter = f"{name}.fragment-{index}"
            if parameter not in fragments:
                raise ArgumentError(
                    f"family {name!r} lacks {parameter!r}, one of its {of_family[0].count} "
                    "fragments; name those that are to be taken"
                )
            found[parameter] = None
    return list(found)

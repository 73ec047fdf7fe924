"""Streams of messages that are altered by hand, as no client of ours would send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Alteration: TypeAlias = Callable[[list[Any]], list[Any]]
"""Another stream than that."""


def altered(message: Any, **fields: Any) -> Any:
    """A copy with other fields: values, or of a message within it a dict of fields."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        for inner, each in value.items() if isinstance(value, dict) else ():
            setattr(getattr(copy, name), inner, each)
        if not isinstance(value, dict):
            setattr(copy, name, value)
    return copy


def with_altered(messages: Sequence[Any], index: int, **fields: Any) -> list[Any]:
    """A stream of which one message has other fields."""
    found = list(messages)
    found[index] = altered(found[index], **fields)
    return found

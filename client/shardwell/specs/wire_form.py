"""The wire's form of specs and statuses: one table of fields drives both directions. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from shardwell.errors import ArgumentError

MessageT = TypeVar("MessageT", bound=Message)
_Read = Callable[[Any], Any]


class Form(NamedTuple):
    """A field that the wire has in another way."""

    read: _Read
    write: Callable[[Any], dict[str, Any]] | None = None
    """The message's fields for a value; None: the record is only read."""


class Record(Generic[MessageT]):
    """A dataclass that is a message on the wire, with fields of the same names.

    A field's annotation says what its message may lack: `| None` is a field that may be absent,
    `tuple[...]` a repeated one.
    """

    MESSAGE: ClassVar[Any] = None
    """None: the record is only read."""
    FORMS: ClassVar[Mapping[str, Any]] = {}
    """The fields that are no plain values: a record's class, the words of an enum, or a Form."""

    def to_proto(self) -> MessageT:
        """The wire's form."""
        found: dict[str, Any] = {}
        kind: Any = type(self)
        for field in dataclasses.fields(kind):
            form, value = self.FORMS.get(field.name), getattr(self, field.name)
            if isinstance(form, Form):
                assert form.write is not None
                found |= form.write(value)
            elif isinstance(form, dict):
                found[field.name] = form[value]
            else:
                found[field.name] = value if form is None or value is None else value.to_proto()
        message: MessageT = self.MESSAGE(**found)
        return message

    @classmethod
    def from_proto(cls, message: MessageT, **given: Any) -> Self:
        """The value that a message describes; `given` are fields that it does not have."""
        kind: Any = cls
        found = {name: read(message) for name, read in _readers(kind) if name not in given}
        return cls(**found, **given)


@cache
def _readers(kind: Any) -> list[tuple[str, _Read]]:
    return [
        (field.name, _reader(field.name, str(field.type), kind.FORMS.get(field.name)))
        for field in dataclasses.fields(kind)
    ]


def _reader(name: str, annotation: str, form: Any) -> _Read:
    if isinstance(form, Form):
        return form.read
    if isinstance(form, dict):
        return lambda message: name_of(form, name, getattr(message, name))
    made: _Read = (lambda value: value) if form is None else form.from_proto
    if annotation.startswith("tuple["):
        return lambda message: tuple(map(made, getattr(message, name)))
    if annotation.endswith("| None"):
        return lambda message: made(getattr(message, name)) if message.HasField(name) else None
    return lambda message: made(getattr(message, name))


class Alternative(Generic[MessageT]):
    """A dataclass that is one field of a message's oneof. Each kind is a subclass."""

    MESSAGE: ClassVar[Any]
    ONEOF: ClassVar[str]
    SHARED: ClassVar[tuple[str, ...]] = ()
    """Fields that all kinds have, which are the message's own."""
    field_name: ClassVar[str] = ""

    def to_proto(self) -> MessageT:
        """The wire's form."""
        kind: Any = type(self)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(kind)}
        shared = {name: own.pop(name) for name in self.SHARED}
        message: MessageT = self.MESSAGE(**{self.field_name: own}, **shared)
        return message

    @classmethod
    def from_proto(cls, message: MessageT) -> Self:
        """The value that a message describes; ArgumentError: no kind is set."""
        name: Any = message.WhichOneof(cls.ONEOF)
        kind: Any = next((each for each in cls.__subclasses__() if each.field_name == name), None)
        if name is None or kind is None:
            raise ArgumentError(f"{cls.__name__.lower()}.{cls.ONEOF} must be set; it is missing")
        own = getattr(message, name)
        values = {field.name: getattr(own, field.name) for field in own.DESCRIPTOR.fields}
        found: Self = kind(**values, **{each: getattr(message, each) for each in cls.SHARED})
        return found


def name_of(names: Mapping[str, Any], what: str, value: int) -> str:
    """The name of an enum's value, which must be specified and known."""
    for name, number in names.items():
        if number == value:
            return name
    raise ArgumentError(f"{what} {value} is unspecified or unknown")

"""The names that a shard has deleted or given up, or is about to, so that no call revives one.

States of a name, N being its incarnation, as docs/adr/0029-names.md has them:

    present(N) -> marked(N)   shard 0 alone: the change is decided, other shards may have the name
    marked(N) -> absent       the name is free here; N is remembered
    present(N) -> absent      the same, on other shards

A change deletes what has the name, or gives it another one, which shard 0 reserves meanwhile.

Events, as JSON objects:

    {"kind": "marked", "of": K, "name": M, "incarnation": N, "by": W}
    {"kind": "deleted", "of": K, "name": M, "incarnations": [N, ...], "by": W}

where K is "parameter" or "table", and W the worker id of the client that changes it. Both have
"to": T where it gets the name T. The last `REMEMBERED_MAX` changes are remembered: to a request
that is older the shard answers that it has no such name.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, TypeAlias

from shardwell.errors import StorageError
from shardwell_server.store import Event, Store

_LOG = logging.getLogger("shardwell_server")
REMEMBERED_MAX = 1024
"""Changes."""
Key: TypeAlias = tuple[str, str]
"""Kind and name."""


class Mark(NamedTuple):
    """A change that is decided."""

    incarnation: int
    """What changes."""
    by: str
    """The worker id of the client that decided it."""
    to: str = ""
    """The name that it gets; empty: it is deleted."""


class Gone(NamedTuple):
    """A change that is done here."""

    key: Key
    incarnations: tuple[int, ...]
    by: str
    to: str = ""

    @property
    def words(self) -> str:
        """What became of the name, for an error about it."""
        if self.to:
            return f"was renamed to {self.to!r} by {self.by!r}"
        return f"was deleted by {self.by!r}"


class NameChanges:
    """The name changes of one shard.

    A thread that changes anything holds the lock of all names; any thread may read.

    Args:
        store: Where they are noted.

    Raises:
        StorageError: what was noted can't be read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marks: dict[Key, Mark] = {}
        self._gone: list[Gone] = []
        """The oldest first."""
        for event in store.name_events():
            try:
                self._apply(event)
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"the shard's log of names holds {event!r}, which this version can't read "
                    f"({error!r}); run the version that wrote it"
                ) from None

    def mark_of(self, kind: str, name: str) -> Mark | None:
        """The mark on a name; None: no change of it is decided."""
        return self._marks.get((kind, name))

    def reserved_for(self, name: str) -> Key | None:
        """Kind and name of what is about to get a name; None: the name is free."""
        return next((key for key, mark in self._marks.items() if mark.to == name), None)

    @property
    def marked(self) -> list[Key]:
        """Kind and name of all that are marked."""
        return list(self._marks)

    def gone(self, kind: str, name: str, incarnation: int = 0) -> Gone | None:
        """What became of a name, or of that incarnation; None: nothing, or it is long ago."""
        for found in reversed(self._gone):
            if found.key == (kind, name) and incarnation in (0, *found.incarnations):
                return found
        return None

    def mark(self, kind: str, name: str, incarnation: int, by: str, to: str = "") -> None:
        """Decides a change.

        A full disk must not keep a user from making room: then the mark of a deletion is in memory
        alone. A shard that is killed with such a mark has the name again, and refuses no worker;
        the others, which have removed it, do, until it is deleted again.

        Raises:
            StorageError: a mark with a new name can't be noted.
        """
        event = {"kind": "marked", "of": kind, "name": name, "incarnation": incarnation, "by": by}
        if to:
            self._note({**event, "to": to})
            return
        try:
            self._note(event)
        except StorageError as error:
            _LOG.warning("a deletion can't be noted beforehand", extra={"reason": error.message})
            self._apply(event)

    def finish(self, kind: str, name: str, incarnations: set[int], by: str, to: str = "") -> None:
        """Notes that a name is free here.

        Raises:
            StorageError: it can't be noted.
        """
        kept = sorted(incarnations - {0})
        event = {"kind": "deleted", "of": kind, "name": name, "incarnations": kept, "by": by}
        self._note({**event, "to": to} if to else event)

    def _note(self, event: Event) -> None:
        marks, gone = dict(self._marks), list(self._gone)
        self._apply(event)
        try:
            self._store.log_name(event, self._events())
        except BaseException:
            self._marks, self._gone = marks, gone
            raise

    def _apply(self, event: Event) -> None:
        key: Key = (str(event["of"]), str(event["name"]))
        by, to = str(event["by"]), str(event.get("to", ""))
        if event["kind"] == "marked":
            self._marks[key] = Mark(int(event["incarnation"]), by, to)
        elif event["kind"] == "deleted":
            self._marks.pop(key, None)
            done = Gone(key, tuple(map(int, event["incarnations"])), by, to)
            if to:  # it may have had that name before, and has it again
                again = {(key[0], to, each) for each in done.incarnations}
                self._gone = [
                    each
                    for each in self._gone
                    if again.isdisjoint((*each.key, number) for number in each.incarnations)
                ]
            self._gone.append(done)
            del self._gone[:-REMEMBERED_MAX]
        else:
            raise KeyError(event["kind"])

    def _events(self) -> list[Event]:
        """The fewest events that lead to where it is now."""
        gone: list[dict[str, Any]] = [
            {
                "kind": "deleted",
                "of": found.key[0],
                "name": found.key[1],
                "incarnations": list(found.incarnations),
                "by": found.by,
                **({"to": found.to} if found.to else {}),
            }
            for found in self._gone
        ]
        marked: list[dict[str, Any]] = [
            {
                "kind": "marked",
                "of": key[0],
                "name": key[1],
                "incarnation": mark.incarnation,
                "by": mark.by,
                **({"to": mark.to} if mark.to else {}),
            }
            for key, mark in self._marks.items()
        ]
        return [*gone, *marked]

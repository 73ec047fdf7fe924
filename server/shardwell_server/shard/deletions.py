"""Deletion of a name: what a shard remembers of it, so that no call revives what it has removed.

A client carries a deletion from shard to shard (`shardwell/rpc/deletion.py`), as they do not speak
to one another. N is the incarnation of what has the name. Shard 0:

    state        request of the client     noted         becomes
    absent       -                         -             present(N), by the worker that opens it
    present(N)   STAGE_LOOK                -             present(N)
    present(N)   STAGE_MARK, no members    marked        marked(N): workers are refused from now on
    marked(N)    STAGE_REMOVE, last        deleted       absent, once its files are gone

The other shards: present(N) -> absent by STAGE_REMOVE, which they note, too. A kill leaves one of
these states, and the same requests, by any client, go on from it: shard 0 refuses the name before
any other shard removes it, and removes it last, so a name is made anew on all shards or on none.

Events, as JSON objects:

    {"kind": "marked", "of": K, "name": M, "incarnation": N, "by": W}
    {"kind": "deleted", "of": K, "name": M, "incarnations": [N, ...], "by": W}

where K is "parameter" or "table", and W the worker id of the client that deletes it. The last
`REMEMBERED_MAX` are remembered: to a request that is older the shard answers that it has no such
name. Events with "to" are of 0.2.0, which gave names to what had another: `Registry.take_back`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, TypeAlias

from shardwell.errors import StorageError
from shardwell_server.store.contract import Event, Store

_LOG = logging.getLogger("shardwell_server")
REMEMBERED_MAX = 1024
Key: TypeAlias = tuple[str, str]


class Mark(NamedTuple):
    """A deletion that is decided."""

    incarnation: int
    by: str
    to: str = ""
    """The name that 0.2.0 was to give it."""


class Gone(NamedTuple):
    """A name that was deleted here."""

    key: Key
    incarnations: tuple[int, ...]
    by: str
    to: str = ""
    """The name that 0.2.0 gave it."""

    @property
    def words(self) -> str:
        """The clause of an error about the name, such as "was deleted by 'ops'"."""
        done = f"renamed to {self.to!r}" if self.to else "deleted"
        return f"was {done} by {self.by!r}"


class Deletions:
    """The deletions of one shard. Changes hold the lock of all names; any thread may read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marks: dict[Key, Mark] = {}
        self._gone: list[Gone] = []
        """Names that were deleted, the oldest first."""
        for event in store.name_events():
            try:
                self._apply(event)
            except (KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"the shard's log of names holds {event!r}, which this version can't read "
                    f"({error!r}); run the version that wrote it"
                ) from None

    def mark_of(self, kind: str, name: str) -> Mark | None:
        return self._marks.get((kind, name))

    @property
    def marked(self) -> list[Key]:
        return list(self._marks)

    def gone(self, kind: str, name: str, incarnation: int = 0) -> Gone | None:
        """Returns the deletion of a name or incarnation; None: there was none, or long ago."""
        for found in reversed(self._gone):
            if found.key == (kind, name) and incarnation in (0, *found.incarnations):
                return found
        return None

    def mark(self, kind: str, name: str, incarnation: int, by: str) -> None:
        """Decides a deletion.

        A full disk must not keep a user from making room: then the mark is in memory alone. A shard
        that is killed with such a mark has the name again, and refuses no worker; the others, which
        have removed it, do, until it is deleted again.
        """
        event = {"kind": "marked", "of": kind, "name": name, "incarnation": incarnation, "by": by}
        try:
            self._note(event)
        except StorageError as error:
            _LOG.warning("a deletion can't be noted beforehand", extra={"reason": error.message})
            self._apply(event)

    def unmark(self, kind: str, name: str) -> None:
        """Takes a mark of 0.2.0 back, which the log has until the name is deleted."""
        del self._marks[kind, name]

    def finish(self, kind: str, name: str, incarnations: set[int], by: str, to: str = "") -> None:
        """Notes that a name is free here."""
        self._note(_deleted(Gone((kind, name), tuple(sorted(incarnations - {0})), by, to)))

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
        marked = [
            {"kind": "marked", "of": kind, "name": name, "incarnation": mark.incarnation}
            | {"by": mark.by}
            | ({"to": mark.to} if mark.to else {})
            for (kind, name), mark in self._marks.items()
        ]
        return [*map(_deleted, self._gone), *marked]


def _deleted(gone: Gone) -> Event:
    (kind, name), incarnations = gone.key, list(gone.incarnations)
    event = {"kind": "deleted", "of": kind, "name": name, "incarnations": incarnations}
    return event | {"by": gone.by} | ({"to": gone.to} if gone.to else {})

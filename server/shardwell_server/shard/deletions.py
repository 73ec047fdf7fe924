"""Which names a shard has deleted, or is about to, so that nobody makes or uses them by accident.

States of a name, N being its incarnation, as docs/adr/0029-deletion.md has them:

    present(N) -> marked(N)   shard 0 alone: the deletion is decided, other shards may have it still
    marked(N) -> absent       it is gone here; N is remembered
    present(N) -> absent      the same, on other shards

Events, as JSON objects:

    {"kind": "marked", "of": K, "name": M, "incarnation": N, "by": W}
    {"kind": "deleted", "of": K, "name": M, "incarnations": [N, ...], "by": W}

where K is "parameter" or "table", and W the worker id of who deleted it. The last `REMEMBERED_MAX`
deletions are remembered: a request that is older is told that there is no such name.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, TypeAlias

from shardwell.errors import StorageError
from shardwell_server.store import Event, Store

_LOG = logging.getLogger("shardwell_server")
REMEMBERED_MAX = 1024
"""Deletions."""
Key: TypeAlias = tuple[str, str]
"""Kind and name."""


class Mark(NamedTuple):
    """A deletion that is decided."""

    incarnation: int
    """What is deleted."""
    by: str
    """Who decided it."""


class _Deleted(NamedTuple):
    """A deletion that is done."""

    key: Key
    incarnations: tuple[int, ...]
    by: str


class Deletions:
    """Of one shard. Whoever changes anything holds the lock of all names; any thread may ask.

    Args:
        store: Where they are noted.

    Raises:
        StorageError: what was noted can't be read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marks: dict[Key, Mark] = {}
        self._deleted: list[_Deleted] = []
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
        """The mark on a name; None: its deletion is not decided."""
        return self._marks.get((kind, name))

    @property
    def marked(self) -> list[Key]:
        """Kind and name of all that are marked."""
        return list(self._marks)

    def deleted_by(self, kind: str, name: str, incarnation: int = 0) -> str | None:
        """Who deleted a name, or that incarnation of it; None: nobody did, or long ago."""
        for found in reversed(self._deleted):
            if found.key == (kind, name) and incarnation in (0, *found.incarnations):
                return found.by
        return None

    def mark(self, kind: str, name: str, incarnation: int, by: str) -> None:
        """Decides a deletion.

        A full disk must not keep anybody from making room: then the mark is in memory alone. A
        shard that is killed with such a mark has the name again, and refuses nobody; the others,
        which have removed it, do, until it is deleted again.
        """
        event = {"kind": "marked", "of": kind, "name": name, "incarnation": incarnation, "by": by}
        try:
            self._note(event)
        except StorageError as error:
            _LOG.warning("a deletion can't be noted beforehand", extra={"reason": error.message})
            self._apply(event)

    def finish(self, kind: str, name: str, incarnations: set[int], by: str) -> None:
        """Notes that a name is gone here.

        Raises:
            StorageError: it can't be noted.
        """
        kept = sorted(incarnations - {0})
        self._note({"kind": "deleted", "of": kind, "name": name, "incarnations": kept, "by": by})

    def _note(self, event: Event) -> None:
        marks, deleted = dict(self._marks), list(self._deleted)
        self._apply(event)
        try:
            self._store.log_name(event, self._events())
        except BaseException:
            self._marks, self._deleted = marks, deleted
            raise

    def _apply(self, event: Event) -> None:
        key: Key = (str(event["of"]), str(event["name"]))
        by = str(event["by"])
        if event["kind"] == "marked":
            self._marks[key] = Mark(int(event["incarnation"]), by)
        elif event["kind"] == "deleted":
            self._marks.pop(key, None)
            self._deleted.append(_Deleted(key, tuple(map(int, event["incarnations"])), by))
            del self._deleted[:-REMEMBERED_MAX]
        else:
            raise KeyError(event["kind"])

    def _events(self) -> list[Event]:
        """The fewest events that lead to where it is now."""
        deleted: list[dict[str, Any]] = [
            {
                "kind": "deleted",
                "of": found.key[0],
                "name": found.key[1],
                "incarnations": list(found.incarnations),
                "by": found.by,
            }
            for found in self._deleted
        ]
        marked: list[dict[str, Any]] = [
            {"kind": "marked", "of": key[0], "name": key[1], **mark._asdict()}
            for key, mark in self._marks.items()
        ]
        return [*deleted, *marked]

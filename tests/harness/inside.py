"""The parts of clients, shards and groups that no public name leads to.

Tests reach them from here alone, so that a part that moves is followed in one place.
"""

from __future__ import annotations

from typing import Any


def channels_of(client: Any) -> Any:
    """The client's connections, one a shard."""
    return client._shards.channels


def shards_of(client: Any) -> Any:
    """The shards as a client sees them."""
    return client._shards


def session_of(client: Any) -> Any:
    """The client's session."""
    return client._shards.session


def vanish(client: Any) -> None:
    """Ends a client's connections without a word, as the kernel does for a killed process."""
    client._shards.close()


def idle_sets(client: Any, *, of_rows: bool = False) -> Any:
    """The sets of streams that a client keeps for its next call."""
    return (client._idle_row_streams if of_rows else client._idle_streams)._sets


def endpoint_of(server: Any) -> Any:
    """All by which a shard's server is reached."""
    return server._endpoint


def open_calls(server: Any) -> Any:
    """The calls that a shard is answering."""
    return server._endpoint.calls._open


def unix_connections(server: Any) -> Any:
    """The connections to a shard's Unix socket."""
    return server._endpoint.unix_streams._open


def idle_streams(server: Any) -> Any:
    """The streams that have no step under way on a shard."""
    return server._endpoint.streams._idle


def tracker_of(part: Any) -> Any:
    """The tracker of a slice's steps."""
    return part._tracker


def register_of(part: Any) -> Any:
    """The records of a parameter's slice."""
    return part._register


def incarnation_of(handle: Any) -> Any:
    """The incarnation of the parameter or table that a client has opened."""
    return handle._opening.incarnation


def prefetched(table: Any) -> Any:
    """The fetches of rows that a table has under way."""
    return table._reading.prefetches._entries


def generation_of(group: Any) -> Any:
    """A group's members, and what they have under way."""
    return group._generation


def client_of(outer: Any) -> Any:
    """The client of a learner."""
    return outer._client

"""Goal: a rank that has taken all that was sent may go, at any moment; one that has not is lost.

Method: the stream of chunks to one rank, read here by hand, and ended where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwell.group.transport.peers import Outgoing
from shardwell.traffic import Traffic


class Context:
    """Of a stream that ends when a test says so."""

    def __init__(self) -> None:
        self.end: Callable[[], None]

    def add_callback(self, ended: Callable[[], None]) -> bool:
        self.end = ended
        return True


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def outgoing(failures: list[str]) -> Outgoing:
    return Outgoing(Traffic(), failures.append)


def begun(outgoing: Outgoing) -> tuple[Context, Iterator[bytes]]:
    """The stream, after the first of two chunks."""
    context: Any = Context()
    stream = outgoing.serve(context)
    outgoing.send(b"first", 1)
    outgoing.send(b"second", 1)
    assert next(stream) == b"first"
    return context, stream


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rank_that_goes_before_it_has_all_is_lost(
    outgoing: Outgoing, failures: list[str], finishes: bool
) -> None:
    context, _ = begun(outgoing)
    if finishes:
        outgoing.finish()
    context.end()
    assert failures == ["it no longer takes what is sent to it"]


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rank_that_has_all_may_go(
    outgoing: Outgoing, failures: list[str], finishes: bool
) -> None:
    """Also before this rank's own stream has come to its end, as on a busy machine."""
    context, stream = begun(outgoing)
    assert next(stream) == b"second"
    if finishes:
        outgoing.finish()
    context.end()
    assert failures == []


def test_what_is_cut_here_is_nobodys_failure(outgoing: Outgoing, failures: list[str]) -> None:
    context, _ = begun(outgoing)
    outgoing.cut()
    context.end()
    assert failures == []

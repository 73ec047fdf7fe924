"""Goal: what comes on sockets is read once, in order, by engine or thread, and never lost.

Method: socket pairs as links, read by hand; who read what is looked at by thread.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.polling import PATIENCE_S, eventually
from shardwell.group import inbox
from shardwell.group.inbox import Inbox

pytestmark = pytest.mark.skipif(not inbox.IS_SUPPORTED, reason="the system has no eventfd")


class Bytes:
    """A source of single bytes."""

    def __init__(self, connection: socket.socket, room: int = 10**6) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.room = room
        self.taken: list[tuple[bytes, int]] = []
        """What, and by whom."""

    @property
    def is_full(self) -> bool:
        return len(self.taken) >= self.room

    def receive(self) -> bool:
        piece = self.connection.recv(1)
        if piece:
            self.taken.append((piece, threading.get_ident()))
        return bool(piece)

    @property
    def contents(self) -> bytes:
        return b"".join(piece for piece, _ in self.taken)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Bytes]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, Bytes(right)


@pytest.fixture
def box(pair: tuple[socket.socket, Bytes]) -> Iterator[Inbox]:
    """Closed before its sockets are."""
    made = Inbox()
    assert made.open()
    yield made
    made.close()
    made.close()


def test_a_thread_reads_between_calls(box: Inbox, pair: tuple[socket.socket, Bytes]) -> None:
    left, source = pair
    box.add(source.connection.fileno(), source)
    left.send(b"abc")
    eventually("it is read", lambda: source.contents == b"abc")
    assert all(who != threading.get_ident() for _, who in source.taken)


def test_the_engine_reads_within_a_call(box: Inbox, pair: tuple[socket.socket, Bytes]) -> None:
    left, source = pair
    box.add(source.connection.fileno(), source)
    with box.taken_over():
        left.send(b"abc")
        while source.contents != b"abc":
            box.read(PATIENCE_S)
        assert [who for _, who in source.taken[1:]] == [threading.get_ident()] * 2
    left.send(b"d")
    eventually("the thread goes on", lambda: source.contents == b"abcd")


def test_what_is_full_is_read_no_further(box: Inbox, pair: tuple[socket.socket, Bytes]) -> None:
    left, source = pair
    source.room = 2
    box.add(source.connection.fileno(), source)
    with box.taken_over():
        left.send(b"abc")
        while source.contents != b"ab":
            box.read(PATIENCE_S)
        for _ in range(3):
            box.read(0.01)
        box.resume()  # it is still full
        box.read(0.01)
        assert source.contents == b"ab"
        source.room = 5
        box.resume()
        while source.contents != b"abc":
            box.read(PATIENCE_S)


def test_a_wake_is_not_lost(box: Inbox) -> None:
    """Neither one during the wait, nor one before it."""
    with box.taken_over(), ThreadPoolExecutor(1) as threads:
        threads.submit(box.wake).result()
        box.read(PATIENCE_S)
        waiting = threads.submit(box.read, PATIENCE_S)
        box.wake()
        waiting.result(PATIENCE_S)


def test_what_ends_is_forgotten(box: Inbox, pair: tuple[socket.socket, Bytes]) -> None:
    left, source = pair
    box.add(source.connection.fileno(), source)
    left.send(b"a")
    left.shutdown(socket.SHUT_WR)
    eventually("it is read to its end", lambda: not box._sources)
    assert source.contents == b"a"


def test_a_closed_one_touches_no_descriptor() -> None:
    """Its numbers may be others' by then."""
    box = Inbox()
    assert box.open()
    files = box._files
    box.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in files]  # a write to one would fail
    try:
        box.wake()
        with box.taken_over():
            assert not box.is_taken
        box.resume()
        assert not box.open()
        left, right = socket.socketpair()
        with left, right:
            box.add(right.fileno(), Bytes(right))
            assert not box._sources
    finally:
        for file in others:
            os.close(file)


def test_without_descriptors_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "eventfd", refused)
    box = Inbox()
    assert not box.open()
    with box.taken_over():
        assert not box.is_taken
    box.close()

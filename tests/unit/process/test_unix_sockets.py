"""A listener takes away its own file when it is closed, and nothing else that has its name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shardwell.process.unix_sockets import connected, listening

WAIT_S = 20.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "shard.sock")


def test_a_listeners_own_file_goes_with_it(address) -> None:
    with listening(address, socket.SOCK_STREAM) as listener:
        connected(address, socket.SOCK_STREAM, WAIT_S).close()
    assert not Path(address).exists()
    listener.close()
    assert listener.fileno() == -1


def test_a_file_that_has_the_name_by_then_stays(address) -> None:
    with listening(address, socket.SOCK_STREAM):
        Path(address).unlink()
        Path(address).write_text("notes")
    assert Path(address).read_text() == "notes"


def test_another_listener_that_has_the_name_by_then_stays(address) -> None:
    first = listening(address, socket.SOCK_SEQPACKET)
    Path(address).unlink()
    with listening(address, socket.SOCK_SEQPACKET):
        first.close()
        first.close()  # safe to repeat
        connected(address, socket.SOCK_SEQPACKET, WAIT_S).close()
    assert not Path(address).exists()


def test_what_a_killed_process_left_is_taken_over(address) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(address)
    left.close()
    with listening(address, socket.SOCK_STREAM):
        connected(address, socket.SOCK_STREAM, WAIT_S).close()

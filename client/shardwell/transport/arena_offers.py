"""Memory that clients on this machine offer for payloads, until a stream takes it.

See arena.proto. States of an arena here: offered (mapped, known by its token, for 10 s), taken (a
stream's, until that ends or takes another), gone. Its bytes count as long as it is mapped.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable

from google.protobuf.message import DecodeError

from shardwell.errors import ShardwellError
from shardwell.process.shared_memory import (
    IS_SUPPORTED,
    SharedMemory,
    SharedMemoryError,
    received_memory,
)
from shardwell.process.unix_sockets import check_descriptors, check_same_user, listening
from shardwell.transport.arena import ANSWER_BYTES_MAX, ARENA_BYTES_MAX, PAGE_BYTES
from shardwell.v1 import arena_pb2

_PATIENCE_S = 1.0
_OFFER_S = 10.0
"""The time that an offer is kept for a stream to take it."""
_OFFER_COUNT_MAX = 256
_DESCRIPTOR_RESERVE = 64
"""Descriptors that arenas, each of which has one as long as it is mapped, leave for the rest."""


class ArenaOffers:
    """Takes offers for this server on a Unix socket, on its own thread. Any thread may use it."""

    def __init__(
        self,
        check: Callable[[arena_pb2.ArenaOffer], None],
        *,
        bytes_max: int,
        log: logging.Logger,
    ) -> None:
        self.address = ""
        """Empty: it listens nowhere."""
        self._check = check
        self._bytes_max = bytes_max
        self._log = log
        self._lock = threading.RLock()  # memory may go while it is held
        self._offered: OrderedDict[int, tuple[float, SharedMemory]] = OrderedDict()
        """The end of an offer and its memory, by token."""
        self.mapped_bytes = 0
        self._listener: socket.socket | None = None
        self._closing = -1
        self._thread = threading.Thread(target=self._serve, name="shardwell-arenas", daemon=True)

    def start(self, same_host: str, name: str) -> None:
        """Begins to listen; `same_host` is "auto" (an abstract socket), "off", or a directory."""
        if same_host == "off" or not IS_SUPPORTED:
            return
        address = f"@{name}" if same_host == "auto" else os.path.join(same_host, f"{name}.sock")
        try:
            self._listener = listening(address, socket.SOCK_SEQPACKET)
            self._closing = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no thread
            self._release()
            self._log.warning("no memory is shared with clients: %s", error)
            return
        self.address = address

    def close(self) -> None:
        """Ends it; streams keep what they have. Safe to repeat."""
        if self._listener is None:
            return
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        self._release()
        with self._lock:
            self._offered.clear()

    def take(self, token: int) -> SharedMemory | None:
        """Takes the memory offered under a token, for one stream; None: none was, or long ago."""
        with self._lock:
            return self._offered.pop(token, (0.0, None))[1]

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        if self._closing >= 0:
            os.close(self._closing)
            self._closing = -1

    def _serve(self) -> None:
        assert self._listener is not None
        events = select.poll()
        for file in (self._closing, self._listener.fileno()):
            events.register(file, select.POLLIN)
        while True:
            with self._lock:
                self._forget_old()
                pause_s = _OFFER_S if self._offered else None
            found = dict(events.poll(None if pause_s is None else pause_s * 1000))
            if self._closing in found:
                return
            if found:
                self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError as error:  # no descriptor is left, say
            self._log.warning("an offer of memory can't be taken: %s", error)
            time.sleep(_PATIENCE_S)
            return
        with connection:
            try:
                connection.settimeout(_PATIENCE_S)
                check_same_user(connection)
                self._answer(connection)
            except (OSError, SharedMemoryError, DecodeError) as error:
                self._log.debug("an offer of memory failed: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        data, files, _, _ = socket.recv_fds(
            connection, ANSWER_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
        )
        answer = arena_pb2.ArenaAnswer()
        try:
            offer = arena_pb2.ArenaOffer.FromString(data)
            if len(files) != 1:
                raise SharedMemoryError(f"expected one file with an offer; got {len(files)}")
            answer.token = self._take_in(offer, files[0])
        except (OSError, SharedMemoryError, ShardwellError) as error:
            answer.refusal = str(error)
        finally:
            for file in files:
                os.close(file)
        try:
            connection.send(answer.SerializeToString())
        except OSError:  # the client has given up
            with self._lock:
                self._offered.pop(answer.token, None)
            raise

    def _take_in(self, offer: arena_pb2.ArenaOffer, file: int) -> int:
        self._check(offer)
        check_descriptors(_DESCRIPTOR_RESERVE, "memory that a worker offers")
        size = offer.size_bytes
        if not PAGE_BYTES <= size <= ARENA_BYTES_MAX or size % PAGE_BYTES:
            raise SharedMemoryError(
                f"an arena of {size} bytes; expected a multiple of {PAGE_BYTES}, at most "
                f"{ARENA_BYTES_MAX}"
            )
        with self._lock:
            self._forget_old()
            if self.mapped_bytes + size > self._bytes_max:
                raise SharedMemoryError(
                    f"limit arena_bytes_max={self._bytes_max}: {self.mapped_bytes} are mapped; "
                    "raise it, or use fewer workers on this machine"
                )
            self.mapped_bytes += size
        try:
            memory = received_memory(file, size)
        except BaseException:
            self._unmapped(size)
            raise
        weakref.finalize(memory, self._unmapped, size).atexit = False
        if memory.number(0) != offer.nonce:
            raise SharedMemoryError("the memory is not the same at both ends")
        token = secrets.randbits(63) + 1
        memory.set_number(1, token)
        with self._lock:
            self._offered[token] = (time.monotonic() + _OFFER_S, memory)
        return token

    def _forget_old(self) -> None:
        """Drops what no stream took in time; the lock is held."""
        now_s = time.monotonic()
        while self._offered:
            token, (until_s, _) = next(iter(self._offered.items()))
            if until_s > now_s and len(self._offered) < _OFFER_COUNT_MAX:
                return
            del self._offered[token]

    def _unmapped(self, size_bytes: int) -> None:
        with self._lock:
            self.mapped_bytes -= size_bytes

"""Offers memory to a shard as arena.proto says it: no code of the SDK's. Any part can be wrong."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from typing import Any

from harness.polling import PATIENCE_S
from shardwell.v1 import arena_pb2, types_pb2

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NONCE = 0x1122334455667788
SIZE = 1 << 20


class WireArena:
    """Memory, and what a shard answered when it was offered.

    Args:
        address: The shard's, as GetStatus says it.
        identity: Identity of the shard that is meant.
        size: Size that the offer says.
        real_size: What it has.
        seals: With which it is sealed.
        nonce: The nonce that it holds.
        file: Another file that is handed over; the caller's to close.
        message: The message that is sent instead of the offer.
        file_count: How often the file is handed over.
    """

    def __init__(
        self,
        address: str,
        identity: types_pb2.ShardIdentity,
        *,
        size: int = SIZE,
        real_size: int | None = None,
        seals: int = SEALS,
        nonce: int = NONCE,
        file: int | None = None,
        message: bytes | None = None,
        file_count: int = 1,
    ) -> None:
        own = os.memfd_create("wire", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(own, size if real_size is None else real_size)
            fcntl.fcntl(own, fcntl.F_ADD_SEALS, seals)
            self.memory = mmap.mmap(own, SIZE if real_size is None else max(real_size, 4096))
            self.memory[:8] = nonce.to_bytes(8, "little")
            offer = arena_pb2.ArenaOffer(shard=identity, size_bytes=size, nonce=NONCE)
            self.answer = self._offered(
                address,
                offer.SerializeToString() if message is None else message,
                [own if file is None else file] * file_count,
            )
        finally:
            os.close(own)

    @staticmethod
    def _offered(address: str, message: bytes, files: list[int]) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect("\0" + address[1:] if address[0] == "@" else address)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
            connection.sendmsg([message], ancillary if files else [])
            return arena_pb2.ArenaAnswer.FromString(connection.recv(4096))

    def put(self, offset: int, payload: bytes) -> types_pb2.Shared:
        """Writes a payload; says where it is."""
        self.memory[offset : offset + len(payload)] = payload
        return types_pb2.Shared(offset=offset, size=len(payload))

    def bytes_of(self, shared: types_pb2.Shared) -> bytes:
        """What lies there."""
        return self.memory[shared.offset : shared.offset + shared.size]

"""A worker of Redis: packed rows in one server a shard, the client splitting batches by id.

Two clients. `redis-py` is what a user has, with hiredis on both ways, and keys and rows cut and
joined by NumPy where it can. `raw` writes the protocol's bytes as one NumPy array and reads the
answer as one, without any Python a row: no package does that, but a client can hardly be faster.
Both send to all servers before they read, and use the servers in another order on each rank. A Zipf
batch is sent without its repeats, unless an order says `repeats`; uniform ones are not searched for
the few that they have.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import numpy as np
import numpy.typing as npt

from row_bench import Ids, RowBench, Rows, row_parser
from turns import work

DTYPES = {"fp16": np.float16, "fp32": np.float32}
READ_BYTES = 2**20
KEYS_PER_COMMAND = 8192
"""Of large batches, so that servers and clients overlap; 256 to 65,536 cost the same CPU time."""
Packed = npt.NDArray[Any]
"""(n,) keys or rows, each as bytes that NumPy does not look into."""
Parts = list[tuple[int, Ids]]
"""For each command: its server, and where its keys are in the batch."""


class PackageClient:
    """Connections of redis-py; the one that clients use inside, so that both servers work at once.

    Args:
        ports: Ports of the servers.
    """

    def __init__(self, ports: list[int]) -> None:
        import redis

        self._connections = [
            redis.Connection(host="127.0.0.1", port=port, socket_read_size=READ_BYTES)
            for port in ports
        ]
        for connection in self._connections:
            connection.connect()

    def send_get(self, server: int, keys: Packed) -> None:
        """Asks a server for rows."""
        self._connections[server].send_command("MGET", *keys.tolist())

    def send_put(self, server: int, keys: Packed, rows: Packed, *, pipelined: bool) -> None:
        """Sends rows to a server, as one MSET or as a pipeline of SET."""
        connection = self._connections[server]
        if pipelined:
            pairs = zip(keys.tolist(), rows.tolist(), strict=True)
            commands = connection.pack_commands([("SET", *pair) for pair in pairs])
            connection.send_packed_command(commands)
            return
        words: list[bytes] = [b""] * (2 * keys.size)
        words[::2] = keys.tolist()
        words[1::2] = rows.tolist()
        connection.send_command("MSET", *words)

    def read_get(self, server: int, count: int, record: np.dtype[Any]) -> Packed:
        """The rows that were asked for."""
        answer: Any = self._connections[server].read_response(disable_decoding=True)
        return np.frombuffer(b"".join(answer), record, count)

    def read_put(self, server: int, count: int) -> None:
        """Takes the answers to commands that change rows."""
        for _ in range(count):
            answer: Any = self._connections[server].read_response()
            assert answer == b"OK", answer

    def close(self) -> None:
        """Ends the connections."""
        for connection in self._connections:
            connection.disconnect()


class RawClient:
    """The same with sockets and NumPy alone: rows all have the same length, and all exist."""

    def __init__(self, ports: list[int]) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()

    def send_get(self, server: int, keys: Packed) -> None:
        """Sends MGET for keys."""
        head = b"*%d\r\n$4\r\nMGET\r\n" % (keys.size + 1)
        self._send(server, head, _laid_out(*_word(keys)))

    def send_put(self, server: int, keys: Packed, rows: Packed, *, pipelined: bool) -> None:
        """Sends MSET of rows, or SET for each."""
        if pipelined:
            self._send(server, b"", _laid_out(b"*3\r\n$3\r\nSET\r\n", *_word(keys), *_word(rows)))
            return
        head = b"*%d\r\n$4\r\nMSET\r\n" % (2 * keys.size + 1)
        self._send(server, head, _laid_out(*_word(keys), *_word(rows)))

    def read_get(self, server: int, count: int, record: np.dtype[Any]) -> Packed:
        """See PackageClient; a view, until the next call."""
        expected = b"*%d\r\n" % count
        word = b"$%d\r\n" % record.itemsize
        answer = np.dtype([("head", f"V{len(word)}"), ("row", record), ("tail", "V2")])
        found = self._read(server, len(expected) + count * answer.itemsize)
        words = np.frombuffer(found, answer, offset=len(expected))
        assert found[: len(expected)] == expected, bytes(found[:80])
        assert (words["head"] == np.void(word)).all(), "a row is missing, or has another length"
        rows: Packed = words["row"]
        return rows

    def read_put(self, server: int, count: int) -> None:
        """Reads the answers to SET or MSET."""
        found = self._read(server, 5 * count)
        assert found == b"+OK\r\n" * count, bytes(found[:80])

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._sockets:
            connection.close()

    def _send(self, server: int, head: bytes, words: Packed) -> None:
        self._sockets[server].sendall(head)
        self._sockets[server].sendall(words.view(np.uint8).data)

    def _read(self, server: int, size: int) -> memoryview:
        """So many bytes, which stay until the next call."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        done = 0
        while done < size:
            count = self._sockets[server].recv_into(view[done:])
            assert count, "a server has closed the connection"
            done += count
        return view


def _word(words: Packed) -> tuple[bytes | Packed, ...]:
    """Words of one length, as Redis reads them."""
    return b"$%d\r\n" % words.itemsize, words, b"\r\n"


def _laid_out(*parts: bytes | Packed) -> Packed:
    """For each element of the arrays: all parts, one after another; constants repeat."""
    count = next(part.size for part in parts if not isinstance(part, bytes))
    kinds = [f"V{len(part)}" if isinstance(part, bytes) else part.dtype for part in parts]
    words = np.empty(count, [(f"part {index}", kind) for index, kind in enumerate(kinds)])
    for index, part in enumerate(parts):
        words[f"part {index}"] = np.void(part) if isinstance(part, bytes) else part
    return words


def packed(values: npt.NDArray[Any]) -> Packed:
    """(n,) opaque records of (n, ...) numbers; a view."""
    return values.reshape(len(values), -1).view(f"V{values[:1].nbytes}").ravel()


CLIENTS = {"redis-py": PackageClient, "raw": RawClient}


class RedisRows(RowBench):
    """See RowBench. Orders also have `client`, `codec` and `pipelined`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._clients = {name: CLIENTS[name](args.ports) for name in args.clients}
        self._servers = [(self.rank + index) % len(args.ports) for index in range(len(args.ports))]

    def begin(self, batches: list[Ids]) -> None:
        self._client = self._clients[self.order["client"]]
        self._dtype = np.dtype(DTYPES[self.order["codec"]])
        self._record = np.dtype(f"V{self.dim * self._dtype.itemsize}")
        self._prefix = self.order["rows"] << 32 | self._dtype.itemsize << 29

    def get(self, ids: Ids, out: Rows) -> None:
        distinct, inverse = self._distinct(ids)
        parts = self._split(distinct)
        self._ask(distinct, parts)
        self._take(distinct, inverse, parts, out)

    def put(self, ids: Ids, gradients: Rows) -> None:
        distinct, _ = self._distinct(ids)
        parts = self._split(distinct)
        self._send(distinct, gradients, parts)
        self._confirm(parts)

    def exchange(self, ids: Ids, gradients: Rows, next_ids: Ids, out: Rows) -> None:
        distinct, _ = self._distinct(ids)
        parts = self._split(distinct)
        next_distinct, next_inverse = self._distinct(next_ids)
        next_parts = self._split(next_distinct)
        self._send(distinct, gradients, parts)
        self._ask(next_distinct, next_parts)
        self._confirm(parts)
        self._take(next_distinct, next_inverse, next_parts, out)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _distinct(self, ids: Ids) -> tuple[Ids, Ids | None]:
        if self.order.get("distribution") != "zipf" or self.order.get("repeats"):
            return ids, None
        distinct, inverse = np.unique(ids, return_inverse=True)
        return distinct, inverse

    def _split(self, ids: Ids) -> Parts:
        """For each command, in turns: its server, and where its ids are."""
        server_of = ids % len(self._servers)
        places = [np.flatnonzero(server_of == index) for index in range(len(self._servers))]
        return [
            (server, places[server][start : start + KEYS_PER_COMMAND])
            for start in range(0, max(part.size for part in places), KEYS_PER_COMMAND)
            for server in self._servers
            if start < places[server].size
        ]

    def _ask(self, ids: Ids, parts: Parts) -> None:
        keys = packed(ids + self._prefix)
        for server, places in parts:
            self._client.send_get(server, keys[places])

    def _take(self, ids: Ids, inverse: Ids | None, parts: Parts, out: Rows) -> None:
        rows = out if inverse is None else np.empty((ids.size, self.dim), np.float32)
        for server, places in parts:
            records = self._client.read_get(server, places.size, self._record)
            values = np.ascontiguousarray(records).view(self._dtype).reshape(-1, self.dim)
            rows[places] = values
        if inverse is not None:
            np.take(rows, inverse, axis=0, out=out, mode="clip")

    def _send(self, ids: Ids, gradients: Rows, parts: Parts) -> None:
        keys = packed(ids + self._prefix)
        rows = packed(gradients[: ids.size].astype(self._dtype))
        pipelined = self.order.get("pipelined", False)
        for server, places in parts:
            self._client.send_put(server, keys[places], rows[places], pipelined=pipelined)

    def _confirm(self, parts: Parts) -> None:
        for server, places in parts:
            self._client.read_put(server, places.size if self.order.get("pipelined") else 1)


def main() -> None:
    parser = row_parser()
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), required=True)
    args = parser.parse_args()
    work(args.socket, args.rank, RedisRows(args))


if __name__ == "__main__":
    main()

"""Ports of the machine that lead to the shards of docker-compose.yml: its service `ports`.

compose_ports.py PORT=HOST:PORT ...

Bytes pass as they are. TLS ends at the shards, so this has no key, no certificate and no token, and
reads nothing. A name is looked up for each connection, since a shard that was made anew has another
address.
"""

from __future__ import annotations

import asyncio
import signal
import sys

CONNECTION_COUNT_MAX = 256
"""At once, of all ports; more are closed when they come. Each takes two files, of 1024."""
CONNECT_TIMEOUT_S = 10.0
BUFFER_SIZE_BYTES = 256 * 1024
"""Of each direction of a connection; a faster sender waits for the reader."""


class Forwarder:
    """Connections that are open, and where they lead."""

    def __init__(self) -> None:
        self._open_count = 0
        self._servers: list[asyncio.Server] = []

    async def listen(self, port: int, host: str, host_port: int) -> None:
        """Takes connections at a port of all addresses.

        Args:
            port: Where.
            host: Whither.
            host_port: Its port.
        """

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._open_count >= CONNECTION_COUNT_MAX:
                print(f"refused: {CONNECTION_COUNT_MAX} connections are open", file=sys.stderr)
                writer.transport.abort()
                return
            self._open_count += 1
            try:
                await _forward(reader, writer, host, host_port)
            finally:
                self._open_count -= 1

        server = await asyncio.start_server(take, port=port, limit=BUFFER_SIZE_BYTES)
        self._servers.append(server)  # or it would be collected


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
) -> None:
    """Joins a connection with one of its own to host and port, until both have ended."""
    ends = [writer]
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            there = await asyncio.open_connection(host, port, limit=BUFFER_SIZE_BYTES)
        ends.append(there[1])
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, there[1]))
            group.create_task(_copy(there[0], writer))
        for end in ends:
            end.close()  # when all is sent
    except* OSError as errors:
        if len(ends) == 1:
            print(f"{host}:{port} can't be reached: {errors.exceptions[0]!r}", file=sys.stderr)
    finally:
        for end in ends:
            if not end.is_closing():
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until one end sends no more, and passes that on to the other."""
    while data := await reader.read(BUFFER_SIZE_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
    await writer.drain()


async def main(routes: list[str]) -> None:
    """Forwards until SIGTERM or Ctrl-C.

    Args:
        routes: PORT=HOST:PORT each.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    forwarder = Forwarder()
    for route in routes:
        port, _, address = route.partition("=")
        host, _, host_port = address.rpartition(":")
        await forwarder.listen(int(port), host, int(host_port))
        print(f"{port} leads to {address}", flush=True)
    await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

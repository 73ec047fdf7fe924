"""Goal: each transport between a worker and the shards of its machine gives the bits of the
network, and where one can't be used, calls go on over the network.

Method: one contract over both: streams over a Unix socket, with payloads inline, and streams whose
payloads are in shared memory; something lies in the place of a socket before the shard starts.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.transports import mapped_bytes, stream_counts, trained, unix_calls
from shardwell.process.shared_memory import IS_SUPPORTED
from shardwell.transport import arena

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed on this system"),
    pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="peers can't be asked for here"),
]
CHUNK_BYTES = 64 * 1024
KINDS = {"memory": ("", socket.SOCK_SEQPACKET), "streams": ("-streams", socket.SOCK_STREAM)}
"""The end of a socket's name, and its type, by what it is for."""
WARNINGS = {"memory": "no memory is shared", "streams": "call over the network"}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all of the suite shares all."""
    monkeypatch.setattr(arena, "SHARED_BYTES_MIN", 64 * 1024)


@pytest.mark.parametrize(
    ("size", "chunk_size_bytes", "codec", "verb", "shares"),
    [
        *((10, 256, codec, "exchange", False) for codec in ("fp16", "fp32", "bf16+lz4")),
        *((3000, 256, codec, "exchange", False) for codec in ("fp16", "fp32", "bf16+lz4")),
        *((900_000, 2**20, codec, "exchange", None) for codec in ("fp16", "fp32", "bf16+lz4")),
        *(
            (500_000, CHUNK_BYTES, codec, verb, codec != "fp16+lz4")
            for codec in ("fp16", "bf16", "fp32", "fp16+lz4")
            for verb in ("exchange", "put and get")
        ),
    ],
)
def test_results_are_those_of_grpc(
    cluster, connect, size, chunk_size_bytes, codec, verb, shares
) -> None:
    running, given = cluster(2, chunk_size_bytes=chunk_size_bytes), {"size": size, "codec": codec}
    expected = trained(running, connect, "grpc", same_host=False, **given)
    assert (stream_counts(running), mapped_bytes(running)) == ([0, 0], [0, 0])
    found = trained(running, connect, "here", verb=verb, shares=shares, streams=True, **given)
    np.testing.assert_array_equal(found, expected)
    if verb == "exchange":
        assert stream_counts(running) == [2, 2]
        assert not shares or min(mapped_bytes(running)) >= 2 * (size // 2) * 2


@pytest.mark.parametrize(("row_count", "dim"), [(50, 3), (2000, 64)])
def test_rows_are_those_of_grpc(cluster, connect, row_count, dim) -> None:
    running, found = cluster(2, chunk_size_bytes=2**20), []
    for same_host in (False, True):
        client = connect(running, "w0", same_host=same_host)
        table = client.table(
            f"t{same_host}", row_count=row_count, dim=dim, optimizer=shardwell.SGD(1.0)
        )
        drawn = np.random.default_rng(5)
        for _ in range(4):
            ids = drawn.integers(0, row_count, row_count)
            rows = table.exchange_rows(ids, drawn.standard_normal((row_count, dim), np.float32))
        found.append(rows)
        assert bool(unix_calls(client)) == same_host
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("off", ["shard", "environment"])
def test_transports_of_one_machine_can_be_turned_off(cluster, connect, monkeypatch, off) -> None:
    expected = trained(cluster(1, chunk_size_bytes=CHUNK_BYTES), connect, same_host=False)
    given = {"same_host": "off"} if off == "shard" else {}
    if off == "environment":
        monkeypatch.setenv("SHARDWELL_SAME_HOST", "off")
    running = cluster(1, chunk_size_bytes=CHUNK_BYTES, **given)
    found = trained(running, connect, shares=False, streams=False)
    np.testing.assert_array_equal(found, expected)
    assert (stream_counts(running), mapped_bytes(running)) == ([0], [0])


def test_bad_places_of_sockets_are_refused(cluster) -> None:
    for given in ("", "a\0b"):
        with pytest.raises(shardwell.ArgumentError, match="same_host"):
            cluster(1, same_host=given)


def test_sockets_in_a_directory(cluster, connect, tmp_path) -> None:
    running = cluster(2, chunk_size_bytes=CHUNK_BYTES, same_host=str(tmp_path), cluster_id="c")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"shardwell-c-{index}{ending}.sock" for index in (0, 1) for ending, _ in KINDS.values()
    }
    expected = trained(running, connect, "grpc", same_host=False)
    found = trained(running, connect, "here", shares=True, streams=True)
    np.testing.assert_array_equal(found, expected)
    running.close()
    assert not list(tmp_path.iterdir())


@each_kind
@pytest.mark.parametrize(
    "place", ["left by a killed shard", "full", "taken", "file", "missing", "long"]
)
def test_what_is_in_the_place_of_a_socket(
    cluster, connect, tmp_path, caplog, kind: str, place: str
) -> None:
    """A socket that no process serves is replaced; all else stays, and the shard does without."""
    directory = {"missing": tmp_path / "no", "long": tmp_path / ("x" * 120)}.get(place, tmp_path)
    ending, socket_type = KINDS[kind]
    path = tmp_path / f"shardwell-c-0{ending}.sock"
    with contextlib.ExitStack() as stack:

        def made() -> socket.socket:
            return stack.enter_context(socket.socket(socket.AF_UNIX, socket_type))

        _occupy(path, place, made)
        running = cluster(1, same_host=str(directory), cluster_id="c", chunk_size_bytes=CHUNK_BYTES)
        is_used = place == "left by a killed shard"
        of_all = dict.fromkeys(KINDS, is_used if place in ("missing", "long") else True)
        uses = {**of_all, kind: is_used}
        trained(running, connect, shares=uses["memory"], streams=uses["streams"])
    assert (WARNINGS[kind] in caplog.text) == (not is_used)
    if place == "file":
        assert "is no socket" in caplog.text
        assert path.read_text() == "mine"
    running.close()
    assert path.exists() == (place in ("full", "taken", "file"))


def _occupy(path: Path, place: str, made: Any) -> None:
    """Puts something where a shard would listen."""
    if place == "file":
        path.write_text("mine")
    elif place == "left by a killed shard":
        left = made()
        left.bind(str(path))
        left.close()
    elif place in ("taken", "full"):
        other = made()
        other.bind(str(path))
        other.listen(0 if place == "full" else 128)
        for _ in range(4 if place == "full" else 0):
            waiting = made()
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(str(path))

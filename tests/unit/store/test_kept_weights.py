"""Goal: a place of an older data directory keeps the weights that fit, and no part of others."""

from __future__ import annotations

from pathlib import Path

from shardwell_server.store.contract import Layout
from shardwell_server.store.files.mapped import PAGE_SIZE_BYTES, MappedFile
from shardwell_server.store.mmap.kept_weights import KeptWeights, file_size


def test_what_a_place_has_no_room_for_is_not_kept(tmp_path: Path) -> None:
    room = PAGE_SIZE_BYTES - 16
    layout = Layout(
        name="m",
        slice_size=20,
        chunk_element_count=10,
        with_sum=False,
        kept_size_bytes=room - 100,
    )
    kept = KeptWeights(MappedFile.create(tmp_path / "kept", file_size(layout)), layout, print)
    for version, size in enumerate([room - 50, room, room + 1, 7]):
        kept.put(1, 9, b"before")
        kept.put(1, version, bytes([version]) * size)
        expected = bytes([version]) * size if size <= room else None
        assert kept.get(1, version) == expected
        assert kept.get(1, 9) is None
        assert kept.get(0, 0) is None

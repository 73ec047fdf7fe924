"""Goal: places of an older data directory have room for what is kept today."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell_server.store.contract import Layout
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.mmap.kept_weights import KeptWeights, file_size, make_room


@pytest.mark.parametrize("count", [1, 31, 700, 8191, 491_384, 524_288])
def test_places_of_0_2_0_are_enlarged_once(tmp_path: Path, count: int) -> None:
    path, size = tmp_path / "kept", 2 * count + 256
    before, layout = (
        Layout(
            name="m",
            slice_size=2 * count,
            chunk_element_count=count,
            with_sum=False,
            kept_size_bytes=size,
            description={"spec": {"cutsBlocks": True}} if cuts_blocks else {},
        )
        for cuts_blocks in (False, True)
    )
    KeptWeights(MappedFile.create(path, file_size(before)), before, print).put(1, 7, b"7" * size)
    message = b"8" * (2 * count + 100 + -(-count // max(min(count // 64, 256), 1)))
    for _ in range(2):
        make_room(path, layout)
        kept = KeptWeights(MappedFile.open(path, file_size(layout)), layout, print)
        assert kept.get(1, 9) in (None, message)
        kept.put(1, 9, message)
        assert kept.get(1, 9) == message
    make_room(path, before)
    assert path.stat().st_size == file_size(layout)

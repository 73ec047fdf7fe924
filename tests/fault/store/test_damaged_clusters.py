"""Goal: a cluster whose files are damaged, swapped or in use says which, and serves the rest.

Method: a real cluster trains on files and is stopped; the files are changed; it is started again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardwell
from shardwell_server.store.files.data_dir import DataDirError

SIZE = 300
SGD = shardwell.SGD(learning_rate=0.5)
CHUNK_BYTES = 128 * 4
"""What a chunk of 256 encoded bytes of fp16 takes in a file."""


@pytest.fixture
def trained(tmp_path: Path, cluster, connect) -> Path:
    """Files of two shards with parameters `a` and `b`, both at -1."""
    with cluster(2, data_dir=tmp_path) as running:
        client = connect(running, "w0")
        for name in ("a", "b"):
            model = client.parameter(name, size=SIZE, optimizer=SGD)
            model.init(np.zeros(SIZE, np.float32))
            for _ in range(2):
                model.exchange(np.ones(SIZE, np.float32))
        client.close()
    return tmp_path


def damage(path: Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 4
    path.write_bytes(contents)


def test_a_damaged_chunk_is_named_and_the_rest_is_served(trained: Path, cluster, connect) -> None:
    damaged = trained / "shard-1" / "parameters" / "000001" / "weights"
    damage(damaged, CHUNK_BYTES + 3)  # in the second of its chunks
    client = connect(cluster(2, data_dir=trained), "w0")
    model = client.parameter("a", size=SIZE, optimizer=SGD)
    for _ in range(2):
        for call in (model.get_weights, lambda: model.exchange(np.ones(SIZE, np.float32))):
            with pytest.raises(shardwell.StorageError, match="chunk 1 of parameter 'a'") as caught:
                call()
            assert str(damaged) in str(caught.value)
            assert "restore the directory" in str(caught.value)
    other = client.parameter("b", size=SIZE, optimizer=SGD)
    np.testing.assert_array_equal(other.get_weights(), -1.0)
    np.testing.assert_array_equal(other.exchange(np.ones(SIZE, np.float32)), -1.5)


def test_a_damaged_record_keeps_the_shard_from_starting(trained: Path, cluster) -> None:
    damaged = trained / "shard-0" / "parameters" / "000002" / "records"
    damage(damaged, 0)
    with pytest.raises(shardwell.StorageError, match=r"000002/records.*was damaged.*restore"):
        cluster(2, data_dir=trained)


def test_directories_that_changed_places(trained: Path, cluster) -> None:
    (trained / "shard-0").rename(trained / "other")
    (trained / "shard-1").rename(trained / "shard-0")
    (trained / "other").rename(trained / "shard-1")
    with pytest.raises(DataDirError, match="belongs to another shard"):
        cluster(2, data_dir=trained)


def test_a_cluster_of_another_size(trained: Path, cluster) -> None:
    for shard_count in (1, 3):
        with pytest.raises(
            shardwell.ArgumentError, match=rf"of 2 shards; got shard_count={shard_count}\. For"
        ):
            cluster(shard_count, data_dir=trained)
        assert not (trained / "shard-2").exists()


def test_two_clusters_on_one_directory(trained: Path, cluster, connect) -> None:
    first = cluster(2, data_dir=trained)
    with pytest.raises(DataDirError, match="in use by another process"):
        cluster(2, data_dir=trained)
    model = connect(first, "w0").parameter("a", size=SIZE, optimizer=SGD)
    np.testing.assert_array_equal(model.get_weights(), -1.0)

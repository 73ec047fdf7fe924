"""Goal: any program reads a model by its tensors' names, whatever the shards it was trained on.

Method: the export is read by the package safetensors alone, and compared with the weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell

SHAPES = {"layers.0.weight": (30, 7), "empty": (0, 2), "layers.0.bias": (30,), "scale": ()}
SGD = shardwell.SGD(learning_rate=1.0, momentum=0.5)


@pytest.fixture
def saved(cluster, connect, tmp_path) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of a net with tensors, a vector, and the net's weights."""
    client = connect(cluster(3, chunk_size_bytes=64), "w0")
    net = client.parameter("net", tensors=SHAPES, optimizer=SGD, codec="fp32")
    generator = np.random.default_rng(1)
    net.init({name: generator.normal(size=shape) for name, shape in SHAPES.items()})
    client.parameter("vector", size=5, optimizer=SGD).init(np.arange(5, dtype=np.float32))
    client.save_checkpoint(tmp_path / "ckpt")
    return tmp_path / "ckpt", net.get_weights()


def test_tensors_have_their_names_and_shapes(saved, tmp_path) -> None:
    path, weights = saved
    made = shardwell.export_checkpoint(path, tmp_path / "net.safetensors", "net")
    assert made.name == "net"
    found = load_file(tmp_path / "net.safetensors")
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].shape == array.shape
    assert not list(tmp_path.glob("*.partial"))


def test_a_vector_has_the_parameters_name(saved, tmp_path) -> None:
    shardwell.export_checkpoint(saved[0], tmp_path / "v.safetensors", "vector")
    assert load_file(tmp_path / "v.safetensors")["vector"].tolist() == [0, 1, 2, 3, 4]


def test_the_checkpoint_of_tensors_is_restored_with_them(saved, cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    client.restore_checkpoint(saved[0])
    net = client.parameter("net")
    assert [(t.name, t.shape) for t in net.spec.layout] == list(SHAPES.items())
    for name, array in net.get_weights().items():
        np.testing.assert_array_equal(array, saved[1][name])


def test_what_can_not_be_exported(saved, tmp_path) -> None:
    path, _ = saved
    target = tmp_path / "net.safetensors"
    for name, parameter, words in (
        ("net.pt", "net", r"ends in .safetensors; got net.pt"),
        ("net.safetensors", None, r"has 2 parameters, \['net', 'vector'\]; say which"),
        ("net.safetensors", "other", "has no parameter 'other'"),
    ):
        with pytest.raises(shardwell.ArgumentError, match=words):
            shardwell.export_checkpoint(path, tmp_path / name, parameter)
    target.write_text("here")
    with pytest.raises(shardwell.ArgumentError, match="exists already"):
        shardwell.export_checkpoint(path, target, "net")
    assert target.read_text() == "here"
    target.unlink()
    file = next(path.glob("*net/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(shardwell.StorageError, match="was damaged: CRC32C"):
        shardwell.export_checkpoint(path, target, "net")
    assert not target.exists()

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


def _family(client: shardwell.Client) -> shardwell.Outer:
    shapes = {f"layers.{n}.w": (30 + n, 7) for n in range(5)}
    return shardwell.Outer(
        client, "family", tensors=shapes, sync_every=4, fragments=2, outer=SGD, codec="fp32"
    )


def test_a_family_is_saved_restored_and_exported_by_its_name(cluster, connect, tmp_path) -> None:
    """Of two fragments, one of which has an outer step more; on two shards, then on three."""
    generator = np.random.default_rng(2)
    client = connect(cluster(2, chunk_size_bytes=64), "w0")
    with _family(client) as outer:
        weights = outer.init(
            {f"layers.{n}.w": generator.normal(size=(30 + n, 7)) for n in range(5)}
        )
        for _ in range(6):
            for array in weights.values():
                array += generator.normal(size=array.shape).astype(np.float32)
            weights.update(outer.after_step(weights))
        image, versions = outer.image(), [each.version for each in outer.fragments]
    assert versions == [2, 1]
    client.parameter("vector", size=5, optimizer=SGD).init(np.zeros(5))
    client.save_checkpoint(tmp_path / "ckpt", ["family"])
    made = shardwell.export_checkpoint(tmp_path / "ckpt", tmp_path / "family.safetensors")
    size = sum((30 + n) * 7 for n in range(5))
    expected = shardwell.ModelExport(name="family", version=1, size=size, tensor_count=5)
    assert made == expected
    found = load_file(tmp_path / "family.safetensors")
    assert found.keys() == image.keys()
    for name, array in image.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    restored = connect(cluster(3), "w0")
    restored.restore_checkpoint(tmp_path / "ckpt", ["family"])
    with _family(restored) as outer:
        outer.init({name: np.zeros_like(array) for name, array in image.items()})
        assert [each.version for each in outer.fragments] == versions
        for name, array in outer.image().items():
            np.testing.assert_array_equal(array, image[name], err_msg=name)


def test_a_family_that_lacks_a_fragment(cluster, connect, tmp_path) -> None:
    client = connect(cluster(2), "w0")
    with _family(client) as outer:
        outer.init({f"layers.{n}.w": np.zeros((30 + n, 7)) for n in range(5)})
    client.save_checkpoint(tmp_path / "part", ["family.fragment-1"])
    words = "lacks fragment 0 of 2 of family 'family'"
    with pytest.raises(shardwell.ArgumentError, match=words):
        shardwell.export_checkpoint(tmp_path / "part", tmp_path / "part.safetensors", "family")
    with pytest.raises(shardwell.ArgumentError, match=words):
        connect(cluster(1), "w0").restore_checkpoint(tmp_path / "part", ["family"])
    client.delete("family.fragment-0")
    with pytest.raises(shardwell.ArgumentError, match=words):
        client.save_checkpoint(tmp_path / "more", ["family"])
    shardwell.export_checkpoint(
        tmp_path / "part", tmp_path / "part.safetensors", "family.fragment-1"
    )
    assert load_file(tmp_path / "part.safetensors").keys() == {"layers.1.w", "layers.3.w"}

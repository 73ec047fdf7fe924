"""Goal: a parameter of as many tensors as a mixture of experts has is like any other.

Method: 18,867 tensors on two shards with files: a step, another client that opens it by name,
shards that start again, a checkpoint, its restore into other shards, and an export.
"""

from __future__ import annotations

from pathlib import Path

import lz4.block
import numpy as np

import shardwell
from harness.wire_client.worker import WireWorker, spec
from shardwell.v1 import types_pb2 as types

COUNT = 18_867
TENSORS = {
    f"model.layers.{i // 384}.block_sparse_moe.experts.{i // 3 % 128}.w{i % 3}.weight": (i % 3, 2)
    for i in range(COUNT)
}
SGD = shardwell.SGD(learning_rate=0.5)


def ones() -> dict[str, np.ndarray]:
    return {name: np.ones(shape, np.float32) for name, shape in TENSORS.items()}


def assert_all(found: dict[str, np.ndarray], value: float) -> None:
    assert list(found) == list(TENSORS)
    assert all((each == value).all() for each in found.values())


def test_very_many_tensors(cluster, connect, tmp_path: Path) -> None:
    running = cluster(2, data_dir=tmp_path / "shards", processes=True)
    client = connect(running, "w0")
    net = client.parameter("net", tensors=TENSORS, optimizer=SGD, codec="fp32")
    net.init(ones())
    assert_all(net.exchange(ones()), 0.5)
    for index in range(2):
        running.children[index].kill()
        running.start_again(index)
    reader = connect(running, "reader").parameter("net")
    assert reader.spec == net.spec
    assert_all(reader.get_weights(), 0.5)
    assert client.status()[0].parameters[0].spec == net.spec
    client.save_checkpoint(tmp_path / "one")
    shardwell.export_checkpoint(tmp_path / "one", tmp_path / "net.safetensors")
    other = connect(cluster(3), "w0")
    other.restore_checkpoint(tmp_path / "one")
    assert_all(other.parameter("net").get_weights(), 0.5)
    assert (tmp_path / "net.safetensors").stat().st_size > 4 * net.size


def test_a_worker_of_the_wire_packs_its_tensors(cluster, connect) -> None:
    running = cluster(1)
    tensors = [types.Tensor(name="a", shape=[6]), types.Tensor(name="b", shape=[4])]
    plain = types.TensorLayout(tensors=tensors).SerializeToString()
    written = lz4.block.compress(plain, store_size=False)
    packed = types.PackedTensors(lz4=written, size_bytes=len(plain))
    with WireWorker(running.target, "w0") as worker:
        worker.create(spec(size=10, layout=types.TensorLayout(packed=packed)))
        worker.create(spec(size=10, layout=types.TensorLayout(tensors=tensors)))  # the same
    layout = connect(running, "w1").parameter("w").spec.layout
    assert layout == shardwell.TensorLayout.of({"a": (6,), "b": (4,)})

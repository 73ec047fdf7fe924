"""Goal: what is not trained reaches all workers bit for bit, or stays where it is.

Method: two workers whose buffers and frozen tensors differ at the start, of every dtype and with
values that float32 does not have; what the second has afterwards is compared by its bytes, and
what the shards store and a worker sends is counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S
from harness.threads import in_background, together

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1)
BUFFERS = {
    "hashes": torch.tensor([2**24 + 1, -(2**63), 2**63 - 1, 0x7FF0_0000_0000_0001]),
    "count": torch.tensor(2**31 + 1, dtype=torch.int64),
    "small": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
    "exact": torch.tensor([[0.1, 1e300], [-0.0, 5e-324]], dtype=torch.float64),
    "payload": torch.tensor([0x7FF8_0000_0000_BEEF]).view(torch.float64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "mask": torch.tensor([True, False, True]),
    "phase": torch.tensor([1 + 2j, complex(0.1, -0.3)], dtype=torch.complex128),
    "short": torch.tensor([65504.0, 6e-8], dtype=torch.float16),
    "brain_float": torch.tensor([1.0, -3e38], dtype=torch.bfloat16),
    "single": torch.tensor([float("-inf"), 1e-45]),
}


def buffered(values: dict[str, Any]) -> Any:
    model = torch.nn.Linear(3, 2)
    for name, value in values.items():
        model.register_buffer(name, value.clone())
    return model


def raw(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def server(model: Any, client: shardwell.Client, **options: Any) -> Any:
    return shardwell.torch.ServerOptimizer(model, client, SGD, **options)


def test_buffers_of_every_dtype_reach_all_bit_for_bit(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=256)
    models = [buffered(BUFFERS), buffered({k: torch.zeros_like(v) for k, v in BUFFERS.items()})]
    for rank, model in enumerate(models):
        server(model, connect(running, f"w{rank}"), worker_count=2)
    for model in models:
        for name, expected in BUFFERS.items():
            assert raw(getattr(model, name)) == raw(expected), name
    assert torch.equal(models[0].weight, models[1].weight)


def test_means_are_of_floats_alone(cluster, connect) -> None:
    running = cluster(2, chunk_size_bytes=256)
    names = ("hashes", "count", "bytes", "mask", "phase")
    values = {name: BUFFERS[name] for name in names}
    models = [buffered({**values, "mean": torch.zeros(2, dtype=torch.float64)}) for _ in range(2)]
    optimizers = [
        server(model, connect(running, f"w{rank}"), worker_count=2)
        for rank, model in enumerate(models)
    ]
    for rank, model in enumerate(models):
        model.mean.fill_(3.0 + 2 * rank)
        model.count.add_(rank)
    together([optimizer.average_buffers for optimizer in optimizers])
    for rank, model in enumerate(models):
        assert model.mean.tolist() == [4.0, 4.0]
        assert int(model.count) == 2**31 + 1 + rank  # each worker's own
        assert raw(model.hashes) == raw(BUFFERS["hashes"])
    models[0].mean.fill_(1e300)
    with pytest.raises(shardwell.ArgumentError, match=r"'mean'.*beyond"):
        optimizers[0].average_buffers()


def test_a_buffer_of_another_dtype_is_named(cluster, connect) -> None:
    running = cluster(1)
    server(buffered({"count": torch.tensor(1)}), connect(running, "w0"), worker_count=2)
    other = buffered({"count": torch.tensor(1, dtype=torch.int32)})
    with pytest.raises(shardwell.SpecMismatchError, match=r"count \(int64.*count \(int32"):
        server(other, connect(running, "w1"), worker_count=2)


def adapted(seed: int, size: int = 64, dtype: Any = torch.bfloat16) -> Any:
    """An adapter beside a frozen base."""
    torch.manual_seed(seed)
    base = torch.nn.Linear(size, size, dtype=dtype).requires_grad_(False)
    return torch.nn.ModuleDict({"base": base, "adapter": torch.nn.Linear(4, 2)})


def test_a_frozen_base_stays_on_the_workers(cluster, connect) -> None:
    client = connect(cluster(2), "w0")
    model = adapted(1, size=1024)
    frozen_bytes = sum(p.numel() * p.element_size() for p in model["base"].parameters())
    before = raw(model["base"].weight)
    server(model, client)
    assert raw(model["base"].weight) == before
    assert client.traffic.sent_bytes < frozen_bytes / 100
    stored = sum(shard.stored_bytes for shard in client.status())
    assert stored < frozen_bytes / 100


def test_another_frozen_tensor_is_named(cluster, connect) -> None:
    running = cluster(2)
    server(adapted(1), connect(running, "w0"), worker_count=2)
    same = adapted(1)
    server(same, connect(running, "w1"), worker_count=2)
    one_bit = adapted(1)
    one_bit["base"].weight.view(torch.int16)[3, 5] ^= 1
    for other, named in ((one_bit, r"base\.weight"), (adapted(2), r"base\..*1 more")):
        with pytest.raises(shardwell.SpecMismatchError, match=named) as refused:
            server(other, connect(running, "w2"), worker_count=2)
        assert "broadcast_frozen=True" in str(refused.value)
    with pytest.raises(shardwell.SpecMismatchError, match=r"base\.weight \(bfloat16 64x64"):
        server(adapted(1, dtype=torch.float32), connect(running, "w2"), worker_count=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_worker_without_the_frozen_tensors_gets_them(cluster, connect, dtype) -> None:
    running = cluster(2)
    first = adapted(1, dtype=dtype)
    expected = raw(first["base"].weight)
    options = {"worker_count": 2, "broadcast_frozen": True}
    server(first, connect(running, "w0"), **options)
    newcomer = adapted(2, dtype=dtype)
    server(newcomer, connect(running, "w1"), **options)
    for model in (first, newcomer):
        assert raw(model["base"].weight) == expected
    assert raw(newcomer["base"].bias) == raw(first["base"].bias)


def test_a_newcomer_waits_for_the_first_workers_frozen_tensors(cluster, connect) -> None:
    running = cluster(1)
    server(adapted(1), connect(running, "w0"), worker_count=2)  # which keeps them
    newcomer = adapted(2)
    client = connect(running, "w1")
    options: dict[str, Any] = {"worker_count": 2, "broadcast_frozen": True}
    with pytest.raises(shardwell.NotInitializedError, match="broadcast_frozen=True"):
        server(newcomer, client, timeout_s=0.2, **options)
    starting = in_background(lambda: server(newcomer, client, **options))
    server(adapted(1), connect(running, "w2"), **options)
    starting.result(PATIENCE_S)
    assert raw(newcomer["base"].weight) == raw(adapted(1)["base"].weight)


def test_an_export_of_a_model_with_a_frozen_base(cluster, connect, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    client = connect(cluster(1), "w0")
    model = adapted(1)
    server(model, client, codec="fp32")
    client.save_checkpoint(tmp_path / "one")
    shardwell.export_checkpoint(tmp_path / "one", tmp_path / "net.safetensors", "model")
    found = load_file(tmp_path / "net.safetensors")
    assert set(found) == {"adapter.weight", "adapter.bias"}
    fresh = adapted(1)
    assert not fresh.load_state_dict(found, strict=False).unexpected_keys
    np.testing.assert_array_equal(fresh["adapter"].weight.detach(), found["adapter.weight"])


def test_means_take_the_place_of_the_first_workers_buffers(cluster, connect) -> None:
    """Bit for bit, also from far away, and but for what is not finite."""
    running = cluster(2, chunk_size_bytes=256)
    first = [1e30, 1.0, 3e-39, 7.0, 5.0]
    model = buffered({"mean": torch.tensor(first), "small": torch.ones(3, dtype=torch.float16)})
    client = connect(running, "w0")
    optimizer = server(model, client)
    for last in ([1e-30, 1e-10, -2.0, 1 / 3, 4.0], [0.0, -7e7, 1.0, float("inf"), 4.0]):
        model.mean.copy_(torch.tensor(last))
        model.small.fill_(1 / 3)
        optimizer.average_buffers()
        found = client.parameter("model.first").get_weights()
        kept = [
            old if value == float("inf") else value for value, old in zip(last, first, strict=True)
        ]
        assert torch.equal(torch.from_numpy(found["mean"]), torch.tensor(kept))
        first = kept

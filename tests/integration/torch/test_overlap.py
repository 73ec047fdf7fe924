"""Goal: gradients reach the shards while backward still runs, whatever the number of shards.

Method: a hook in the middle of backward waits until the shards have counted chunks, so backward
itself can't end before. Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

from typing import Any

import pytest

import shardwell
from harness.polling import eventually
from harness.threads import together
from harness.torch_models import assert_same

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

SGD = shardwell.SGD(learning_rate=0.1, momentum=0.9)
VOCABULARY, WIDTH, LAYER_COUNT = 400, 32, 12


class Tied(torch.nn.Module):
    """A language model in small: half of its elements are the embedding, whose gradient is last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYER_COUNT))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.in_backward: Any = None
        """Called when half of the layers have their gradients, a quarter of all elements."""

    def forward(self, ids: Any) -> Any:
        hidden = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
            if number == LAYER_COUNT // 2 - 1 and self.in_backward is not None:
                hidden.register_hook(self.in_backward)
        return self.head(hidden)


def loss_of(model: Any, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (4, 8), generator=generator)
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def counted(client: shardwell.Client) -> int:
    return sum(
        each.counted_chunk_count
        for shard in client.status()
        for each in shard.parameters
        if each.spec.name == "model"
    )


@pytest.mark.parametrize("shard_count", [1, 2, 4, 8])
@pytest.mark.parametrize("overlap", [True, "auto"])
def test_the_first_piece_is_counted_before_half_of_backward(
    cluster, connect, shard_count: int, overlap: Any
) -> None:
    client = connect(cluster(shard_count, chunk_size_bytes=256), "w0")
    model, alone = Tied(), Tied()
    optimizer = shardwell.torch.ServerOptimizer(model, client, SGD, codec="fp32", overlap=overlap)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    seen: list[int] = []

    def look(_: Any) -> None:
        eventually("a piece is counted", lambda: counted(client) > before)
        assert model.embedding.weight.grad is None, "backward is not over"
        seen.append(optimizer.next_step)

    for step in range(3):
        before = counted(client)
        model.in_backward = None if overlap == "auto" and not step else look
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, step).backward()
        reference.step()
        reference.zero_grad()
    assert seen == ([0, 1, 2] if overlap is True else [1, 2])
    assert_same(model, alone, rtol=1e-4, atol=1e-5)


def test_several_workers_get_the_same_weights_bit_for_bit(cluster, connect) -> None:
    running = cluster(4, chunk_size_bytes=256)
    models = [Tied(), Tied()]
    optimizers = [
        shardwell.torch.ServerOptimizer(
            model, connect(running, f"w{rank}"), SGD, worker_count=2, overlap=True
        )
        for rank, model in enumerate(models)
    ]

    def train(rank: int) -> None:
        for step in range(4):
            loss_of(models[rank], 2 * step + rank).backward()
            optimizers[rank].step()
            optimizers[rank].zero_grad()

    together([lambda: train(0), lambda: train(1)])
    assert_same(*models)


def test_a_cluster_keeps_the_order_in_which_a_parameter_was_made(cluster, connect) -> None:
    """As an earlier version dealt it, say: workers of this one join, and pieces leave still."""
    running = cluster(2, chunk_size_bytes=256)
    model = Tied()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    client = connect(running, "w0")
    connect(running, "w1").parameter(
        "model", tensors=shapes, optimizer=SGD, worker_count=1, codec="fp32"
    )
    optimizer = shardwell.torch.ServerOptimizer(model, client, SGD, codec="fp32", overlap=True)
    assert [each.name for each in optimizer.parameter.spec.layout] == list(shapes)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.next_step == 2
    with torch.no_grad():
        model.layers[0].weight += 1.0
    optimizer.push_weights()
    assert [each.name for each in optimizer.parameter.spec.layout] == list(shapes)
    pushed = optimizer.parameter.get_weights()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(pushed[name]), tensor.detach())
    loss_of(model, 2).backward()
    optimizer.step()
    assert optimizer.next_step == 1

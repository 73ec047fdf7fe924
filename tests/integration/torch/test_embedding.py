"""Goal: layers whose weight is a table's train as torch's own do, and push what backward brings.

Method: the same rows, data and rule in torch.nn's layers and on a cluster, fp32; outputs, losses
and rows agree within float tolerance. Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.threads import together
from shardwell.table.reader import RowReading

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

ROWS, DIM = 40, 6
RULES = [
    (shardwell.SGD(learning_rate=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    (
        shardwell.Adagrad(learning_rate=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ),
]


def table_of(client: Any, name: str = "users", **options: Any) -> shardwell.Table:
    given = {"row_count": ROWS, "optimizer": RULES[0][0], "codec": "fp32", **options}
    return client.table(name, dim=DIM, initializer=shardwell.Normal(seed=1, std=0.5), **given)


def torchs(table: shardwell.Table, kind: Any = None, **options: Any) -> Any:
    """torch's own layer with the table's rows."""
    layer = (kind or torch.nn.Embedding)(ROWS, DIM, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(table.get_rows(np.arange(ROWS))))
    return layer


def batches(count: int = 20, size: int = 12) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, ROWS, (size, 3), generator=generator),
            torch.randn(size, generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(layer: Any, ids: Any, targets: Any) -> Any:
    return (layer(ids).sum(dim=1).tanh().sum(dim=-1) - targets).square().mean()


def rows_of(table: shardwell.Table) -> Any:
    return table.get_rows(np.arange(ROWS), min_version=table.next_step)


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2), "w0")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("is_prefetched", [True, False])
@pytest.mark.parametrize(("rule", "theirs"), RULES)
def test_losses_of_an_embedding_are_torchs(client, rule, theirs, is_prefetched, mode) -> None:
    table = table_of(client, optimizer=rule, mode=mode)
    layer, alone = shardwell.torch.Embedding(table), torchs(table)
    optimizer = theirs(alone.parameters())
    data = batches()
    for step, (ids, targets) in enumerate(data):
        mine, expected = loss_of(layer, ids, targets), loss_of(alone, ids, targets)
        if is_prefetched and step + 1 < len(data):
            layer.prefetch(data[step + 1][0])
        mine.backward()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        assert table.next_step == step + 1
    np.testing.assert_allclose(rows_of(table), alone.weight.detach(), rtol=1e-4, atol=1e-5)


def test_what_was_prefetched_is_taken(client, monkeypatch) -> None:
    """And is of the step that was pushed in between."""
    layer = shardwell.torch.Embedding(table_of(client))
    asked: list[int] = []
    read = RowReading.read
    monkeypatch.setattr(RowReading, "read", lambda *given: asked.append(1) or read(*given))
    ids = torch.tensor([3, 1, 3])
    layer.prefetch(ids)  # nothing is looked up: at once
    found = layer(ids)
    layer.prefetch(ids.flip(0))
    found.sum().backward()
    after = layer(ids)
    assert not asked
    torch.testing.assert_close(found - after, torch.tensor([1.0, 0.5, 1.0])[:, None].expand(3, DIM))


def test_workers_train_an_embedding_as_one_with_all_their_samples(cluster, connect) -> None:
    running, data = cluster(2), batches()
    alone = torchs(table_of(connect(running, "w0"), "other"))
    optimizer = RULES[0][1](alone.parameters())

    def work(rank: int) -> Any:
        table = table_of(connect(running, f"v{rank}"), worker_count=2)
        layer = shardwell.torch.Embedding(table)
        layer.sample_count = (8, 4)[rank]
        own = slice(0, 8) if rank == 0 else slice(8, 12)
        for ids, targets in data:
            loss_of(layer, ids[own], targets[own]).backward()
        return rows_of(table)

    first, second = together([lambda: work(0), lambda: work(1)])
    for ids, targets in data:
        loss_of(alone, ids, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 5, -1])
def test_padding_is_zeros_without_a_gradient(client, padding) -> None:
    table = table_of(client)
    layer, alone = shardwell.torch.Embedding(table, padding_idx=padding), torchs(table)
    ids = torch.tensor([[1, 5, 7], [5, 5, 2]])
    expected = alone(ids)
    if padding == 5:
        expected = expected * (ids != 5)[..., None]
    elif padding == -1:
        ids = torch.tensor([[1, -1, 7], [-1, -1, 2]])
        expected = expected * (ids != -1)[..., None]
    found = layer(ids)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert set(table.row_ids()) == ({1, 2, 5, 7} if padding is None else {1, 2, 7})


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("form", ["rows", "offsets", "last", "weights"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_torchs(client, mode, form, padding) -> None:
    if form == "weights" and mode != "sum":
        mode = "sum"
    table = table_of(client)
    options = {"mode": mode, "include_last_offset": form == "last"}
    layer = shardwell.torch.EmbeddingBag(table, padding_idx=padding, **options)
    alone = torchs(table, torch.nn.EmbeddingBag, padding_idx=padding, **options)
    optimizer = RULES[0][1](alone.parameters())
    for step in range(3):
        ids = torch.tensor([[4, 9, 9, 1], [7, 4, 2 + step, 4]])
        given: dict[str, Any] = {}
        if form == "weights":
            given["per_sample_weights"] = torch.arange(8.0).reshape(2, 4) / 8
        if form in ("offsets", "last"):
            ids = ids.reshape(-1)
            given["offsets"] = torch.tensor([0, 3, 3, 8] if form == "last" else [0, 3, 3])
        mine, expected = layer(ids, **given), alone(ids, **given)
        torch.testing.assert_close(mine, expected)
        mine.square().sum().backward()
        expected.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(rows_of(table), alone.weight.detach(), rtol=1e-4, atol=1e-5)


def test_what_accumulates_is_one_step(client) -> None:
    table = table_of(client)
    model = torch.nn.Sequential(shardwell.torch.Embedding(table), torch.nn.Linear(DIM, 1))
    alone = copy.deepcopy(model[1])
    optimizer = shardwell.torch.ServerOptimizer(model, client, RULES[0][0], codec="fp32")
    weight = torchs(table)
    first, second = batches(2)
    with optimizer.no_sync():
        model(first[0]).sum().backward()
    assert table.next_step == 0
    model(second[0]).sum().backward()
    optimizer.step()
    assert table.next_step == 1
    for ids, _ in (first, second):
        alone(weight(ids)).sum().backward()
    RULES[0][1](weight.parameters()).step()
    np.testing.assert_allclose(rows_of(table), weight.weight.detach(), rtol=1e-4, atol=1e-5)


def test_one_pass_through_several_lookups_is_one_step(client) -> None:
    table = table_of(client)
    layer, alone = shardwell.torch.Embedding(table), torchs(table)
    ids = torch.tensor([1, 2, 1])
    for of in (layer, alone):
        (of(ids) * of(ids.flip(0) + 1)).sum().backward()
    assert table.next_step == 1
    RULES[0][1](alone.parameters()).step()
    np.testing.assert_allclose(rows_of(table), alone.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_pass_that_failed_counts_for_nothing(client) -> None:
    table = table_of(client)
    layer = shardwell.torch.Embedding(table)
    before = table.get_rows([1])

    def fail(gradient: Any) -> None:
        raise RuntimeError("lost")

    head = torch.ones(DIM, requires_grad=True)
    late = head * 1  # its gradient comes after that of the rows
    late.register_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        (layer(torch.tensor([1])) * late).sum().backward()
    assert table.next_step == 0
    layer(torch.tensor([1])).sum().backward()
    np.testing.assert_allclose(table.get_rows([1]), before - 0.5, rtol=1e-6)


def test_a_pass_that_outlives_many_that_failed_is_told_so(client) -> None:
    """Which of them will still end is known to torch alone; no step has a part of one."""
    table = table_of(client)
    layer = shardwell.torch.Embedding(table)
    before = table.get_rows([1, 2])

    def fail(gradient: Any) -> None:
        raise RuntimeError("lost")

    def others_fail(gradient: Any) -> None:
        for loss in losses:
            with pytest.raises(RuntimeError, match="lost"):
                loss.backward()

    def loss_of_row(row: int, hook: Any) -> Any:
        late = torch.ones(DIM, requires_grad=True) * 1  # its gradient comes after the row's
        late.register_hook(hook)
        return (layer(torch.tensor([row])) * late).sum()

    losses = [loss_of_row(1, fail) for _ in range(20)]
    with pytest.raises(shardwell.LimitError, match="run fewer at once"):
        loss_of_row(2, others_fail).backward()
    assert table.next_step == 0
    layer(torch.tensor([1])).sum().backward()
    np.testing.assert_allclose(table.get_rows([1, 2]), before - [[0.5], [0.0]], rtol=1e-6)


@pytest.fixture
def failed(cluster, connect, tmp_path) -> Any:
    """A layer of which a shard was killed when rows were there, and whose backward has failed."""
    running = cluster(2, data_dir=tmp_path / "shards", processes=True)
    layer = shardwell.torch.Embedding(table_of(connect(running, "w0")))
    ids = torch.arange(ROWS)
    found = layer(ids)
    layer.timeout_s = 5.0
    running.children[1].kill()
    assert running.children[1].wait(30.0) is not None
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):
        found.sum().backward()
    with pytest.raises(shardwell.ShardUnavailableError, match="shard 1"):  # what is owed
        layer(ids)
    layer.timeout_s = None
    running.start_again(1)
    return layer, found.detach().numpy()


def test_what_was_not_pushed_is_made_good_for(failed) -> None:
    """By the next pass; and counts once."""
    layer, before = failed
    layer.prefetch(torch.arange(3))
    after = layer(torch.arange(ROWS)).detach().numpy()
    np.testing.assert_allclose(after, before - 0.5, rtol=1e-6)
    assert layer.table.next_step == 1
    layer.push()  # nothing is owed: a step of no rows
    assert layer.table.next_step == 2


def test_a_step_that_was_abandoned_is_not_made_good_for(failed) -> None:
    layer, before = failed
    layer.table.abandon_step()
    layer(torch.tensor([1])).sum().backward()
    assert layer.table.next_step == 2
    assert np.abs(rows_of(layer.table)[1] - before[1]).max() <= 1.01


def test_what_another_layer_brought_is_not_lost(cluster, connect) -> None:
    """Of two layers of a pass, one can't push: torch does nothing more at its end then."""
    client = connect(cluster(1), "w0")
    tables = [table_of(client, name) for name in ("first", "second")]
    layers = [shardwell.torch.Embedding(table) for table in tables]
    layers[0].sample_count = 2.5
    ids = torch.tensor([1, 2])
    before = [table.get_rows([1]) for table in tables]
    with pytest.raises(shardwell.ArgumentError, match="sample_count"):
        (layers[0](ids) + layers[1](ids)).sum().backward()
    assert [table.next_step for table in tables] == [0, 1]
    layers[0].sample_count = 2
    layers[0].push()
    for table, was in zip(tables, before, strict=True):
        assert table.next_step == 1
        np.testing.assert_allclose(table.get_rows([1]), was - 0.5, rtol=1e-6)


def test_passes_and_lookups_of_several_threads(client) -> None:
    table = table_of(client)
    layer = shardwell.torch.Embedding(table)
    before = rows_of(table)

    def train(row: int) -> None:
        for _ in range(10):
            layer(torch.tensor([row])).sum().backward()

    def look() -> None:
        with torch.no_grad():
            for _ in range(20):
                layer(torch.tensor([1, 2]))

    together([lambda: train(1), lambda: train(2), look])
    assert table.next_step == 20
    np.testing.assert_allclose(rows_of(table)[1:3], before[1:3] - 5.0, rtol=1e-5, atol=1e-5)


def test_an_embedding_in_a_checkpointed_layer(client) -> None:
    table = table_of(client)
    layer = shardwell.torch.Embedding(table)
    before = rows_of(table)
    checkpoint = torch.utils.checkpoint.checkpoint
    weight = torch.ones(DIM, requires_grad=True)

    def inner(values: Any) -> Any:
        return (values * layer(torch.tensor([2]))).tanh()

    found = checkpoint(inner, weight * layer(torch.tensor([1])), use_reentrant=False)
    (found + layer(torch.tensor([3]))).sum().backward()
    assert table.next_step == 1
    assert (rows_of(table)[1:4] != before[1:4]).all()
    with pytest.raises(shardwell.ArgumentError, match="use_reentrant=False"):
        checkpoint(inner, weight * layer(torch.tensor([1])), use_reentrant=True).sum().backward()
    assert table.next_step == 1


def test_a_gradient_that_a_shard_refuses_ends_the_step(client) -> None:
    """On the others it was counted by then."""
    layer = shardwell.torch.Embedding(table_of(client, optimizer=RULES[1][0]))
    ids = torch.arange(ROWS)
    factor = torch.ones(ROWS, 1)
    factor[7] = 1e30
    with pytest.raises(shardwell.NonFiniteError):
        (layer(ids) * factor).sum().backward()
    step = layer.table.next_step
    layer(ids).sum().backward()
    assert layer.table.next_step == step + 1


def test_push_ends_a_step_without_rows(cluster, connect) -> None:
    running = cluster(2)
    layers = [
        shardwell.torch.Embedding(table_of(connect(running, f"w{rank}"), worker_count=2))
        for rank in range(2)
    ]
    before = layers[0].table.get_rows([1])
    layers[0](torch.tensor([1])).sum().backward()
    layers[1].push()
    np.testing.assert_allclose(layers[1](torch.tensor([1])).detach(), before - 0.25, rtol=1e-6)


def test_what_is_not_finite_is_refused_and_the_step_open(client) -> None:
    layer = shardwell.torch.Embedding(table_of(client))
    ids = torch.tensor([[1, 2]])
    with pytest.raises(shardwell.NonFiniteError, match="users"):
        (layer(ids) * float("nan")).sum().backward()
    assert layer.table.next_step == 0
    layer(ids).sum().backward()
    assert layer.table.row_ids().tolist() == [1, 2]


@pytest.mark.parametrize("how", ["no_grad", "inference", "eval"])
def test_an_evaluation_pushes_nothing(client, how) -> None:
    layer = shardwell.torch.Embedding(table_of(client))
    if how == "eval":
        assert layer.eval()(torch.tensor([1])).requires_grad  # as torch's does
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            assert not layer(torch.tensor([1])).requires_grad
    assert layer.table.next_step == 0


def test_the_module_is_as_torchs(client) -> None:
    layer = shardwell.torch.Embedding(table_of(client), padding_idx=3)
    assert not list(layer.parameters())
    assert not layer.state_dict()
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (ROWS, DIM, 3)
    assert "Table('users', row_count=40, dim=6, mode='sync'), padding_idx=3" in repr(layer)
    assert layer(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, DIM)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.tensor([1, ROWS]), f"row id {ROWS} at place 1 is out of range"),
        (torch.tensor([1.5]), "ids must be integers; got float32"),
    ],
)
def test_ids_that_cannot_be_used(client, ids, says) -> None:
    layer = shardwell.torch.Embedding(table_of(client))
    for call in (layer, layer.prefetch):
        with pytest.raises(shardwell.ArgumentError, match=says):
            call(ids)


def test_bad_arguments_of_an_embedding_are_refused(client) -> None:
    with pytest.raises(shardwell.ArgumentError, match=r"table must be made by Client\.table"):
        shardwell.torch.Embedding(client)
    with pytest.raises(shardwell.ArgumentError, match="mode must be 'sum', 'mean' or 'max'"):
        shardwell.torch.EmbeddingBag(table_of(client), mode="median")

"""Goal: a copy of what is connected works where it can, and is refused by what to do where not.

Method: copies as frameworks make them: deepcopy, AveragedModel, torch.save, pickle for a spawned
process. A copied layer's rows are compared with those of the layer that trains them.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import numpy as np
import pytest

import shardwell

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402


@pytest.fixture
def running(cluster) -> Any:
    return cluster(2)


@pytest.fixture
def client(running, connect) -> shardwell.Client:
    return connect(running, "w0")


@pytest.fixture
def table(client) -> Any:
    return client.table("users", row_count=10, dim=4, optimizer=shardwell.SGD(0.5))


def bag(table: Any) -> Any:
    return shardwell.torch.EmbeddingBag(table, mode="sum", padding_idx=7)


@pytest.mark.parametrize("make", [shardwell.torch.Embedding, bag])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy])
def test_a_copied_layer_reads_the_same_table(table, make, duplicate, caplog) -> None:
    layer = make(table)
    with caplog.at_level(logging.INFO, logger="shardwell"):
        twin = duplicate(layer)
    assert any("reads the same table" in record.message for record in caplog.records)
    assert twin.table is table
    assert "read only" in repr(twin)
    assert "read only" not in repr(layer)
    ids = torch.tensor([[1, 2], [3, 7]])
    layer(ids).sum().backward()  # a step of the table
    assert table.next_step == 1
    assert torch.equal(twin(ids), layer(ids))
    with pytest.raises(shardwell.ArgumentError, match=r"copy.*'users'.*only reads"):
        twin(ids).sum().backward()
    with pytest.raises(shardwell.ArgumentError, match="only reads"):
        twin.push()
    assert table.next_step == 1


def test_the_mean_of_weights_over_time_has_the_tables_rows(client, table) -> None:
    model = torch.nn.Sequential(shardwell.torch.Embedding(table), torch.nn.Linear(4, 1))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = shardwell.torch.ServerOptimizer(model, client, shardwell.SGD(0.1), codec="fp32")
    ids = torch.tensor([1, 2])
    expected = None
    for _ in range(3):
        model(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        weight = model[1].weight.detach().clone()
        expected = weight if expected is None else (expected + weight) / 2
    torch.testing.assert_close(average.module[1].weight.detach(), expected)
    with torch.no_grad():
        rows = torch.from_numpy(table.get_rows(np.array([1, 2])))
        mean = torch.nn.functional.linear(rows, expected, average.module[1].bias)
        torch.testing.assert_close(average(ids), mean)


def test_pickles_are_refused_with_what_to_do(running, client, table) -> None:
    net = client.parameter("net", size=3, optimizer=shardwell.SGD(0.1))
    layer = shardwell.torch.Embedding(table)
    dense = torch.nn.Linear(2, 1)
    optimizer = shardwell.torch.ServerOptimizer(dense, client, shardwell.SGD(0.1))
    with shardwell.join_group("g", rank=0, size=1, rendezvous=running.target) as group:
        refused: list[tuple[Any, str]] = [
            (client, "Client can't.*shardwell.connect"),
            (net, "Parameter can't.*by its name"),
            (table, "Table can't.*by its name"),
            (layer, "Embedding can't.*state_dict"),
            (optimizer, "ServerOptimizer can't.*state_dict"),
            (group, "Group can't.*join_group"),
        ]
        for each, words in refused:
            with pytest.raises(shardwell.ArgumentError, match=words):
                pickle.dumps({"dataset": [each]})
            if each is not layer:
                with pytest.raises(shardwell.ArgumentError, match=words):
                    copy.deepcopy(each)
    with pytest.raises(shardwell.ArgumentError, match="Embedding can't"):
        torch.save(torch.nn.Sequential(layer), io.BytesIO())


def test_a_model_under_a_server_optimizer_is_copied_as_any(client) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = shardwell.torch.ServerOptimizer(model, client, shardwell.SGD(0.1), codec="fp32")
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    twin(torch.ones(1, 2)).sum().backward()  # sends nothing
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.next_step == 1
    torch.testing.assert_close(model.weight, twin.weight - 0.1)

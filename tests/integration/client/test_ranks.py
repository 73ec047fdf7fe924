"""Goal: `client.rank` is one worker's alone, stays after a restart, and never waits for others.

Method: workers of one parameter or table ask for their ranks, with and without the variables of a
launcher, on two shards; clients and shards are closed, killed and started again in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from shardwell_server import LocalCluster

SIZE = 300
ONES = np.ones(SIZE, np.float32)
ELASTIC = shardwell.Elastic(member_return_s=0.2, member_lease_s=1.0)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def opened(client: shardwell.Client, name: str = "net", **options: Any) -> Any:
    model = client.parameter(name, size=SIZE, optimizer=shardwell.SGD(0.5), codec="fp32", **options)
    model.init(np.zeros(SIZE, np.float32))
    return model


def test_a_crew_is_ranked_in_the_order_of_its_seats(cluster, connect) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{n}") for n in range(3)]
    for client in clients:
        opened(client, worker_count=3)
    asked = [clients[n] for n in (2, 0, 1)]
    assert [client.rank for client in asked] == [0, 1, 2]  # none waits for the others
    assert [client.worker_count for client in asked] == [3, 3, 3]
    clients[2].close()
    again = connect(running, "w2")
    opened(again, worker_count=3)
    assert again.rank == 0
    one_more = connect(running, "w3")
    opened(one_more, worker_count=3)
    with pytest.raises(shardwell.SeatsTakenError, match="w3"):
        _ = one_more.rank


def test_a_first_gradient_takes_the_rank_too(cluster, connect) -> None:
    running = cluster(2)
    first, second = (connect(running, f"w{n}") for n in range(2))
    opened(first, worker_count=2)
    opened(second, worker_count=2).put_gradient(ONES)
    assert (first.rank, second.rank) == (1, 0)


def test_between_the_pieces_of_a_gradient_a_rank_is_answered(cluster, connect) -> None:
    """The begun exchange holds the parameter's turn until it is finished."""
    client = connect(cluster(2), "w0")
    model = opened(client, worker_count=1)
    begun = model.begin_exchange(ONES)
    begun.ready(0, SIZE // 2)
    assert (client.rank, client.worker_count) == (0, 1)
    np.testing.assert_array_equal(begun.finish(), -0.5 * ONES)


def test_shards_that_were_killed_keep_ranks(connect, tmp_path: Path) -> None:
    with LocalCluster(2, data_dir=tmp_path, processes=True) as running:
        first, second = (connect(running, f"w{n}") for n in range(2))
        for client in (first, second):
            opened(client, worker_count=2)
        assert (second.rank, first.rank) == (0, 1)
        for index in range(2):
            running.children[index].kill()
            running.children[index].wait(PATIENCE_S)
            running.start_again(index)
        second.close()
        again = connect(running, "w1")
        opened(again, worker_count=2)
        assert again.rank == 0


def test_tables_rank_workers_as_parameters_do(cluster, connect) -> None:
    running = cluster(2)
    first, second = (connect(running, f"w{n}") for n in range(2))
    for client in (first, second):
        client.table("rows", row_count=9, dim=2, optimizer=shardwell.SGD(0.5), worker_count=2)
    assert (second.rank, first.rank) == (0, 1)
    assert (second.worker_count, first.worker_count) == (2, 2)


def test_elastic_members_are_ranked_by_age(cluster, connect) -> None:
    running = cluster(2)
    old, young, newcomer = (connect(running, f"w{n}") for n in (2, 1, 0))
    models = [opened(client, members=ELASTIC) for client in (old, young)]
    assert (old.rank, young.rank) == (0, 1)  # as they have opened it: no worker has joined
    for model in models:
        model.join(waits=False)
    assert [(each.rank, each.worker_count) for each in (old, young)] == [(0, 2), (1, 2)]
    opened(newcomer, members=ELASTIC)
    assert (newcomer.rank, newcomer.worker_count) == (2, 3)
    assert {each.worker_id for each in newcomer.members("net")} == {"w1", "w2"}  # it did not join
    models[0].leave()
    assert (young.rank, young.worker_count) == (0, 1)
    assert (old.rank, newcomer.rank) == (1, 2)  # neither is a member, and both have it open
    models[1].exchange(ONES)
    models[0].join(waits=False)
    assert (young.rank, old.rank) == (0, 1)  # who comes back is the youngest


def test_the_next_is_rank_0_when_a_member_is_lost(cluster, connect) -> None:
    running = cluster(2)
    first, second = (connect(running, f"w{n}") for n in range(2))
    for client in (first, second):
        opened(client, members=ELASTIC).join(waits=False)
    assert second.rank == 1
    first.close()
    eventually("the other is rank 0", lambda: second.rank == 0)
    assert second.worker_count == 1


def test_a_launcher_ranks_a_crew(cluster, connect, monkeypatch) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    with pytest.raises(shardwell.ArgumentError, match=r"open a parameter with worker_count="):
        _ = client.rank
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (client.rank, client.worker_count) == (3, 4)  # before anything is open
    opened(client, worker_count=4)
    assert (client.rank, client.worker_count) == (3, 4)
    assert client.members("net") == ()  # no seat was taken for it
    other = connect(running, "w1")
    opened(other, "pair", worker_count=2)
    with pytest.raises(shardwell.ArgumentError, match=r"started 4 workers.*worker_count=2"):
        _ = other.rank
    elastic = connect(running, "w2")
    opened(elastic, "open", members=ELASTIC)
    assert (elastic.rank, elastic.worker_count) == (0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(shardwell.ArgumentError, match="WORLD_SIZE is not"):
        _ = client.rank


def test_what_has_no_ranks_says_so(cluster, connect) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    model = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(0.5), worker_count=2)
    with pytest.raises(shardwell.NotInitializedError):
        _ = client.rank
    model.init(ONES)
    assert client.rank == 0
    alone = connect(running, "w1")
    own = opened(alone, "own", mode="async")
    with pytest.raises(shardwell.ArgumentError, match="no ranks"):
        own.ranking()
    with pytest.raises(shardwell.ArgumentError, match="nothing open that has ranks"):
        _ = alone.rank

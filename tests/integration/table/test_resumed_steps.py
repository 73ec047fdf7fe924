"""Goal: a worker that is started again in mid-step reads rows of one version, on all shards.

Method: a worker's step reaches one shard and not the other, which a proxy holds up; another process
of its name goes on, with gradients that depend on the rows. Beside it the same, undisturbed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Proxy
from harness.polling import eventually
from harness.threads import in_background, together
from shardwell_server import LocalCluster

IDS = np.arange(0, 4000, 2)
DIM = 8
BRIEF_S = 2.0


@pytest.fixture
def proxies_of() -> Iterator[Callable[[LocalCluster], list[Proxy]]]:
    with contextlib.ExitStack() as stack:

        def start(running: LocalCluster) -> list[Proxy]:
            return [stack.enter_context(Proxy(address)) for address in running.addresses]

        yield start


def opened(client: shardwell.Client, worker_count: int = 1, name: str = "rows") -> shardwell.Table:
    return client.table(
        name,
        row_count=4000,
        dim=DIM,
        optimizer=shardwell.Adagrad(learning_rate=0.25),
        worker_count=worker_count,
        codec="fp32",
    )


def gradients_of(rows: np.ndarray) -> np.ndarray:
    """Others for any other rows."""
    return rows + np.float32(rows.sum(dtype=np.float64) % 3) + 1


def versions(running: LocalCluster) -> list[int]:
    with shardwell.connect(running.target, worker_id="observer") as observer:
        return [each.version for each in observer.table("rows").status()]


def cut_off(running: LocalCluster, held: Proxy, call: Callable[[], Any], version: int) -> None:
    """Has a step counted by shard 0 alone, which closes it there."""
    held.stall()
    calling = in_background(call)
    eventually("shard 0 has closed the step", lambda: versions(running)[0] == version)
    held.cut(refuse=True)
    held.resume()
    assert isinstance(calling.exception(20), shardwell.ShardUnavailableError)


@pytest.mark.parametrize("worker_count", [1, 2])
@pytest.mark.parametrize("with_files", [False, True])
def test_it_reads_the_rows_before_the_step(
    cluster,
    connect,
    proxies_of,
    tmp_path: Path,
    worker_count: int,
    with_files: bool,
) -> None:
    running = cluster(2, data_dir=tmp_path if with_files else None)
    proxies = proxies_of(running)
    target = ",".join(proxy.address for proxy in proxies)
    first = connect(target, "w0")
    others = [connect(running, f"w{index}") for index in range(1, worker_count)]
    table = opened(first, worker_count)
    tables = [table, *(opened(client, worker_count) for client in others)]
    rows = table.get_rows(IDS)
    for _ in range(2):
        put = gradients_of(rows)
        together([lambda each=each, put=put: each.put_row_gradients(IDS, put) for each in tables])
        rows = table.get_rows(IDS, min_version=table.next_step)
    put = gradients_of(rows)
    for each in tables[1:]:
        each.put_row_gradients(IDS, put)
    cut_off(running, proxies[1], lambda: table.put_row_gradients(IDS, put, timeout_s=BRIEF_S), 3)
    first.close()

    resumed = opened(connect(running, "w0"), worker_count)
    assert (resumed.next_step, resumed.is_step_begun) == (2, True)
    newest = connect(running, "reader").table("rows").get_rows(IDS)
    assert (newest != rows).any(), "nothing has closed; the test can't fail"
    assert (newest == rows).any()
    np.testing.assert_array_equal(resumed.get_rows(IDS), rows)
    np.testing.assert_array_equal(resumed.get_rows(IDS[::-1], min_version=2), rows[::-1])
    assert resumed.put_row_gradients(IDS, gradients_of(resumed.get_rows(IDS))) == 2
    found = resumed.get_rows(IDS, min_version=3)

    whole = opened(connect(running, "w0"), name="whole")
    rows = whole.get_rows(IDS)
    for _ in range(3):
        whole.put_row_gradients(IDS, gradients_of(rows))
        rows = whole.get_rows(IDS)
    np.testing.assert_array_equal(found, rows)


def test_restarted_shards_have_a_table_s_open_step_in_their_files(
    connect, proxies_of, tmp_path: Path
) -> None:
    with LocalCluster(2, data_dir=tmp_path) as running:
        proxies = proxies_of(running)
        with shardwell.connect(
            ",".join(proxy.address for proxy in proxies), worker_id="w0", same_host=False
        ) as client:
            table = opened(client)
            table.put_row_gradients(IDS, np.ones((IDS.size, DIM), np.float32))
            rows = table.get_rows(IDS)
            put = gradients_of(rows)
            cut_off(
                running, proxies[1], lambda: table.put_row_gradients(IDS, put, timeout_s=BRIEF_S), 2
            )
    with (
        LocalCluster(2, data_dir=tmp_path) as running,
        shardwell.connect(running.target, worker_id="w0") as client,
    ):
        table = opened(client)
        newest = shardwell.connect(running.target, worker_id="reader")
        assert (newest.table("rows").get_rows(IDS) != rows).any()
        newest.close()
        np.testing.assert_array_equal(table.get_rows(IDS), rows)
        table.put_row_gradients(IDS, put)
        assert (table.get_rows(IDS) != rows).all()


def test_other_gradients_than_the_first_process_s_are_reported(
    cluster, connect, proxies_of, caplog
) -> None:
    running = cluster(2)
    proxies = proxies_of(running)
    first = connect(",".join(proxy.address for proxy in proxies), "w0")
    table = opened(first)
    ones = np.ones((IDS.size, DIM), np.float32)
    table.put_row_gradients(IDS, ones)  # which takes its seats
    cut_off(running, proxies[1], lambda: table.put_row_gradients(IDS, ones, timeout_s=BRIEF_S), 2)
    first.close()
    resumed = opened(connect(running, "w0"))
    with caplog.at_level(logging.WARNING, "shardwell"):
        resumed.put_row_gradients(IDS, 2 * ones)
    assert "had sent 1 parts of step 1 with other rows or gradients" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "shardwell"):
        resumed.put_row_gradients(IDS, 2 * ones)
    assert not caplog.records

"""Goal: cells of a notebook may be run again.

Method: what a cell does is called twice in one process, on a real cluster.
"""

from __future__ import annotations

import logging
import traceback
import urllib.request
from xml.etree import ElementTree

import numpy as np
import pytest

import shardwell
from harness.polling import Stopwatch
from shardwell.parameter.feedback import Outcome
from shardwell.placement.slices import Slice
from shardwell.process.html_table import Link, html_table

SGD = shardwell.SGD(lr=0.5)


def test_the_newer_client_of_a_process_takes_over(cluster, connect, caplog) -> None:
    running = cluster(2)

    def cell() -> tuple[shardwell.Client, shardwell.Parameter]:
        client = connect(running, "w0")
        net = client.parameter("net", size=4, optimizer=SGD)
        net.init(np.zeros(4))
        return client, net

    _, first = cell()
    first.exchange(np.ones(4))
    with caplog.at_level(logging.WARNING, "shardwell"):
        _, second = cell()
        said = [record.message for record in caplog.records if record.name == "shardwell"]
        assert not said  # who only looks leaves the older one alone
        first.exchange(np.ones(4))
        assert second.exchange(np.ones(4)).tolist() == [-1.0] * 4  # the older one's last step
        assert second.exchange(np.ones(4)).tolist() == [-1.5] * 4
    said = [record.message for record in caplog.records if record.name == "shardwell"]
    assert said == [
        "worker 'w0': a newer client of this process takes over from an older one, whose calls "
        "end with ClosedError from now on"
    ]
    for call in (lambda: first.exchange(np.ones(4)), first.get_weights, first.reopen):
        with pytest.raises(shardwell.ClosedError, match=r"newer client .* has taken worker 'w0'"):
            call()
    assert second.exchange(np.ones(4)).tolist() == [-2.0] * 4


def test_a_table_is_taken_over_too(cluster, connect) -> None:
    running = cluster(2)
    ids, rows = [1, 2, 3], np.ones((3, 2), np.float32)
    for number in range(3):
        table = connect(running, "w0").table(
            "users", row_count=9, dim=2, optimizer=SGD, initializer=shardwell.Zeros()
        )
        watch = Stopwatch()
        table.put_row_gradients(ids, rows)
        assert watch.elapsed_s < 20
        assert table.get_rows(ids).tolist() == [[-0.5 * (number + 1)] * 2] * 3


def test_other_workers_of_a_process_are_left_alone(cluster, connect) -> None:
    running = cluster(2)
    nets = [
        connect(running, f"w{rank}").parameter("net", size=4, optimizer=SGD, mode="async")
        for rank in range(3)
    ]
    nets[0].init(np.zeros(4))
    for net in nets * 2:
        net.put_gradient(np.ones(4))
    assert nets[0].get_weights().tolist() == [-3.0] * 4


def test_tracebacks_end_at_the_border(cluster, connect, caplog) -> None:
    """What a cell shows is the call and the error, and nothing of threads, retries and gRPC."""
    net = connect(cluster(2), "w0").parameter("net", size=4, optimizer=SGD, worker_count=2)
    net.init(np.zeros(4))
    with caplog.at_level(logging.DEBUG, "shardwell"), pytest.raises(shardwell.DeadlineError) as it:
        net.exchange(np.ones(4), timeout_s=0.3)
    frames = traceback.extract_tb(it.value.__traceback__)
    assert [frame.name for frame in frames[1:]] == ["exchange", "run", "run"]
    assert it.value.__cause__ is None
    assert it.value.__suppress_context__
    shown = "".join(traceback.format_exception(it.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "a call failed" in caplog.text  # with all of it, for who asks for it
    assert "exchange.py" in caplog.text


def test_what_a_cell_ends_with_is_shown_as_a_table(cluster, connect, tmp_path) -> None:
    running = cluster(2, tokens=None, admin_listen="127.0.0.1:0")
    client = connect(running, "w0")
    net = client.parameter("net", tensors={"w": (3, 2), "b": (2,)}, optimizer=SGD, worker_count=2)
    net.init({"w": np.zeros((3, 2)), "b": np.zeros(2)})
    table = client.table("users", row_count=9, dim=2, optimizer=SGD)
    table.put_row_gradients([1, 2], np.ones((2, 2)))
    checkpoint = client.save_checkpoint(tmp_path / "made")
    counted = Outcome(step=3, size=8, superseded=(Slice(2, 4),))
    outcome = shardwell.DataParallelTrainer(
        lambda weights, batch: (0.5, weights), np.zeros(3, np.float32), SGD, shardwell.LocalSync()
    ).step([1, 2])
    for value, words in [
        (running, [running.cluster_id, *running.addresses, f'href="{running.dashboard_link}"']),
        (client, ["worker w0", *running.addresses]),
        (client.status(), [*running.addresses, "parameter", "net", "table", "users", "0 of 2"]),
        (net, ["parameter net", "SGD(", "learning_rate=0.5", "sync, 2 workers", ">8<"]),
        (checkpoint, [str(tmp_path / "made"), "net", "8 elements", "users", "2 rows"]),
        (counted, ["step", ">3<", ">part<", ">2 to 5<"]),
        (outcome, ["loss", "0.5", ">2<"]),
    ]:
        shown = value._repr_html_()
        assert all(word in shown for word in words), (words, shown)
        document = ElementTree.fromstring(f"<body>{shown}</body>")  # every tag is closed
        for found in document.iter("table"):
            assert len({len(row) for row in found}) == 1  # as many cells as columns
    with urllib.request.urlopen(running.dashboard_link) as page:
        assert b"<html" in page.read()


def test_without_a_status_page_the_link_says_how_to_get_one(cluster) -> None:
    running = cluster(1)
    with pytest.raises(shardwell.ArgumentError, match=r"admin_listen='127\.0\.0\.1:0'"):
        _ = running.dashboard_link
    assert running.addresses[0] in running._repr_html_()


def test_names_are_text_and_links_lead_to_the_web() -> None:
    name = "<script>alert('x')</script>"
    shown = html_table(name, (name,), [(name,), (Link(name, "javascript:alert(1)"),)])
    assert "<script" not in shown
    assert "javascript" not in shown
    assert "href" in html_table("", (), [(Link("page", "http://127.0.0.1:1/"),)])

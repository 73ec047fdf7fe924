"""Goal: the history of a shard has what happened, of an hour, and never more than it may occupy.

Method: samples of real shards are taken one by one on a clock that the test sets, between steps
that the test counts; answers are asked for over HTTP, with and without a right.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, eventually
from harness.tokens import Tokens
from shardwell_server import LocalCluster
from shardwell_server.admin import history
from shardwell_server.admin.history import History

SGD = shardwell.SGD(learning_rate=0.5)
ONES = np.ones(10, np.float32)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Taken:
    """A history of a cluster's shard 0, whose samples the test takes."""

    def __init__(self, running: LocalCluster) -> None:
        self.clock = Clock()
        self.history = History(running.servers[0].admin._vitals, self.clock)

    def sample(self, after_s: float = 5.0) -> None:
        self.clock.now_s += after_s
        self.history.sample()

    def of(self, name: str, which: str = "steps_s", kind: str = "parameter") -> list[float | None]:
        found = self.history.view(lambda name: True, (kind, name))["names"]
        return found[0][which] if found else []


def get(url: str, token: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def running(cluster) -> LocalCluster:
    return cluster(1, admin_listen="127.0.0.1:0", tokens=None)


def opened(client: shardwell.Client, name: str, **options: Any) -> shardwell.Parameter:
    net = client.parameter(name, size=10, optimizer=SGD, **options)
    net.init(np.zeros(10, np.float32))
    return net


def test_rates_are_those_of_the_steps(running, connect) -> None:
    client = connect(running, "w0")
    net = opened(client, "net")
    taken = Taken(running)
    for count in (10, 0, 5):
        for _ in range(count):
            net.exchange(ONES)
        taken.sample()
    assert taken.of("net") == [2.0, 0.0, 1.0]
    waits = taken.of("net", "wait_s")
    assert waits[0] >= 0
    assert waits[1] is None  # no step has closed
    rows = client.table("rows", row_count=9, dim=1, optimizer=SGD)
    for _ in range(3):
        rows.put_row_gradients(range(9), np.ones((9, 1), np.float32))
    taken.sample(after_s=2.0)
    assert taken.of("rows", kind="table") == [None, None, None, 0.0]  # it is new
    rows.put_row_gradients(range(9), np.ones((9, 1), np.float32))
    taken.sample(after_s=2.0)
    assert taken.of("rows", kind="table")[-1] == 0.5
    assert taken.of("net")[-2:] == [0.0, 0.0]
    found = taken.history.view(lambda name: True)
    assert found["ages_s"] == [14.0, 9.0, 4.0, 2.0, 0.0]
    assert [each["name"] for each in found["names"]] == ["net", "rows"]
    assert found["shard"]["in_bytes_s"][0] >= 10 * 10 * 2 / 5.0
    assert found["shard"]["in_bytes_s"][1] == 0.0
    assert found["shard"]["memory_bytes"][0] > 1e6
    assert found["shard"]["disk_free_bytes"] == [None] * 5  # it has no files


def test_an_hour_is_kept(running, connect) -> None:
    net = opened(connect(running, "w0"), "net")
    taken = Taken(running)
    net.exchange(ONES)
    for _ in range(history.SAMPLE_COUNT):
        taken.sample()
    assert taken.of("net") == [0.2] + [0.0] * (history.SAMPLE_COUNT - 1)
    taken.sample()
    assert taken.of("net") == [0.0] * history.SAMPLE_COUNT
    ages = taken.history.view(lambda name: True)["ages_s"]
    assert (ages[0], ages[-1]) == ((history.SAMPLE_COUNT - 1) * 5.0, 0.0)
    assert history.SAMPLE_COUNT * history.PERIOD_S == 3600
    assert history.BYTES_MAX < 1_600_000


def test_of_many_names_those_that_move_are_kept(running, connect, monkeypatch) -> None:
    monkeypatch.setattr(history, "NAME_COUNT_MAX", 2)
    client = connect(running, "w0")
    nets = [opened(client, f"net{number}") for number in range(4)]
    taken = Taken(running)
    taken.sample()
    assert [bool(taken.of(f"net{number}")) for number in range(4)] == [True, True, False, False]
    for _ in range(3):  # nothing moves, and nothing is forgotten
        taken.sample()
    assert len(taken.of("net0")) == 4
    nets[3].exchange(ONES)
    taken.sample()
    nets[3].exchange(ONES)
    taken.sample()
    assert taken.of("net3")[-1] == 0.2
    assert sum(bool(taken.of(f"net{number}")) for number in range(4)) == 2
    assert len(taken.history._names) == 2


def test_what_is_deleted_is_forgotten(running, connect) -> None:
    client = connect(running, "w0")
    opened(client, "net").exchange(ONES)
    taken = Taken(running)
    taken.sample()
    assert taken.of("net") == [0.0]
    client.delete("net", force=True)
    taken.sample()
    assert taken.of("net") == []
    opened(client, "net").exchange(ONES)
    taken.sample()
    assert taken.of("net")[-1] == 0.0  # what it did before the sample is not known
    assert min(each for each in taken.of("net") if each is not None) >= 0


def test_the_port_tells_what_may_be_read(cluster, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(history, "PERIOD_S", 0.05)
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    files = {
        name: tokens.add(name, right)
        for name, right in (("all", "admin"), ("partly", "read:mine."))
    }
    running = cluster(2, admin_listen="127.0.0.1:0", tokens=tokens.path)
    url = running.admin_urls[0] + "history.json"
    assert get(url)[0] == 401
    all_, partly = (files[name].read_text().strip() for name in ("all", "partly"))
    with shardwell.connect(running.target, worker_id="w0", token_file=files["all"]) as client:
        for name in ("mine.net", "other"):
            opened(client, name).exchange(ONES)

        def names(token: str) -> set[str]:
            return {each["name"] for each in get(url, token)[1]["names"]}

        eventually("both are known", lambda: names(all_) == {"mine.net", "other"})
        assert names(partly) == {"mine.net"}
        asked = f"{url}?kind=parameter&name="
        assert [each["name"] for each in get(asked + "other", all_)[1]["names"]] == ["other"]
        assert get(asked + "other", partly)[1]["names"] == []
        assert get(asked + "nothing", all_)[1]["names"] == []
        for bad in (
            "?kind=parameter",
            "?name=net",
            "?kind=group&name=net",
            "?kind=table&name=%3Cb%3E",
            "?kind=table&name=a&name=b",
            "?kind=table&kind=table&name=a",
            "?" + "&" * 9,
        ):
            status, words = get(url + bad, all_)
            assert status == 400, bad
            assert "got" in words

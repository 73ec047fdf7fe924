"""Goal: the admin port tells probes, Prometheus and people what is so, and others nothing.

Method: real shards and workers, of which one is stopped, killed, or never comes; what HTTP answers
is compared with what was done. Metrics are read by Prometheus' own parser, the page by a browser.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.certificates import authority, of_server
from harness.faults.disks import small_disk
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import ServingShard
from harness.threads import in_background, together
from harness.tokens import Tokens
from shardwell_server import LocalCluster, ShardServer
from shardwell_server.admin.port import AdminPort
from shardwell_server.cli import commands
from shardwell_server.config import ShardConfig
from shardwell_server.store.files.data_dir import DataDir

SGD = shardwell.SGD(learning_rate=0.5)
ONES = np.ones(10, np.float32)
WORKER = """
import sys
import numpy as np, shardwell
target, worker_id, count = sys.argv[1:]
with shardwell.connect(target, worker_id=worker_id, token_file=False) as client:
    sgd = shardwell.SGD(learning_rate=0.5)
    net = client.parameter("net", size=10, optimizer=sgd, worker_count=2)
    net.init(np.zeros(10, np.float32))
    for _ in range(int(count)):
        net.exchange(np.ones(10, np.float32))
    print("done", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def open_cluster(cluster: Any) -> Any:
    """Clusters with an admin port, without tokens."""

    def start(shard_count: int = 2, **options: Any) -> LocalCluster:
        options.setdefault("tokens", None)
        return cluster(shard_count, admin_listen="127.0.0.1:0", **options)

    return start


def get(url: str, **headers: str) -> tuple[int, str]:
    """Status and text."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def view(running: LocalCluster, shard_index: int = 0) -> Any:
    status, text = get(running.admin_urls[shard_index] + "status.json")
    assert status == 200
    return json.loads(text)


def metrics(running: LocalCluster, shard_index: int = 0, **headers: str) -> dict[Any, float]:
    """Values by name and labels."""
    status, text = get(running.admin_urls[shard_index] + "metrics", **headers)
    assert status == 200
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextlib.contextmanager
def worker(running: LocalCluster, worker_id: str, count: int) -> Any:
    """A worker process that takes part in so many steps of two workers."""
    command = [sys.executable, "-c", WORKER, running.target, worker_id, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


# Probes.


def test_probes_before_files_are_read() -> None:
    """As a shard's that takes long to recover: it lives, and is neither started nor ready."""
    config = ShardConfig(shard_index=0, shard_count=1, admin_listen="127.0.0.1:0")
    port = AdminPort(config)
    with contextlib.closing(port):
        assert get(port.url + "live") == (200, "alive\n")
        for path in ("startup", "ready", "metrics", "status.json", ""):
            assert get(port.url + path) == (503, "starting: files are being read\n")
        assert get(port.url + "else")[0] == 404


def test_probes_of_a_shard_that_serves_and_stops(open_cluster, connect) -> None:
    running = open_cluster(1, grace_s=20.0)
    url = running.admin_urls[0]
    assert [get(url + path)[0] for path in ("live", "startup", "ready")] == [200] * 3
    client = connect(running, "w0")
    net = client.parameter("net", size=10, optimizer=SGD, worker_count=2)
    net.init(ONES)
    waiting = in_background(lambda: net.exchange(ONES))
    eventually("it waits", lambda: view(running)["parameters"][0]["in_step"] == ["w0"])
    stopped = in_background(running.servers[0].stop)
    eventually("it says so", lambda: get(url + "ready") == (503, "stopping\n"))
    assert get(url + "live")[0] == 200
    client.close()
    with pytest.raises(shardwell.ClosedError):
        waiting.result(PATIENCE_S)
    stopped.result(PATIENCE_S)
    with pytest.raises(urllib.error.URLError):
        get(url + "live")


def test_not_ready_without_files(open_cluster, tmp_path) -> None:
    running = open_cluster(1, data_dir=tmp_path / "data")
    assert get(running.admin_urls[0] + "ready")[0] == 200
    assert metrics(running)["shardwell_files_gone",] == 0
    shutil.rmtree(tmp_path / "data")
    eventually("it says so", lambda: get(running.admin_urls[0] + "ready")[0] == 503)
    assert "shard-0" in get(running.admin_urls[0] + "ready")[1]
    assert get(running.admin_urls[0] + "live")[0] == 200
    assert metrics(running)["shardwell_files_gone",] == 1
    with pytest.raises(shardwell.StorageError):
        running.close()


@pytest.mark.parametrize("speaks", ["http", "half of TLS", "TLS"])
def test_who_says_nothing_keeps_no_probe_out(open_cluster, speaks) -> None:
    """And has few threads, as the oldest connections end."""
    files = authority()
    trusting = ssl.create_default_context(cafile=os.fspath(files.ca))
    running = open_cluster(1, tls=None if speaks == "http" else of_server(files))
    url = running.admin_urls[0]
    host, _, port = url.partition("//")[2].strip("/").partition(":")
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.create_connection((host, int(port))))
            if speaks == "TLS":
                silent = stack.enter_context(trusting.wrap_socket(silent, server_hostname=host))
            silent.sendall(b"\x16\x03\x01" if speaks == "half of TLS" else b"GET /live HT")
        for _ in range(5):
            with urllib.request.urlopen(url + "live", timeout=5, context=trusting) as answer:
                assert answer.read() == b"alive\n"
        eventually("few are left", lambda: threading.active_count() - before <= 40)


@pytest.mark.parametrize(
    "spoken", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"\0" * 70_000]
)
def test_what_is_no_request(open_cluster, spoken) -> None:
    running = open_cluster(1)
    host, _, port = running.admin_urls[0].removeprefix("http://").strip("/").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):
            connection.sendall(spoken)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert get(running.admin_urls[0] + "live")[0] == 200


# Who may ask.


def test_the_port_shows_what_a_token_may_read(cluster, connect, tmp_path) -> None:
    """Names that a token may not read do not appear; probes need none."""
    tokens = Tokens(tmp_path)
    running = cluster(1, tokens=tokens.path, admin_listen="127.0.0.1:0")
    url = running.admin_urls[0]
    client = connect(running, "w0", token_file=tokens.add("all", "create"))
    for name in ("prod-a", "test-b"):
        client.parameter(name, size=10, optimizer=SGD).init(ONES)
    assert get(url + "live")[0] == 200
    for path in ("", "metrics", "status.json"):
        status, text = get(url + path)
        assert status == 401
        assert "token" in text
        assert get(url + path, Authorization="Bearer wrong")[0] == 401
    wrong = tmp_path / "wrong.token"
    wrong.write_text("no-such-token\n")
    with pytest.raises(shardwell.AuthenticationError):
        connect(running, "w1", token_file=wrong)
    whole = f"Bearer {tokens.add('whole', 'read').read_text().strip()}"
    sections = json.loads(get(url + "status.json", Authorization=whole)[1])["sections"]
    assert [*sections.values()] == ["not-let-in"]
    secret = tokens.add("prod", "read:prod-").read_text().strip()
    basic = base64.b64encode(f"anybody:{secret}".encode()).decode()
    for header in (f"Bearer {secret}", f"Basic {basic}"):
        assert get(url, Authorization=header)[0] == 200
        found = json.loads(get(url + "status.json", Authorization=header)[1])
        assert [each["name"] for each in found["parameters"]] == ["prod-a"]
        assert not found["sections"]
        told = metrics(running, Authorization=header)
        names = {dict(key[1:]).get("name") for key in told}
        assert "prod-a" in names
        assert "test-b" not in names


def test_the_port_speaks_the_shard_s_tls(cluster) -> None:
    files = authority()
    running = cluster(1, tokens=None, admin_listen="127.0.0.1:0", tls=of_server(files))
    url = running.admin_urls[0]
    assert url.startswith("https://")
    trusting = ssl.create_default_context(cafile=os.fspath(files.ca))
    with urllib.request.urlopen(url + "ready", timeout=PATIENCE_S, context=trusting) as answer:
        assert answer.read() == b"serving\n"
    with pytest.raises((urllib.error.URLError, OSError)):
        get(url.replace("https", "http") + "ready")


def test_it_is_as_closed_as_the_shard() -> None:
    with pytest.raises(shardwell.ArgumentError, match="can be reached from other machines"):
        ShardConfig(shard_index=0, shard_count=1, admin_listen="0.0.0.0:0")
    with pytest.raises(shardwell.ArgumentError, match="admin_listen must be HOST:PORT"):
        ShardConfig(shard_index=0, shard_count=1, admin_listen="here")


# What everybody waits for.


def test_a_worker_that_was_stopped_is_named_and_where_it_is(open_cluster, connect) -> None:
    running = open_cluster(2)
    client = connect(running, "w0")
    net = client.parameter("net", size=10, optimizer=SGD, worker_count=2)
    net.init(ONES)
    with worker(running, "w1", 3) as process:
        for _ in range(3):
            net.exchange(ONES)
        assert process.stdout.readline() == b"done\n"
        process.send_signal(signal.SIGSTOP)
        waiting = in_background(lambda: net.exchange(ONES))
        for shard_index in range(2):
            (wait,) = eventually(
                "it is told", lambda index=shard_index: view(running, index)["waits"]
            )
            (who,) = wait["workers"]
            assert (wait["kind"], wait["name"], wait["step"]) == ("parameter", "net", 3)
            assert (who["worker_id"], who["pid"], who["connected"]) == ("w1", process.pid, True)
            assert who["host"] == socket.gethostname()
        assert f"process {process.pid}" in wait["words"]
        told = metrics(running)
        labels = ("kind", "parameter"), ("name", "net")
        assert told["shardwell_step_missing_workers", *labels] == 1
        assert told["shardwell_step_open_seconds", *labels] > 0
        host = ("host", socket.gethostname())
        assert told["shardwell_step_waits_for", host, *labels, ("worker", "w1")] == 1
        process.kill()
        eventually("it is gone", lambda: not view(running)["waits"][0]["workers"][0]["connected"])
        assert "not connected any more" in view(running)["waits"][0]["words"]
    other = connect(running, "w1")
    again = other.parameter("net")
    again.exchange(ONES)
    waiting.result(PATIENCE_S)
    eventually("nobody waits", lambda: not view(running)["waits"])


def test_a_worker_that_never_came(open_cluster, connect) -> None:
    running = open_cluster(1)
    net = connect(running, "w0").parameter("net", size=10, optimizer=SGD, worker_count=3)
    net.init(ONES)
    net.put_gradient(ONES)
    (wait,) = view(running)["waits"]
    assert wait["unknown_count"] == 2
    assert wait["words"].endswith("for 2 workers that were never seen")


def test_a_table_s_waits_and_steps_are_shown(open_cluster, connect) -> None:
    running = open_cluster(2)
    given = {"row_count": 10, "dim": 2, "optimizer": SGD, "worker_count": 2}
    tables = [connect(running, f"w{rank}").table("rows", **given) for rank in range(2)]
    ids, gradients = np.arange(10), np.ones((10, 2), np.float32)
    for _ in range(3):
        for table in tables:
            table.put_row_gradients(ids, gradients)
    tables[0].put_row_gradients(ids, gradients)
    (wait,) = view(running)["waits"]
    assert (wait["kind"], wait["step"], wait["workers"][0]["worker_id"]) == ("table", 3, "w1")
    told = metrics(running)
    assert told["shardwell_barrier_wait_seconds_count", ("kind", "table"), ("name", "rows")] == 3
    (found,) = view(running)["tables"]
    assert (found["rows"], found["step"], found["missing"]) == (10, 3, ["w1"])


def test_a_shard_that_is_gone(open_cluster) -> None:
    running = open_cluster(2, processes=True)
    os.kill(running.children[1].pid, signal.SIGKILL)
    found = eventually(
        "it is told", lambda: [s for s in view(running)["shards"] if s["state"] == "no answer"]
    )
    assert [each["index"] for each in found] == [1]
    assert "ready" not in found[0]


# Metrics.


def test_metrics_count_what_was_done(open_cluster, connect) -> None:
    running = open_cluster(1, chunk_size_bytes=64)
    client = connect(running, "w0")
    size = 100  # of fp16: four chunks
    net = client.parameter("net", size=size, optimizer=SGD)
    net.init(np.zeros(size, np.float32))
    for _ in range(7):
        net.exchange(np.ones(size, np.float32))
    with pytest.raises(shardwell.SpecMismatchError):
        connect(running, "w1").parameter("net", size=9, optimizer=SGD)
    eventually("both attend", lambda: metrics(running)["shardwell_sessions",] == 2)
    told = metrics(running)
    labels = ("kind", "parameter"), ("name", "net")
    assert told["shardwell_version", *labels] == 7
    assert told["shardwell_gradients_counted_total", *labels] == 4 * 7
    assert told["shardwell_barrier_wait_seconds_count", *labels] == 7
    assert told["shardwell_step_duration_seconds_count", *labels] == 6
    assert told["shardwell_learning_rate", *labels] == 0.5
    assert told["shardwell_stored_bytes",] == running.servers[0].shard.stored_bytes > 0
    assert told["shardwell_calls_refused_total", ("reason", "SpecMismatchError")] == 1
    moved = told["shardwell_payload_bytes_total", ("direction", "in")]
    assert moved >= 7 * 2 * size
    assert told["process_resident_memory_bytes",] > 1e6


def test_steps_that_close_by_their_norm_are_timed(open_cluster, connect) -> None:
    running = open_cluster(1)
    clipped = shardwell.SGD(learning_rate=0.5, clip_norm=1.0)
    nets = [
        connect(running, f"w{rank}").parameter("net", size=10, optimizer=clipped, worker_count=2)
        for rank in range(2)
    ]
    nets[0].init(ONES)
    for _ in range(3):
        other = in_background(lambda: nets[1].exchange(ONES))
        nets[0].exchange(ONES)
        other.result(PATIENCE_S)
    labels = ("kind", "parameter"), ("name", "net")
    assert metrics(running)["shardwell_barrier_wait_seconds_count", *labels] == 3


def test_names_follow_prometheus_guide(open_cluster, connect) -> None:
    running = open_cluster(1)
    connect(running, "w0").parameter("net", size=10, optimizer=SGD)
    text = get(running.admin_urls[0] + "metrics")[1]
    for family in text_string_to_metric_families(text):
        assert re.fullmatch(r"(shardwell|process)_[a-z_]+", family.name), family.name
        assert family.documentation, family.name
        if family.type == "counter" and family.name.startswith("shardwell"):
            assert all(sample.name.endswith("_total") for sample in family.samples)
        assert not family.name.endswith(("_ms", "_mb", "_percent"))


# What people look at.


def test_the_page_needs_nothing_from_elsewhere(open_cluster) -> None:
    """Nor code or style in its markup: the policy that it comes with would keep them out."""
    url = open_cluster(1).admin_urls[0]
    page = get(url)[1]
    named = re.findall(r"(?:src|href)=\"([^#\"][^\"]*)\"", page)
    assert {"page.css", "page.js", "favicon.svg"} <= set(named)
    for name in named:
        assert get(url + name)[0] == 200, name
    assert "http" not in page
    assert not re.search(r"<style|<script>|\son[a-z]+=|style=", page)
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy


def test_details_of_one_name(cluster, connect, tmp_path) -> None:
    """Tensors, settings and last steps, for tokens that may read the name."""
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    good, partly = tokens.add("good", "create"), tokens.add("partly", "create:mine.")
    running = cluster(2, admin_listen="127.0.0.1:0", tokens=tokens.path)
    url = running.admin_urls[0] + "details.json"
    client = connect(running, "w0", token_file=good)
    tensors = {"b": (4,), "a": (2, 3), "c": ()}
    frozen = shardwell.TensorGroup("a", frozen=True)
    net = client.parameter("net", tensors=tensors, groups=[frozen], optimizer=SGD)
    net.init({name: np.zeros(shape, np.float32) for name, shape in tensors.items()})
    for _ in range(3):
        net.exchange({name: np.ones(shape, np.float32) for name, shape in tensors.items()})
    rows = client.table("rows", row_count=9, dim=1, optimizer=SGD)
    rows.put_row_gradients(range(9), np.ones((9, 1), np.float32))

    def ask(query: str, token: Any = good) -> tuple[int, Any]:
        status, text = get(url + query, Authorization=f"Bearer {token.read_text().strip()}")
        return status, json.loads(text) if status == 200 else text

    assert get(url + "?kind=parameter&name=net")[0] == 401
    status, found = ask("?kind=parameter&name=net")
    assert status == 200
    shapes = [(each["name"], each["shape"]) for each in found["tensors"]]
    assert shapes == [("b", [4]), ("a", [2, 3]), ("c", [])]
    assert [each["options"] for each in found["tensors"]] == [{}, {"frozen": True}, {}]
    assert found["tensor_count"] == 3
    assert found["settings"]["optimizer"]["kind"] == "SGD"
    assert found["settings"]["worker_count"] == 1
    assert [each["step"] for each in found["last_steps"]] == [2, 1, 0]
    assert {each["last"] for each in found["last_steps"]} == {"w0"}
    status, found = ask("?kind=table&name=rows")
    assert (found["tensors"], found["settings"]["dim"]) == ([], 1)
    assert [each["step"] for each in found["last_steps"]] == [0]
    for asked, token in (("net", partly), ("nothing", good)):
        status, words = ask(f"?kind=parameter&name={asked}", token)
        assert (status, words.count("or the token may not read it")) == (404, 1)
    for bad in ("", "?kind=parameter", "?kind=parameter&name=%3Cb%3E", "?kind=x&name=net"):
        assert ask(bad)[0] == 400


def test_the_command_top_names_a_missing_worker(open_cluster, connect) -> None:
    running = open_cluster(2)
    net = connect(running, "w0").parameter("net", size=10, optimizer=SGD, worker_count=2)
    net.init(ONES)
    net.put_gradient(ONES)
    eventually("it waits", lambda: [w for w in view(running)["waits"] if w["open_for_s"] >= 1])
    shards = ["--shards", running.target, "--once", "--interval-s", "0.2"]
    shown = CliRunner().invoke(commands, ["top", *shards], catch_exceptions=False).output
    assert "step 0 of parameter 'net' has waited" in shown
    assert shown.count("serving") == 2
    assert "1 never seen" in shown
    assert "lag: how long after the first worker" in " ".join(shown.split())


def test_the_newest_figures_are_shown_in_a_terminal(open_cluster, connect) -> None:
    running = open_cluster(2)
    client = connect(running, "w0")
    net = client.parameter("net", size=10, optimizer=SGD)
    net.init(ONES)
    net.put_gradient(ONES)

    def has(figure: str) -> bool:
        return figure in client.status()[0].parameters[0].figures

    net.report(step=0, loss=3.0, accuracy=0.25)
    eventually("the first came", lambda: has("accuracy"))
    net.report(step=1, loss=1.5, worst=math.nan)
    eventually("the second came", lambda: has("worst"))
    first, second = (shard.parameters[0].figures for shard in client.status())
    assert (first["loss"], first["accuracy"], second) == (1.5, 0.25, {})
    words = "reported of net: accuracy 0.25, loss 1.5, worst not finite"
    shards = ["--shards", running.target]
    for command in (["top", *shards, "--once", "--interval-s", "0.1"], ["status", *shards]):
        assert words in CliRunner().invoke(commands, command, env={"COLUMNS": "120"}).output
    lines = CliRunner().invoke(commands, ["status", *shards, "--json"]).output.splitlines()
    (shown,) = json.loads(lines[0])["parameters"]
    assert shown["figures"] == {"accuracy": 0.25, "loss": 1.5, "worst": None}
    client.close()
    eventually("it has ended", lambda: view(running)["parameters"][0]["ended"])
    assert words not in CliRunner().invoke(commands, ["status", *shards]).output


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_how_late_each_was(open_cluster, connect, kind) -> None:
    """On the page, in `top`, in status and as metrics, of synchronous steps."""
    running = open_cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    late_s = 0.3
    began = threading.Barrier(2)

    def opened(rank: int) -> Any:
        if kind == "parameter":
            net = clients[rank].parameter("net", size=600, optimizer=SGD, worker_count=2)
            net.init(np.zeros(600, np.float32))
            return partial(net.exchange, np.ones(600, np.float32))
        rows = clients[rank].table("net", row_count=9, dim=1, optimizer=SGD, worker_count=2)
        return partial(rows.exchange_rows, range(9), np.ones((9, 1), np.float32))

    def train(rank: int) -> None:
        put = opened(rank)
        began.wait(PATIENCE_S)
        time.sleep(rank * late_s)  # which is what is measured
        put()

    together([lambda: train(0), lambda: train(1)])
    for status in clients[0].status():
        (held,) = status.parameters or status.tables
        late, first = held.members  # who is late comes first
        assert (late.worker_id, first.worker_id) == ("w1", "w0")
        assert (late.next_step, first.next_step) == (1, 1)
        assert late.lag_s > first.lag_s + late_s / 2
        assert 0 <= late.idle_s < first.idle_s
    (shown,) = view(running)[f"{kind}s"]
    assert [member["worker_id"] for member in shown["members"]] == ["w1", "w0"]
    assert shown["members"][0]["lag_s"] > late_s / 2
    told, of = metrics(running), (("kind", kind), ("name", "net"), ("worker", "w1"))
    assert told["shardwell_worker_lag_seconds", *of] > late_s / 2
    assert told["shardwell_worker_steps", *of] == 1
    assert told["shardwell_worker_idle_seconds", *of] >= 0
    shards = ["--shards", running.target]
    output = CliRunner().invoke(commands, ["top", *shards, "--once"], env={"COLUMNS": "200"}).output
    assert re.search(r"w1 [0-9]+ ms", output)


def test_in_asynchronous_mode_nobody_is_late(open_cluster, connect) -> None:
    running = open_cluster(1)
    client = connect(running, "w0")
    net = client.parameter("net", size=10, optimizer=SGD, mode="async")
    net.init(ONES)
    (before,) = client.status()[0].parameters
    assert not before.members
    net.exchange(ONES)
    (held,) = client.status()[0].parameters
    (member,) = held.members
    assert (member.worker_id, member.next_step, member.lag_s) == ("w0", 1, None)
    assert member.idle_s >= 0


def test_metrics_without_workers(cluster, connect) -> None:
    config = ShardConfig(
        shard_index=0, shard_count=1, admin_listen="127.0.0.1:0", worker_metrics=False
    )
    with ShardServer(config) as server:
        client = connect(server.address, "w0")
        net = client.parameter("net", size=10, optimizer=SGD, worker_count=2)
        net.init(ONES)
        net.put_gradient(ONES)
        _, text = get(server.admin.url + "metrics")
    labels = {
        name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for name in sample.labels
    }
    assert "name" in labels
    assert "worker" not in labels


def test_serve_tells_the_page() -> None:
    with ServingShard("--admin-listen=127.0.0.1:0") as shard:
        shard.address()
        told = shard.read_line()
        assert told.startswith("status page: http://127.0.0.1:")
        assert get(told.split()[-1] + "ready")[0] == 200
        shard.send(signal.SIGTERM)
        assert shard.end() == 0


# What workers report.


def test_reports_are_curves(open_cluster, connect) -> None:
    running = open_cluster(2)
    nets = [
        connect(running, f"w{rank}").parameter("net", size=10, optimizer=SGD, worker_count=2)
        for rank in range(2)
    ]
    nets[0].init(np.zeros(10, np.float32))

    def told() -> Any:
        return view(running)["parameters"][0]["reports"]

    for step in range(4):
        for rank, net in enumerate(nets):
            net.report(loss=10.0 - step + 2 * rank, accuracy=np.float32(0.25))
            eventually(
                "it came",
                lambda s=step, r=rank: (
                    told().get("loss", [])[s:] and (r == 0 or (told()["loss"][s][1] == 11.0 - s))
                ),
            )
            net.put_gradient(ONES)
    assert told() == {
        "loss": [[step, 11.0 - step] for step in range(4)],
        "accuracy": [[step, 0.25] for step in range(4)],
    }
    nets[0].report(step=9, loss=float("nan"))
    eventually("it came", lambda: told()["loss"][-1] == [9, None])
    labels = ("figure", "accuracy"), ("kind", "parameter"), ("name", "net")
    assert metrics(running)["shardwell_reported", *labels] == 0.25


def test_a_report_never_fails_for_want_of_a_shard(cluster, connect) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    net = client.parameter("net", size=10, optimizer=SGD)
    for bad in ({}, {"loss": "low"}, {"loss": np.ones(2)}, {"loss": None}, {"a b": 1.0}):
        with pytest.raises(shardwell.ArgumentError, match="figure"):
            net.report(**bad)
    running.close()
    for _ in range(1000):
        net.report(loss=1.0)
    client.close()
    with pytest.raises(shardwell.ClosedError):
        net.report(loss=1.0)


def test_a_shard_that_lost_its_memory_says_so(open_cluster, connect) -> None:
    running = open_cluster(2, processes=True)
    net = connect(running, "w0").parameter("net", size=10, optimizer=SGD)
    net.init(ONES)
    shards = ["--shards", running.target]
    fresh = CliRunner().invoke(commands, ["status", *shards])
    assert fresh.exit_code == 0, fresh.output
    net.exchange(ONES)
    os.kill(running.children[1].pid, signal.SIGKILL)
    running.children[1].wait(PATIENCE_S)
    running.start_again(1)
    words = "parameter 'net' has begun, and shard 1 does not have it: it lost its memory"
    told = CliRunner().invoke(commands, ["status", *shards])
    assert (told.exit_code, words in told.output) == (1, True)
    assert words in CliRunner().invoke(commands, ["top", *shards, "--once"]).output
    assert view(running)["lost"][0].startswith(words)


def test_reports_that_are_refused_are_told_once(open_cluster, connect, caplog) -> None:
    running = open_cluster(1)
    net = connect(running, "w0").parameter("net", size=10, optimizer=SGD)
    net.report(**{f"f{index}": 1.0 for index in range(16)})
    eventually("they came", lambda: len(view(running)["parameters"][0]["reports"]) == 16)
    for _ in range(3):
        eventually("it was sent", lambda: net._reports.are_sent)
        net.report(another=1.0)
    eventually("it was sent", lambda: net._reports.are_sent)
    told = [each for each in caplog.messages if "reports of parameter 'net' are refused" in each]
    assert len(told) == 1
    assert "16 figures at the most" in told[0]


# Groups.


def join(running: LocalCluster, rank: int, size: int) -> shardwell.Group:
    return shardwell.join_group(
        "job", rank, size, None, running.target, token_file=False, join_timeout_s=PATIENCE_S
    )


def test_a_group_that_lacks_a_rank_says_which(open_cluster) -> None:
    running = open_cluster(2)
    waiting = [in_background(lambda rank=rank: join(running, rank, 3)) for rank in (0, 2)]
    (group,) = eventually(
        "both wait", lambda: [g for g in view(running)["groups"] if len(g["members"]) == 2]
    )
    assert (group["name"], group["size"], group["missing_ranks"]) == ("job", 3, [1])
    assert f"process {os.getpid()}" in group["members"][0]
    told = eventually("it has waited for long", lambda: view(running)["troubles"])
    assert re.match(r"group 'job' has waited \d+ s for rank 1 of 3", *told)
    assert metrics(running)["shardwell_group_missing_ranks", ("group", "job")] == 1
    with pytest.raises(shardwell.GroupMismatchError):
        join(running, 1, 2)
    eventually("it is told who was refused", lambda: "refused" in view(running)["troubles"][0])
    shards = ["--shards", running.target]
    for command in (["top", *shards, "--once"], ["status", *shards]):
        output = CliRunner().invoke(commands, command, env={"COLUMNS": "200"}).output
        assert "group 'job' has waited" in output
    with join(running, 1, 3) as last:
        for each in waiting:
            with each.result(PATIENCE_S):
                pass
        del last
    eventually("it is over", lambda: not view(running)["groups"])


def test_a_full_disk_is_told_everywhere(open_cluster, tmp_path) -> None:
    """By each shard's page, whichever it is the disk of; and in `top` and `status`."""
    with small_disk(tmp_path / "small", 20_000_000) as disk:
        running = open_cluster(2, data_dir=disk.path)
        assert not view(running)["troubles"]
        disk.fill()
        for index in range(2):
            told = eventually("it is told", lambda index=index: view(running, index)["troubles"])
            assert told == [
                f"shard {each}: the disk of its files is full: 0.0 MB of 20.0 MB are free; "
                "free space there"
                for each in range(2)
            ]
        shards = ["--shards", running.target]
        for command in (["top", *shards, "--once"], ["status", *shards]):
            output = CliRunner().invoke(commands, command, env={"COLUMNS": "200"}).output
            assert "shard 1: the disk of its files is full" in output
        disk.empty()
        eventually("it is over", lambda: not view(running)["troubles"])
        running.close()


def test_damaged_files_are_told(cluster, connect, tmp_path) -> None:
    config = ShardConfig(shard_index=0, shard_count=1)
    with (
        DataDir(tmp_path / "data", config) as data_dir,
        ShardServer(config, data_dir) as server,
        shardwell.connect(server.address, worker_id="w0") as client,
    ):
        net = client.parameter("net", size=100_000, optimizer=SGD)
        net.init(np.zeros(100_000, np.float32))
        net.exchange(np.ones(100_000, np.float32))
    (weights,) = (tmp_path / "data").glob("parameters/*/weights*")
    with weights.open("r+b") as file:
        file.seek(1000)
        file.write(b"\x55\xaa")
    config = ShardConfig(shard_index=0, shard_count=1, admin_listen="127.0.0.1:0")
    with (
        DataDir(tmp_path / "data", config) as data_dir,
        ShardServer(config, data_dir) as server,
    ):
        client = connect(server.address, "w0")
        (trouble,) = eventually("it is found", lambda: client.status()[0].troubles)
        assert trouble.words.startswith("what was stored is damaged: ")
        assert "net" in trouble.words
        assert trouble.section == "a-damaged-file"
        assert server.admin is not None
        status, ready = get(server.admin.url + "ready")
        assert (status, "damaged" in ready, "net" in ready) == (200, True, False)
        assert "\nshardwell_damaged 1.0\n" in get(server.admin.url + "metrics")[1]
        with pytest.raises(shardwell.StorageError):  # and once more, by a call
            client.parameter("net").get_weights()
        assert len(client.status()[0].troubles) == 1


def test_somebody_who_was_turned_away_is_told(tmp_path) -> None:
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    good, partly = tokens.add("good", "create"), tokens.add("partly", "create:mine.")
    wrong = tmp_path / "wrong.token"
    wrong.write_text("no-such-token\n")
    with LocalCluster(1, tokens=tokens.path) as running:
        with shardwell.connect(running.target, worker_id="w0", token_file=good) as client:
            assert not client.status()[0].troubles
            with pytest.raises(shardwell.AuthenticationError):
                shardwell.connect(running.target, worker_id="w1", token_file=wrong)
            (trouble,) = client.status()[0].troubles
            assert re.match(r"a client was turned away \d s ago, for want of a", trouble.words)
        with shardwell.connect(running.target, worker_id="w2", token_file=partly) as client:
            assert not client.status()[0].troubles  # which may be about others' names


def test_a_group_that_has_formed(open_cluster) -> None:
    running = open_cluster(1)
    other = in_background(lambda: join(running, 1, 2))
    with join(running, 0, 2):
        (group,) = view(running)["groups"]
        assert group["generation"] > 0
        assert (len(group["members"]), group["missing_ranks"]) == (2, [])
        assert not view(running)["troubles"]
        other.result(PATIENCE_S).close()


def asked_for(address: str, *hosts: str, path: str = "/status.json") -> tuple[int, str]:
    """Status and text of a request with these `Host` lines; none: without."""
    lines = [f"GET {path} HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close"]
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as asking:
        asking.settimeout(PATIENCE_S)
        asking.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = b"".join(iter(lambda: asking.recv(65536), b"")).decode()
    head, _, contents = answer.partition("\r\n\r\n")
    return int(head.split()[1]), contents


def test_names_of_other_sites_are_not_answered(open_cluster) -> None:
    """A page whose name leads to this machine reads nothing: DNS rebinding."""
    address = open_cluster(1).admin_urls[0].split("/")[2]
    port = address.rpartition(":")[2]
    for path in ("/", "/status.json", "/metrics", "/live", "/nothing"):
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "",
            "127.0.0.1.evil.example",
            "a" * 999,
        ):
            status, words = asked_for(address, host, path=path)
            assert status == 421
            assert "answers to 127.0.0.1, [::1], localhost, and the request is for" in words
    assert asked_for(address, f"localhost:{port}", "evil.example")[0] == 421
    for own in (address, "127.0.0.1", "LOCALHOST:9", f"localhost:{port}", f"[::1]:{port}"):
        assert asked_for(address, own)[0] == 200
    assert asked_for(address)[0] == 200


def test_with_tokens_any_name_is_answered(cluster, tmp_path) -> None:
    running = cluster(1, admin_listen="127.0.0.1:0", tokens=Tokens(tmp_path).path)
    address = running.admin_urls[0].split("/")[2]
    assert asked_for(address, "status.example.org", path="/live")[0] == 200
    assert asked_for(address, "status.example.org")[0] == 401

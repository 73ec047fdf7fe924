"""Goal: `shardwell trace` shows the last steps of all shards and workers on one clock, and for whom
they waited; only those that may see a name see it, and training depends on nothing of it.

Method: real clusters and workers; a stopped worker, one whose clock is another's by an
hour (a time namespace), tokens, shards that end, and messages by hand.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.faults.standing_still import stopped
from harness.inside import channels_of, endpoint_of, session_of
from harness.polling import PATIENCE_S, eventually, until_accepted
from harness.programs.commands import Program, run_command
from harness.threads import in_background, together
from harness.tokens import TOKEN_FILE_VARIABLE, Tokens, bearing
from shardwell.process import span_columns
from shardwell.v1 import trace_pb2 as pb
from shardwell.v1 import trace_pb2_grpc as pb_grpc
from shardwell.v1 import types_pb2
from shardwell_server import LocalCluster, ShardConfig, ShardServer
from shardwell_server.shard.sessions import Sessions

SGD = shardwell.SGD(learning_rate=1.0)
STEP_COUNT = 4
WORKER = """
import itertools, sys, numpy as np, shardwell
client = shardwell.connect(sys.argv[1], worker_id=sys.argv[2])
net = client.parameter("net", size=600, optimizer=shardwell.SGD(learning_rate=1.0), worker_count=2)
net.init(np.zeros(600, np.float32))
for line in itertools.chain([None], sys.stdin):
    net.exchange(np.ones(600, np.float32))
    print("step", flush=True)
"""


def trained(client: shardwell.Client, name: str = "net", **options: Any) -> Any:
    """A parameter with two workers, after some steps."""
    options.setdefault("worker_count", 2)
    net = client.parameter(name, size=600, optimizer=SGD, **options)
    net.init(np.zeros(600, np.float32))
    for _ in range(STEP_COUNT):
        net.exchange(np.ones(600, np.float32))
    return net


def traced(
    target: str, file: Path, *flags: str, code: int = 0, **environment: str
) -> tuple[list[dict[str, Any]], str]:
    """What `shardwell trace` writes, and what it prints."""
    found, output, log = run_command(
        "trace", str(file), f"--shards={target}", *flags, environment=environment
    )
    assert found == code, output + log
    contents = file.read_bytes() if file.exists() else b'{"traceEvents": []}'
    if file.suffix == ".gz":
        contents = gzip.decompress(contents)
    return json.loads(contents)["traceEvents"], output + log


def names(events: list[dict[str, Any]], kind: str) -> dict[int, str]:
    """By process: its name, or with `thread_name` all its lanes."""
    found: dict[int, str] = {}
    for event in events:
        if event["name"] == kind:
            found[event["pid"]] = f"{found.get(event['pid'], '')}|{event['args']['name']}"
    return found


def done(events: list[dict[str, Any]], of: str = "net") -> dict[str, set[tuple[str, int]]]:
    """By process: what was done of something, and in which steps."""
    processes = names(events, "process_name")
    found: dict[str, set[tuple[str, int]]] = {}
    for event in events:
        if event["ph"] == "X" and event["args"]["of"] == of:
            who = processes[event["pid"]].partition(" (")[0].removeprefix("|")
            found.setdefault(who, set()).add((event["name"], event["args"].get("step", -1)))
    return found


def asked_clients(recordings: Any) -> Any:
    """The clients that a shard can ask for their spans."""
    return recordings._asking


def giver_of(client: shardwell.Client) -> Any:
    """What gives a client's spans to shard 0."""
    return channels_of(client)[0]._giver


def is_asked(running: LocalCluster, count: int) -> None:
    """Returns when shard 0 knows so many clients that it can ask."""
    recordings = running.servers[0].shard.recordings
    eventually("they can be asked", lambda: len(asked_clients(recordings)) == count)


@pytest.mark.same_host
@pytest.mark.parametrize("same_host", [True, False])
def test_all_that_was_done_is_shown(cluster, connect, tmp_path, same_host) -> None:
    running = cluster(2, chunk_size_bytes=256)
    clients = [connect(running, f"w{rank}", same_host=same_host) for rank in range(2)]
    together([lambda client=client: trained(client) for client in clients])
    is_asked(running, 2)
    events, output = traced(running.target, tmp_path / "run.json")
    found = done(events)
    assert found.keys() == {"shard 0", "shard 1", "w0", "w1"}
    steps = range(STEP_COUNT)
    for shard in ("shard 0", "shard 1"):
        for what in ("add", "update", "encode weights"):
            assert {(what, step) for step in steps} <= found[shard]
    for worker in ("w0", "w1"):
        for what in ("exchange", "encode", "wait", "decode"):
            assert {(what, step) for step in steps} <= found[worker]
    assert "of 2 shards and 2 workers" in output
    assert re.search(rf"w0 +{STEP_COUNT} ", output)
    # What a shard does with a gradient, it does after its worker has encoded it.
    encoded = {
        (event["args"]["step"], event["args"]["chunk"]): event["ts"]
        for event in events
        if event["name"] == "encode" and event["args"]["with"] == "shard 0" and event["pid"] == 3
    }
    counted = {
        (event["args"]["step"], event["args"]["chunk"]): event["ts"] + event["dur"]
        for event in events
        if event["name"] in ("add", "update")
        and event["pid"] == 1
        and event["args"]["with"] == "w0"
    }
    assert encoded.keys() == counted.keys()
    assert all(encoded[key] < counted[key] for key in encoded)


def test_tables_and_calls_by_themselves(cluster, connect, tmp_path) -> None:
    running = cluster(2)
    client = connect(running, "w0")
    users = client.table("users", row_count=90, dim=2, optimizer=SGD)
    users.exchange_rows([1, 2, 3], np.ones((3, 2), np.float32))
    users.put_row_gradients([4, 5], np.ones((2, 2), np.float32))
    users.get_rows([1, 4])
    net = client.parameter("net", size=600, optimizer=SGD)
    net.init(np.zeros(600, np.float32))
    net.put_gradient(np.ones(600, np.float32))
    net.get_weights(min_version=1)
    is_asked(running, 1)
    events, _ = traced(running.target, tmp_path / "run.json.gz")
    of_users, of_net = done(events, "users"), done(events)
    assert {("exchange", 0), ("put", 1), ("get", -1)} <= of_users["w0"]
    assert {("update", 0), ("update", 1)} <= of_users["shard 0"] | of_users["shard 1"]
    assert {("put", 0), ("get", 0)} <= of_net["w0"]
    assert ("encode weights", 0) in of_net["shard 0"]


def test_a_step_closed_by_its_norm(cluster, connect, tmp_path) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(2)]
    clipped = shardwell.SGD(learning_rate=1.0, clip_norm=1.0)

    def train(client: shardwell.Client) -> None:
        net = client.parameter("net", size=600, optimizer=clipped, worker_count=2)
        net.init(np.zeros(600, np.float32))
        net.exchange(np.ones(600, np.float32))

    together([lambda client=client: train(client) for client in clients])
    events, _ = traced(running.target, tmp_path / "run.json")
    for shard in ("shard 0", "shard 1"):
        assert {("add", 0), ("update", 0)} <= done(events)[shard]


def test_of_one_parameter(cluster, connect, tmp_path) -> None:
    """Of a family all fragments; of an unknown name, nothing is written."""
    running = cluster(2)
    client = connect(running, "w0")
    for name in ("net", "other", "big.fragment-0", "big.fragment-10"):
        trained(client, name, worker_count=1)
    is_asked(running, 1)
    file = tmp_path / "run.json"
    events, output = traced(running.target, file, "--parameter=net")
    subjects = {event["args"]["of"] for event in events if event["ph"] == "X"}
    assert subjects == {"net"}
    assert set(done(events)) == {"shard 0", "shard 1", "w0"}
    assert "call: all of exchange" in output
    events, _ = traced(running.target, file, "--parameter", "big")
    subjects = {event["args"]["of"] for event in events if event["ph"] == "X"}
    assert subjects == {"big.fragment-0", "big.fragment-10"}
    before = file.read_bytes()
    _, output = traced(running.target, file, "--parameter=nett", code=1)
    words = " ".join(output.split())
    assert "no shard and no worker remembers a step of 'nett'" in words
    assert "they remember big.fragment-0, big.fragment-10, net, other" in words
    assert file.read_bytes() == before
    _, output = traced(running.target, file, "--parameter=a b", code=2)
    assert "--parameter must be 1 to 128" in " ".join(output.split())


def test_the_last_seconds_alone(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    net = trained(client, worker_count=1)
    net.exchange(np.ones(600, np.float32))
    is_asked(running, 1)
    events, _ = traced(running.target, tmp_path / "run.json")
    assert {step for _, step in done(events)["w0"]} == set(range(STEP_COUNT + 1))
    events, _ = traced(running.target, tmp_path / "run.json", "--last-s=1000")
    assert {step for _, step in done(events)["w0"]} == set(range(STEP_COUNT + 1))
    # What it takes for now is when it begins, and to start takes its time.
    events, output = traced(running.target, tmp_path / "run.json", "--last-s=0.001")
    assert not done(events)
    assert "0 spans of 1 shards and 1 workers" in output


# For whom everybody waits.


def test_a_stopped_worker_is_named(cluster, tmp_path) -> None:
    running = cluster(2, processes=True)
    flags = ("-c", WORKER, running.target)
    with (
        Program(*flags, "w0", stdin=subprocess.PIPE) as w0,
        Program(*flags, "w1", stdin=subprocess.PIPE) as w1,
    ):
        for worker in (w0, w1):
            assert worker.read_line() == "step"
        with stopped(w1.pid):
            w0.process.stdin.write("\n")
            w0.process.stdin.flush()

            def is_told() -> Any:
                _, output = traced(running.target, tmp_path / "run.json", "--timeout-s=0.5")
                return output if "waits for w1" in output else ""

            output = eventually("the step is open for a while", is_told)
            assert "step 1 of parameter 'net' is open for" in output
            events, output = traced(running.target, tmp_path / "run.json", "--timeout-s=5")
            assert "gave nothing within 5 s: w1; what they did is missing" in output
            assert ("waits for w1", 1) in done(events)["shard 0"]
            assert done(events).keys() == {"shard 0", "shard 1", "w0"}
        w1.process.stdin.write("\n")
        w1.process.stdin.flush()
        assert w1.read_line() == "step"


def test_a_shard_that_is_not_there(cluster, connect, tmp_path) -> None:
    running = cluster(2)
    trained(connect(running, "w0"), worker_count=1)
    is_asked(running, 1)
    running.servers[1].stop(0.0)
    file = tmp_path / "run.json"
    events, output = traced(running.target, file, "--timeout-s=3", code=1)
    assert done(events).keys() == {"shard 0", "w0"}
    assert "shard 1" in output
    running.servers[0].stop(0.0)
    file.unlink()
    _, output = traced(running.target, file, "--timeout-s=0.5", code=1)
    assert not file.exists()
    assert "shard 0" in output


def test_a_file_of_the_users_stays(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    trained(connect(running, "w0"), worker_count=1)
    is_asked(running, 1)
    notes, link = tmp_path / "notes.json", tmp_path / "link"
    link.symlink_to(notes)
    for theirs in (b"mine", b'{"traceEvents": []}', gzip.compress(b"mine"), b"\x1f\x8bmine"):
        notes.write_bytes(theirs)
        for file in (notes, link):
            code, _, log = run_command("trace", str(file), f"--shards={running.target}")
            assert code == 1
            assert f"{file} exists, and is no timeline" in " ".join(log.split())
        assert notes.read_bytes() == theirs
    notes.write_bytes(b"")  # as mktemp makes it
    for _ in range(2):
        for file in (notes, link, tmp_path / "new.json.gz"):
            events, _ = traced(running.target, file)
            assert done(events).keys() == {"shard 0", "w0"}
    assert link.is_symlink()


@pytest.mark.parametrize("where", ["missing/run.json", "directory"])
def test_files_that_cannot_be_written(cluster, tmp_path, where) -> None:
    running = cluster(1)
    (tmp_path / "directory").mkdir()
    code, output, log = run_command("trace", str(tmp_path / where), f"--shards={running.target}")
    assert code == (2 if where.startswith("missing") else 1)
    assert "Traceback" not in output + log
    assert not [*tmp_path.glob(".*")]


def test_a_pipe_and_a_link_are_written_to(cluster, tmp_path) -> None:
    running = cluster(1)
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("run.json")
    reading = in_background(pipe.read_bytes)
    for file in (pipe, link):
        code, output, log = run_command("trace", str(file), f"--shards={running.target}")
        assert code == 0, output + log
    assert json.loads(reading.result(PATIENCE_S))["traceEvents"]
    assert link.is_symlink()
    assert json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]


def test_after_ctrl_c_it_waits_for_no_client(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    giver_of(client)._give = lambda recording: None
    is_asked(running, 1)
    file = tmp_path / "run.json"
    flags = ("-m", "shardwell_server", "trace", str(file), f"--shards={running.target}")
    with Program(*flags, "--timeout-s=60") as program:
        recordings = running.servers[0].shard.recordings
        # Which stays true; that no client asks would not, as the client asks again at once.
        eventually("it waits", lambda: any(each.knowing for each in [*recordings._open.values()]))
        program.send(signal.SIGINT)
        assert program.end(PATIENCE_S * 0.7) == 130
    assert not [*tmp_path.iterdir()]


# Clocks.


def test_clocks_that_differ_are_aligned(cluster, connect, tmp_path) -> None:
    hour_ahead = ["unshare", "--time", "--monotonic", "3600", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*hour_ahead, "true"]).returncode:
        pytest.skip("needs the right to make a time namespace")
    running = cluster(1)
    client = connect(running, "w0")
    other = subprocess.Popen(
        [*hour_ahead, sys.executable, "-c", WORKER, running.target, "w1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        net = client.parameter("net", size=600, optimizer=SGD, worker_count=2)
        net.init(np.zeros(600, np.float32))
        net.exchange(np.ones(600, np.float32))
        is_asked(running, 2)
        events, _ = traced(running.target, tmp_path / "run.json")
        other.communicate("")
    (named,) = (name for name in names(events, "process_name").values() if "|w1 " in name)
    error_us = float(named.rpartition("±")[2].partition(" ")[0])
    times = {
        who: next(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and event["name"] == "exchange" and event["pid"] == pid
        )
        for pid, who in names(events, "process_name").items()
        if "shard" not in who
    }
    assert len(times) == 2
    (begin, end), (other_begin, other_end) = times.values()
    # Both end when the slower one has contributed; an hour would show.
    assert abs(end - other_end) < 2 * error_us + 1e6
    assert max(begin, other_begin) < min(end, other_end) + 2 * error_us


# Who may see what.


def test_a_token_sees_what_it_may_read(tmp_path) -> None:
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    files = {name: tokens.add(name, f"create:{name}.") for name in ("mine", "theirs")}
    reader = tokens.add("reader", "read:mine.")
    with LocalCluster(1, tokens=tokens.path) as running:
        for name, file in files.items():
            with shardwell.connect(running.target, worker_id=f"w-{name}", token_file=file) as each:
                trained(each, f"{name}.net", worker_count=1)
                is_asked(running, 1)
                for who, hidden in ((reader, "theirs"), (files["theirs"], "mine")):
                    _, output = traced(
                        running.target, tmp_path / "run.json", **{TOKEN_FILE_VARIABLE: str(who)}
                    )
                    assert f"{hidden}." not in (tmp_path / "run.json").read_text(), output
                    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
                    shown = "mine" if hidden == "theirs" else "theirs"
                    assert bool(done(events, f"{shown}.net")) == (
                        shown == name or (name, shown) == ("theirs", "mine")
                    )
        code, output, log = run_command(
            "trace",
            str(tmp_path / "no.json"),
            f"--shards={running.target}",
            environment={TOKEN_FILE_VARIABLE: ""},
        )
        assert code == 1
        assert not (tmp_path / "no.json").exists(), output + log


@pytest.mark.parametrize("gives", [True, False])
def test_a_token_sees_only_workers_of_names_that_it_may_read(tmp_path, gives) -> None:
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    theirs, mine = tokens.add("theirs", "create:theirs."), tokens.add("mine", "read:mine.")
    with (
        LocalCluster(1, tokens=tokens.path) as running,
        shardwell.connect(running.target, worker_id="hidden", token_file=theirs) as client,
    ):
        trained(client, "theirs.net", worker_count=1)
        is_asked(running, 1)
        if not gives:
            giver_of(client)._give = lambda recording: None
        for token, is_named in ((mine, False), (theirs, True)):
            _, output = traced(
                running.target,
                tmp_path / "run.json",
                "--timeout-s=1",
                **{TOKEN_FILE_VARIABLE: str(token)},
            )
            written = output + (tmp_path / "run.json").read_text()
            assert ("hidden" in written) == is_named


def test_a_quota_of_calls_does_not_count_it(tmp_path) -> None:
    """A client has its session, and one call."""
    (tmp_path / "tokens").mkdir()
    tokens = Tokens(tmp_path / "tokens")
    file = tokens.add("few", "create", quota={"calls": 3})
    with (
        LocalCluster(1, tokens=tokens.path) as running,
        shardwell.connect(running.target, worker_id="w0", token_file=file) as client,
    ):
        net = trained(client, worker_count=1)
        is_asked(running, 1)
        assert net.exchange(np.ones(600, np.float32))[0] == -STEP_COUNT - 1


# What comes over the wire.


@pytest.fixture
def wire(cluster, connect) -> Any:
    """A cluster of two, a client, and stubs to both shards."""
    running = cluster(2)
    client = connect(running, "w0")
    trained(client, worker_count=1)
    is_asked(running, 1)
    channels = [grpc.insecure_channel(server.address) for server in running.servers]
    stubs = [pb_grpc.TraceServiceStub(bearing(channel)) for channel in channels]
    yield running, client, stubs
    for channel in channels:
        channel.close()


def identity(running: LocalCluster, index: int = 0) -> types_pb2.ShardIdentity:
    return types_pb2.ShardIdentity(
        cluster_id=running.servers[0].config.cluster_id, shard_index=index, shard_count=2
    )


def spans(count: int = 1, **changes: Any) -> pb.ProcessSpans:
    columns: dict[str, Any] = {
        "worker_id": "w0",
        "words": ["", "net"],
        "kinds": [1] * count,
        "subjects": [1] * count,
        "steps": [0] * count,
        "chunks": [0] * count,
        "peers": [0] * count,
        "begins_ns": [5] * count,
        "durations_ns": [1] * count,
    }
    return pb.ProcessSpans(**{**columns, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinds": [1, 2]}, "one length"),
        ({"count": 16_385}, "one length, up to 16384"),
        ({"subjects": [2]}, "below 2"),
        ({"peers": [2**32 - 1]}, "below 2"),
        ({"words": []}, "below 0"),
        ({"words": ["", "a\nb"]}, "printable"),
        ({"words": ["", "a" * 257]}, "printable"),
        ({"worker_id": "no name"}, "worker_id"),
        ({"worker_id": "w1"}, "w0"),
    ],
)
def test_spans_that_are_none_are_refused(wire, changes, words) -> None:
    running, client, stubs = wire
    request = pb.GiveSpansRequest(
        shard=identity(running),
        session=session_of(client).number,
        recording=1,
        process=spans(**changes),
    )
    with pytest.raises(grpc.RpcError, match=words) as refused:
        stubs[0].GiveSpans(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_sessions_that_do_not_attend_have_no_part(wire) -> None:
    running, _, stubs = wire
    shard = identity(running)
    request = pb.AwaitRecordingRequest(shard=shard, session=77, worker_id="w0")
    assert stubs[0].AwaitRecording(request, timeout=PATIENCE_S).recording == 0  # at once
    with pytest.raises(grpc.RpcError) as refused:
        stubs[0].GiveSpans(
            pb.GiveSpansRequest(shard=shard, session=77, recording=1, process=spans())
        )
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_session_has_one_call_that_waits(wire) -> None:
    """No token's quota counts it."""
    running, client, stubs = wire
    giver_of(client).close()
    request = pb.AwaitRecordingRequest(
        shard=identity(running), session=session_of(client).number, worker_id="w0"
    )
    calls = [stubs[0].AwaitRecording.future(request) for _ in range(20)]
    eventually("one of them waits", lambda: sum(not call.done() for call in calls) == 1)
    codes = {call.code() for call in calls if call.done()}
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    for call in calls:
        call.cancel()
    is_asked(running, 0)


def test_a_session_that_attends_a_moment_later_is_not_refused(cluster, monkeypatch) -> None:
    """Both calls leave at once, and either may come first."""
    running = cluster(1)
    real, early = Sessions.check, [1]

    def check(self: Sessions, *given: Any, **options: Any) -> Any:
        if early[0]:
            early[0] -= 1
            raise shardwell.SessionUnknownError("it does not attend yet")
        return real(self, *given, **options)

    monkeypatch.setattr(Sessions, "check", check)
    with shardwell.connect(running.target, worker_id="w0"):
        is_asked(running, 1)
        assert early == [0]
        assert not endpoint_of(running.servers[0]).calls.refusal_counts


def test_other_shards_ask_no_client(wire) -> None:
    running, client, stubs = wire
    shard, session = identity(running, 1), session_of(client).number
    with pytest.raises(grpc.RpcError, match="shard 0 alone"):
        stubs[1].AwaitRecording(
            pb.AwaitRecordingRequest(shard=shard, session=session, worker_id="w0")
        )
    with pytest.raises(grpc.RpcError, match="shard 0 alone"):
        stubs[1].GiveSpans(pb.GiveSpansRequest(shard=shard, session=session, process=spans()))
    (only,) = stubs[1].Record(pb.RecordRequest(shard=shard, wait_timeout_ms=60_000))
    assert only.process.kinds
    with pytest.raises(grpc.RpcError, match="this is shard 1"):
        next(iter(stubs[1].Record(pb.RecordRequest(shard=identity(running)))))


def test_a_call_that_ends_ends_its_recording(wire, connect) -> None:
    """Or four that were broken off would be the last."""
    running, _, stubs = wire
    shard, recordings = identity(running), running.servers[0].shard.recordings
    silent = connect(running, "silent")
    giver_of(silent)._give = lambda recording: None
    is_asked(running, 2)
    request = pb.RecordRequest(shard=shard, wait_timeout_ms=60_000)
    calls = [stubs[0].Record(request) for _ in range(4)]
    for call in calls:
        assert next(call).process.kinds
    with pytest.raises(grpc.RpcError, match="4 recordings") as refused:
        next(stubs[0].Record(request))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    eventually("they are over", lambda: not recordings._open)
    silent.close()
    eventually("one is left", lambda: len(running.servers[0].shard.sessions.by_worker()) == 1)
    found = list(stubs[0].Record(request))
    assert [answer.process.worker_id for answer in found] == ["", "w0", ""]
    assert not found[-1].silent_worker_ids


def test_a_shard_with_invalid_spans_is_named(cluster, tmp_path, monkeypatch) -> None:
    """Whatever answers there: no traceback, and the spans of others are written."""
    running = cluster(2)
    bad = running.servers[1].shard.spans
    monkeypatch.setattr(bad, "to_proto", lambda: spans(subjects=[9]))
    monkeypatch.setattr(span_columns, "keep_subjects", lambda *given: None)
    events, output = traced(running.target, tmp_path / "run.json", "--timeout-s=0.5", code=1)
    assert "subjects of spans are numbers of words" in output
    assert "Traceback" not in output
    assert len(names(events, "process_name")) == 1


# Lives of clients and shards.


def test_two_recordings_in_a_row(cluster, connect, tmp_path) -> None:
    """The second is asked for while the client pauses after the first."""
    running = cluster(1)
    trained(connect(running, "w0"), worker_count=1)
    is_asked(running, 1)
    for _ in range(2):
        events, _ = traced(running.target, tmp_path / "run.json", "--timeout-s=10")
        assert "w0" in done(events)


def test_after_a_restart_of_the_shard(tmp_path) -> None:
    config = ShardConfig(listen="127.0.0.1:0", shard_index=0, shard_count=1, cluster_id="c")
    with ShardServer(config) as first:
        client = shardwell.connect(first.address, worker_id="w0")
        trained(client, worker_count=1)
        recordings = first.shard.recordings
        eventually("it can be asked", lambda: asked_clients(recordings))
        began_s = time.monotonic()
        first.stop(20.0)
        assert time.monotonic() - began_s < 15.0  # no call waits until the grace is over
    config = ShardConfig(listen=first.address, shard_index=0, shard_count=1, cluster_id="c")
    with client, until_accepted(lambda: ShardServer(config), shardwell.ShardwellError) as second:
        recordings = second.shard.recordings
        eventually("it can be asked again", lambda: asked_clients(recordings))
        events, _ = traced(second.address, tmp_path / "run.json")
        assert ("exchange", 0) in done(events)["w0"]  # the worker remembers


def test_a_client_that_closes_is_not_waited_for(cluster, connect, tmp_path) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    trained(client, worker_count=1)
    is_asked(running, 1)
    client.close()
    is_asked(running, 0)
    began_s = time.monotonic()
    events, output = traced(running.target, tmp_path / "run.json", "--timeout-s=30")
    assert time.monotonic() - began_s < PATIENCE_S * 0.7
    assert done(events).keys() == {"shard 0"}
    assert "gave nothing" not in output


def test_a_fork_gives_no_spans(cluster, connect, tmp_path) -> None:
    running = cluster(1, processes=True)
    client = connect(running, "w0")
    trained(client, worker_count=1)
    held, holds = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(holds)
        os.read(held, 1)  # until its parent has seen the trace
        os._exit(0)
    os.close(held)

    def workers() -> list[str]:
        events, _ = traced(running.target, tmp_path / f"{time.monotonic_ns()}.json")
        return [who for who in done(events) if who.startswith("w")]

    found = eventually("it can be asked, and is", workers)
    os.close(holds)
    assert os.waitpid(pid, 0)[1] == 0
    assert found == ["w0"]


def test_many_record_while_many_train(cluster, connect, tmp_path) -> None:
    running = cluster(2)
    clients = [connect(running, f"w{rank}") for rank in range(4)]

    def train(client: shardwell.Client) -> Any:
        net = client.parameter("net", size=600, optimizer=SGD, worker_count=4)
        net.init(np.zeros(600, np.float32))
        for _ in range(300):
            weights = net.exchange(np.ones(600, np.float32))
        return weights[0]

    training = [in_background(lambda client=client: train(client)) for client in clients]
    for number in range(3):
        traced(running.target, tmp_path / f"{number}.json")
    assert {call.result(PATIENCE_S) for call in training} == {-300.0}


def test_without_a_further_thread_the_next_recording_gets_the_spans(
    cluster, connect, tmp_path, monkeypatch
) -> None:
    running = cluster(1)
    client = connect(running, "w0")
    trained(client, worker_count=1)
    is_asked(running, 1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shardwell-trace":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        without.setattr("shardwell.threads.pool._pool._idle", deque())
        _, output = traced(running.target, tmp_path / "run.json", "--timeout-s=0.1")
        assert "gave nothing within 0.1 s: w0" in output
    is_asked(running, 1)
    events, _ = traced(running.target, tmp_path / "run.json")
    assert "w0" in done(events)

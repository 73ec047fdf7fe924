"""Goal: a name that is deleted is free on all shards, and who used it hears so, by name.

Method: real shards with and without files, real clients; what trains meanwhile is looked at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shardwell
from harness.inside import channels_of, incarnation_of
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import run_command
from harness.threads import in_background
from harness.tokens import Tokens, bearing
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.wire import checksum

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 300
ONES = np.ones(SIZE, np.float32)
KINDS = ["parameter", "table"]
UNKNOWN = {"parameter": shardwell.UnknownParameterError, "table": shardwell.UnknownTableError}


def opened(client: shardwell.Client, kind: str, name: str = "m", worker_count: int = 1) -> Any:
    if kind == "table":
        return client.table(
            name,
            row_count=50,
            dim=2,
            optimizer=SGD,
            initializer=shardwell.Zeros(),
            worker_count=worker_count,
        )
    made = client.parameter(name, size=SIZE, optimizer=SGD, worker_count=worker_count)
    made.init(np.zeros(SIZE, np.float32))
    return made


def step(one: Any) -> Any:
    """A step of a worker; what came of it."""
    if isinstance(one, shardwell.Table):
        return one.exchange_rows([1, 2], np.ones((2, 2), np.float32))
    return one.exchange(ONES)


def read(one: Any) -> Any:
    return one.get_rows([1, 2]) if isinstance(one, shardwell.Table) else one.get_weights()


def names_on(client: shardwell.Client) -> list[set[str]]:
    """Of all parameters and tables, by shard."""
    return [
        {each.spec.name for each in (*shard.parameters, *shard.tables)} for shard in client.status()
    ]


@pytest.fixture(params=["memory", "mmap"])
def running(request, cluster, tmp_path: Path) -> Any:
    return cluster(3, data_dir=tmp_path if request.param == "mmap" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_and_all_that_it_used_are_free(running, connect, kind) -> None:
    client = connect(running, "w0")
    other = opened(client, kind, "other")
    before = [shard.stored_bytes for shard in client.status()]
    mine = opened(client, kind)
    step(mine)
    used = [shard.stored_bytes for shard in client.status()]
    assert client.delete("m") == sum(used) - sum(before) > 0
    assert [shard.stored_bytes for shard in client.status()] == before
    assert names_on(client) == [{"other"}] * 3
    with pytest.raises(shardwell.ClosedError):
        step(mine)
    with pytest.raises(UNKNOWN[kind], match="no shard has a"):
        client.delete("m", kind=kind)
    with pytest.raises(UNKNOWN[kind], match="no shard has a"):
        client.parameter("m") if kind == "parameter" else client.table("m")
    again = opened(client, kind)
    assert (again.next_step, again.version) == (0, 0)
    np.testing.assert_array_equal(step(again), -1.0)
    np.testing.assert_array_equal(step(other), -1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_in_use_is_refused_and_goes_on(running, connect, kind) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    used = opened(worker, kind)
    step(used)
    with pytest.raises(shardwell.MembersAliveError, match="'w0' \\(process") as caught:
        ops.delete("m")
    assert caught.value.member_worker_ids == ("w0",)
    assert getattr(caught.value, kind) == "m"
    np.testing.assert_array_equal(step(used), -2.0)
    worker.close()  # in order: no worker is waited for
    assert ops.delete("m") > 0
    assert names_on(ops) == [set()] * 3


def test_who_opened_it_and_has_no_seat_yet_uses_it(running, connect) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    opened(worker, "parameter")
    with pytest.raises(shardwell.MembersAliveError, match="'w0'"):
        ops.delete("m")


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_a_deleted_one_get_an_error_by_name(running, connect, kind) -> None:
    """One waits for another worker, one is idle; neither makes it anew."""
    waiting, idle, ops = (connect(running, name) for name in ("w0", "w1", "ops"))
    of_waiting, of_idle = opened(waiting, kind, worker_count=2), opened(idle, kind, worker_count=2)
    call = in_background(lambda: step(of_waiting))
    eventually(
        "it waits",
        lambda: any(
            each.wait.open_for_s is not None
            for shard in ops.status()
            for each in (*shard.parameters, *shard.tables)
        ),
    )
    ops.delete("m", force=True)
    with pytest.raises(UNKNOWN[kind], match="deleted by 'ops'"):
        call.result(PATIENCE_S)
    for verb in (step, read):
        for one in (of_waiting, of_idle):
            with pytest.raises(UNKNOWN[kind], match="was deleted by 'ops'") as caught:
                verb(one)
            assert getattr(caught.value, kind) == "m"
            assert not caught.value.retryable
    assert names_on(ops) == [set()] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_a_deleted_one_do_not_get_into_the_next(running, connect, kind) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    seated, unseated = opened(worker, kind), opened(connect(running, "w1"), kind)
    step(seated)
    ops.delete("m", force=True)
    again = opened(ops, kind, worker_count=2)
    for one in (seated, unseated):
        for verb in (step, read):
            with pytest.raises(UNKNOWN[kind], match="deleted by 'ops', and another one was made"):
                verb(one)
    if kind == "parameter":
        with pytest.raises(UNKNOWN[kind], match="another one was made since"):
            seated.init(ONES)
    partner = opened(worker, kind, worker_count=2)  # which asks for what has the name now
    assert partner.next_step == 0
    call = in_background(lambda: step(partner))
    np.testing.assert_array_equal(step(again), -1.0)
    np.testing.assert_array_equal(call.result(PATIENCE_S), -1.0)


def kept(running: Any, kind: str) -> list[Any]:
    """What an old handle's calls could have changed, of each shard."""
    if kind == "parameter":
        found = [server.shard.parameters.get("m") for server in running.servers]
        return [
            (one.describe(9).learning_rate, one.describe(9).version_max, one.reports.means())
            for one in found
        ]
    tables = [server.shard.tables.get("m") for server in running.servers]
    return [(one.learning_rate, one.version, one.describe(9).row_count) for one in tables]


def calls_about(one: Any, kind: str) -> dict[str, Any]:
    """All calls of a handle that are no streams."""
    calls = {
        "rate": lambda: one.set_learning_rate(0.25),
        "rate now": lambda: one.set_learning_rate(0.25, now=True),
    }
    if kind == "table":
        calls |= {
            "evict": lambda: one.evict(older_than_step=9),
            "ids": one.row_ids,
            "status": one.status,
        }
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_made_anew", [True, False])
def test_no_call_of_an_old_handle_reaches_the_next(
    running, connect, caplog, kind, is_made_anew
) -> None:
    worker, ops = connect(running, "w0"), connect(running, "ops")
    old = opened(worker, kind)
    step(old)
    ops.delete("m", force=True)
    how = "was deleted by 'ops'"
    if is_made_anew:
        again = opened(ops, kind)
        for _ in range(3):  # further on than the old one would go
            step(again)
        before = kept(running, kind)
        how += ", and another one was made since"
    for call in calls_about(old, kind).values():
        with pytest.raises(UNKNOWN[kind], match=how) as caught:
            call()
        assert getattr(caught.value, kind) == "m"
    if kind == "parameter":
        old.report(loss=0.5)
        eventually("the report is refused", lambda: "reports of parameter 'm'" in caplog.text)
        assert how in caplog.text
    if not is_made_anew:
        assert names_on(ops) == [set()] * 3
        return
    assert kept(running, kind) == before
    for call in calls_about(again, kind).values():
        call()
    if kind == "parameter":
        again.report(loss=0.5)
        eventually("it is noted", lambda: kept(running, kind)[0][2] == {"loss": [(3, 0.5)]})
    assert {each[0] for each in kept(running, kind)} == {0.25}


def test_a_rate_after_shard_0_lost_its_memory_is_refused(cluster, connect) -> None:
    """The new one is not the old handle's, though nothing was deleted."""
    running = cluster(1, processes=True)
    worker = connect(running, "w0")
    old, old_table = opened(worker, "parameter"), opened(worker, "table", "t")
    running.children[0].kill()
    running.start_again(0)
    ops = connect(running, "ops")
    opened(ops, "parameter"), opened(ops, "table", "t")
    for one in (old, old_table):
        for is_now in (True, False):
            with pytest.raises(shardwell.OtherIncarnationError, match="shard 0 lost its memory"):
                one.set_learning_rate(0.25, now=is_now)
    (status,) = ops.status()
    assert {each.learning_rate for each in (*status.parameters, *status.tables)} == {1.0}


def test_requests_by_hand_name_what_they_are_about(running, connect) -> None:
    """Of a worker that speaks no stream: each names the parameter that it has opened."""

    def clipped(worker_id: str) -> shardwell.Parameter:
        rule = shardwell.SGD(learning_rate=1.0, clip_norm=1.0)
        made = connect(running, worker_id).parameter("m", size=SIZE, optimizer=rule, worker_count=2)
        made.init(np.zeros(SIZE, np.float32))
        return made

    old, ops = clipped("w0"), connect(running, "ops")
    ops.delete("m", force=True)
    pair = [clipped(f"w{rank}") for rank in range(2)]
    for one in pair:
        one.put_gradient(ONES)
    channels = channels_of(ops)
    own, other = incarnation_of(pair[0]), incarnation_of(old)
    assert own != other
    requests: dict[str, tuple[Any, Any]] = {
        "CloseStep": (pb.CloseStepRequest(norm=0.5), pb.CloseStepResponse),  # which clips nothing
        "ConfirmInit": (pb.ConfirmInitRequest(epoch=9), pb.ConfirmInitResponse),
        "GetContributions": (pb.GetContributionsRequest(), pb.GetContributionsResponse),
        "Report": (pb.ReportRequest(figures=[pb.Figure(name="a")]), pb.ReportResponse),
        "SetLearningRate": (pb.SetLearningRateRequest(), pb.SetLearningRateResponse),
    }
    before = kept(running, "parameter")
    for method, (request, response) in requests.items():
        request.parameter, request.incarnation = "m", other
        for channel in channels:
            request.shard.CopyFrom(channel.identity)
            with pytest.raises(shardwell.UnknownParameterError, match="another one was made since"):
                channel.call(method, request, response, timeout_s=PATIENCE_S, parameter="m")
    assert kept(running, "parameter") == before
    for channel, address in zip(channels, running.target.split(","), strict=True):
        get = pb.GetWeightsRequest(shard=channel.identity, parameter="m", incarnation=own)
        with bearing(grpc.insecure_channel(address)) as raw:
            ask = raw.unary_stream("/shardwell.v1.ParameterServerService/GetWeights")
            assert list(ask(checksum.sealed(get), timeout=PATIENCE_S))
            get.incarnation = other
            with pytest.raises(grpc.RpcError) as caught:
                list(ask(checksum.sealed(get), timeout=PATIENCE_S))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for one in pair:
        expected = -ONES / np.sqrt(SIZE)
        np.testing.assert_allclose(one.get_weights(min_version=1), expected, rtol=1e-3)


def test_streams_go_on_with_other_parameters(running, connect) -> None:
    """A stream is kept by call: it carried the deleted one before."""
    worker, ops = connect(running, "w0"), connect(running, "ops")
    first, second = opened(worker, "parameter", "a"), opened(worker, "parameter", "b")
    for _ in range(3):
        step(first), step(second)
    ops.delete("a", force=True)
    np.testing.assert_array_equal(step(second), -4.0)
    with pytest.raises(shardwell.UnknownParameterError, match="'a' was deleted"):
        step(first)
    np.testing.assert_array_equal(step(second), -5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_never_both(running, connect, kind) -> None:
    client = connect(running, "w0")
    one = opened(client, kind)
    other = "table" if kind == "parameter" else "parameter"
    before = [shard.stored_bytes for shard in client.status()]
    with pytest.raises(shardwell.SpecMismatchError, match=f"'m' is a {kind} on this cluster"):
        opened(client, other)
    assert [shard.stored_bytes for shard in client.status()] == before
    with pytest.raises(UNKNOWN[other], match=f"'m' is a {kind}"):
        client.table("m") if other == "table" else client.parameter("m")
    step(one)
    client.delete("m")
    opened(client, other)


def test_names_that_an_older_version_gave_to_both(cluster, connect, tmp_path: Path) -> None:
    running = cluster(2, data_dir=tmp_path)
    client = connect(running, "w0")
    for server in running.servers:  # as they were before
        server.shard.parameters.beside = None
    opened(client, "table"), opened(client, "parameter")
    with pytest.raises(shardwell.ArgumentError, match='pass kind="parameter" or kind="table"'):
        client.delete("m")
    client.delete("m", kind="table")
    assert all(len(shard.parameters) == 1 and not shard.tables for shard in client.status())
    client.delete("m")


def test_what_can_t_be_deleted(cluster, connect) -> None:
    client = connect(cluster(1), "w0")
    for name in ("", "a/b", "x" * 200):
        with pytest.raises(shardwell.ArgumentError):
            client.delete(name)
    with pytest.raises(shardwell.ArgumentError, match="kind must be"):
        client.delete("m", kind="group")


def test_rights_to_delete(cluster, connect, tmp_path: Path) -> None:
    """Who made it, or an administrator; a token of another's gives nothing away."""
    tokens = Tokens(tmp_path)
    running = cluster(2, tokens=tokens.path)
    owner = connect(running, "w0", token_file=tokens.add("owner", "create"))
    opened(owner, "parameter"), opened(owner, "table", "t")
    for right in ("read", "contribute", "create", "admin:else-"):
        other = connect(running, "w1", token_file=tokens.add("other", right))
        for name in ("m", "t"):
            with pytest.raises(shardwell.AccessDeniedError, match=r"'(create|admin)'|no right"):
                other.delete(name, force=True)
        other.close()
    assert names_on(owner) == [{"m", "t"}] * 2
    owner.delete("m")
    ops = connect(running, "ops", token_file=tokens.add("ops", "admin"))
    ops.delete("t", force=True)
    assert names_on(ops) == [set()] * 2


def test_the_command_delete(cluster, connect) -> None:
    running = cluster(2)
    worker = connect(running, "w0")
    for name in ("a", "b"):
        opened(worker, "parameter", name)
    opened(worker, "table", "c")
    shards = f"--shards={running.target}"
    code, output, log = run_command("delete", "a", shards)
    assert (code, output) == (1, "")
    assert "'a' is in use by 'w0'" in log
    assert "--force" in log
    code, output, log = run_command("delete", "a", "missing", "c", "--force", shards)
    assert code == 1
    assert [line.split(":")[0] for line in output.splitlines()] == ["deleted a", "deleted c"]
    assert "'missing'" in log
    code, output, log = run_command("delete", "b", "--kind=parameter", "--force", shards)
    assert (code, log) == (0, "")
    code, output, _ = run_command("status", "--json", shards)
    assert all(not json.loads(line)["parameters"] for line in output.splitlines())
    assert run_command("delete", shards)[0] == 2


def test_a_family_of_outer_training_is_deleted_by_its_name(cluster, connect) -> None:
    """Also what a call that was cut off has left of it, and not while a learner has it."""
    running = cluster(2)
    client, learner = connect(running, "w0"), connect(running, "w1")
    shapes = {f"layers.{n}.w": (4,) for n in range(3)}
    others = client.parameter("net.fragment-9", size=4, optimizer=shardwell.SGD(0.1))
    outer = shardwell.Outer(learner, "net", tensors=shapes, sync_every=3, fragments=3)
    outer.init({name: np.zeros(4) for name in shapes})
    with pytest.raises(shardwell.MembersAliveError):
        client.delete("net")
    assert len(client.status()[0].parameters) == 4
    outer.close()
    learner.close()
    client.delete("net.fragment-1")
    client.delete("net", force=True)
    assert [each.spec.name for each in client.status()[0].parameters] == [others.name]
    with pytest.raises(shardwell.UnknownParameterError, match="'net'"):
        client.delete("net")

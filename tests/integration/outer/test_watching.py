"""Goal: status shows how far outer training has come, learner by learner.

Method: real learners and shards; what they say is compared with what they count themselves.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import shardwell
from harness.inside import channels_of
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import run_command
from harness.threads import together
from harness.tokens import Tokens
from shardwell import LearnerProgress
from shardwell.v1 import parameter_server_pb2 as pb

WIDE = {"COLUMNS": "300"}
WEIGHTS = {f"layers.{n}.w": np.ones((3, n + 2), np.float32) for n in range(4)}


def learner(client: shardwell.Client, **changes: Any) -> shardwell.Outer:
    options: dict[str, Any] = {
        "tensors": WEIGHTS,
        "sync_every": 4,
        "fragments": 4,
        "codec": "fp32",
        "worker_count": 2,
    }
    return shardwell.Outer(client, "net", **{**options, **changes})


def train(outer: shardwell.Outer, step_count: int, sample_count: int = 3) -> None:
    weights = outer.init(WEIGHTS)
    for _ in range(step_count):
        weights = {name: array - 0.25 for name, array in weights.items()}
        weights.update(outer.after_step(weights, sample_count))


def reported(client: shardwell.Client) -> dict[str, LearnerProgress]:
    """What shard 0 has of fragment 0, by worker; no other part has anything."""
    found = {}
    for shard in client.status():
        for parameter in shard.parameters:
            if shard.shard_index == 0 and parameter.spec.name == "net.fragment-0":
                assert all(each.ago_s >= 0 for each in parameter.learners)
                found = {each.worker_id: each.progress for each in parameter.learners}
            else:
                assert parameter.learners == ()
    return found


def test_each_learner_says_what_it_has_done(cluster: Any, connect: Any) -> None:
    running = cluster(2)
    learners = [learner(connect(running, f"w{n}")) for n in (0, 1)]
    together([lambda one=one: train(one, 8) for one in learners])
    own = {f"w{n}": one.progress for n, one in enumerate(learners)}
    ops = connect(running, "ops")
    eventually("shard 0 has what both said last", lambda: reported(ops) == own)
    for progress in own.values():
        assert (progress.inner_steps, progress.sample_count) == (8, 24)
        assert progress.offered_count == 8
        sizes = 4 * sum(array.size for array in WEIGHTS.values())
        assert progress.received_bytes >= 2 * sizes
        assert progress.sent_bytes >= 2 * sizes
        assert (progress.overdue_count, progress.kept_count) == (0, 0)
    assert any(progress.waited_s > 0 for progress in own.values())


def test_bytes_before_it_are_of_another(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    other = client.parameter("other", size=1000, optimizer=shardwell.SGD(1.0))
    other.init(np.ones(1000, np.float32))
    outer = learner(client, worker_count=1)
    train(outer, 4)
    assert outer.progress.sent_bytes < 4000


def test_shard_0_gets_the_newest_of_many_reports_at_once(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    outer = learner(client, worker_count=1)
    outer.init(WEIGHTS)
    fragment = client.parameter("net.fragment-0")
    for number in range(200):
        fragment.report_learner(LearnerProgress(inner_steps=number))
    eventually(
        "the newest is there", lambda: reported(client) == {"w0": LearnerProgress(inner_steps=199)}
    )


def test_it_never_blocks_and_never_fails_for_want_of_a_shard(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    running = cluster(1, data_dir=tmp_path, processes=True)
    client = connect(running, "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    fragment = client.parameter("net.fragment-0")
    running.children[0].kill()
    for number in range(20):
        fragment.report_learner(LearnerProgress(inner_steps=number))
    running.start_again(0)
    last = LearnerProgress(inner_steps=99)

    def is_told() -> bool:
        fragment.report_learner(last)
        try:
            return reported(client) == {"w0": last}
        except shardwell.ShardUnavailableError:  # as long as it starts
            return False

    eventually("the shard has it once it is back", is_told)
    fragment.close()
    with pytest.raises(shardwell.ClosedError):
        fragment.report_learner(last)


@pytest.mark.parametrize("progress", [None, {"inner_steps": 1}, 3])
def test_something_else_is_refused(cluster: Any, connect: Any, progress: Any) -> None:
    client = connect(cluster(1), "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    with pytest.raises(shardwell.ArgumentError, match="progress must be"):
        client.parameter("net.fragment-0").report_learner(progress)


def test_other_parameters_have_no_learners(cluster: Any, connect: Any) -> None:
    client = connect(cluster(1), "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    plain = client.parameter("plain", size=4, optimizer=shardwell.SGD(1.0))
    for parameter in (client.parameter("net.fragment-1"), plain):
        with pytest.raises(shardwell.ArgumentError, match="is not fragment 0 of a family"):
            parameter.report_learner(LearnerProgress())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda request: setattr(request, "worker_id", ""), "worker_id"),
        (lambda request: setattr(request, "worker_id", "a/b"), "worker_id"),
        (lambda request: setattr(request, "worker_id", "w9"), "that of worker 'w0'; got 'w9'"),
        (lambda request: setattr(request.learner, "waited_s", float("nan")), "waited_s"),
        (lambda request: setattr(request.learner, "kept_count", 2**63), "kept_count"),
        (lambda request: setattr(request, "parameter", "net.fragment-1"), "fragment 0"),
        (lambda request: request.ClearField("learner"), "figure"),
    ],
)
def test_a_request_by_hand_is_checked(
    cluster: Any, connect: Any, change: Callable[[pb.ReportRequest], None], words: str
) -> None:
    client = connect(cluster(1), "w0")
    learner(client, worker_count=1).init(WEIGHTS)
    request = pb.ReportRequest(
        parameter="net.fragment-0", worker_id="w0", learner=pb.LearnerProgress(inner_steps=1)
    )
    channel = channels_of(client)[0]
    request.session = channel.session.number
    request.shard.CopyFrom(channel.identity)
    change(request)
    with pytest.raises(shardwell.ArgumentError, match=words):
        channel.call("Report", request, pb.ReportResponse, timeout_s=PATIENCE_S, parameter="net")
    assert reported(client) == {}


def test_nobody_reports_as_another_learner(cluster: Any, connect: Any, tmp_path: Path) -> None:
    """A token that may contribute says how far its own workers are, whatever it knows."""
    tokens = Tokens(tmp_path)
    own, thief = tokens.add("own", "create"), tokens.add("thief", "contribute")
    running = cluster(1, tokens=tokens.path)
    client = connect(running, "w0", token_file=own)
    learner(client, worker_count=1).init(WEIGHTS)
    other = connect(running, "w1", token_file=thief)
    other.parameter("net.fragment-0").get_weights()  # its session attends by then
    channel, session = channels_of(other)[0], channels_of(client)[0].session.number
    for number, error, words in (
        (channel.session.number, shardwell.ArgumentError, "that of worker 'w1'; got 'w0'"),
        (session, shardwell.SessionUnknownError, "attends by token 'thief'"),
        (0, shardwell.SessionUnknownError, "worker 'w0'"),
    ):
        request = pb.ReportRequest(
            parameter="net.fragment-0",
            worker_id="w0",
            session=number,
            learner=pb.LearnerProgress(inner_steps=1),
        )
        request.shard.CopyFrom(channel.identity)
        with pytest.raises(error, match=words):
            channel.call(
                "Report", request, pb.ReportResponse, timeout_s=PATIENCE_S, parameter="net"
            )
    assert reported(client) == {}
    client.parameter("net.fragment-0").report_learner(LearnerProgress(inner_steps=3))
    eventually("it says so itself", lambda: list(reported(client)) == ["w0"])


# What operators see.


def read(running: Any, path: str) -> str:
    with urllib.request.urlopen(running.admin_urls[0] + path, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def shown(running: Any, *words: str) -> list[str]:
    code, output, log = run_command(*words, "--shards", running.target, environment=WIDE)
    assert (code, log) == (0, "")
    return output.splitlines()


@pytest.fixture
def watched(cluster: Any, connect: Any) -> Any:
    """Two shards, a family between two outer steps of a fragment each, and a parameter beside it.

    Fragments 0 and 1 have seen an outer step more, and w0 has offered fragment 2 alone.
    """
    running = cluster(2, admin_listen="127.0.0.1:0", tokens=None)
    learners = [learner(connect(running, f"w{n}"), codec="fp32") for n in (0, 1)]
    together([lambda one=one: train(one, 6) for one in learners])
    local = {name: array - 1 for name, array in learners[0].image().items()}
    learners[0].offer(2, local, sample_count=1)
    plain = connect(running, "ops").parameter("a", size=10, optimizer=shardwell.SGD(1.0))
    plain.init(np.ones(10, np.float32))
    looker = connect(running, "looker")

    def is_in() -> bool:
        parts = [p for shard in looker.status() for p in shard.parameters]
        of = [p for p in parts if p.spec.name == "net.fragment-2" and p.slice_size]
        return all("w0" in part.contributed_worker_ids for part in of)

    eventually("the offer is there", is_in)
    own = {f"w{n}": one.progress for n, one in enumerate(learners)}
    expected = {name: progress.inner_steps for name, progress in own.items()}
    eventually(
        "both have said so",
        lambda: {name: each.inner_steps for name, each in reported(looker).items()} == expected,
    )
    return running


def test_status_has_a_line_for_a_family_and_one_for_each_learner(watched: Any) -> None:
    lines = shown(watched, "status")
    assert not [line for line in lines if "fragment-" in line]
    (line,) = [line for line in lines if "versions" in line]
    words = line.split()
    assert words[:2] == ["net", "42"]
    assert "42 of 4 tensors, 4 fragments" in line
    assert "versions 2 2 1 1; in: w0; missing: w1" in line
    begin = next(n for n, line in enumerate(lines) if line.strip() == "learners")
    rows = [line.split() for line in lines[begin:] if line.split()[:1] == ["net"]]
    assert [row[:5] for row in rows] == [["net", f"w{n}", "6", "18", "6"] for n in (0, 1)]
    assert all(row[-1] == "ago" for row in rows)
    assert [line.split()[0] for line in lines if line.startswith(" a ")] == ["a"]


def test_a_family_is_an_entry_of_each_shard_in_json(watched: Any) -> None:
    for index, line in enumerate(shown(watched, "status", "--json")):
        shard = json.loads(line)
        assert [each["spec"]["name"] for each in shard["parameters"]] == ["a"]
        (family,) = shard["families"]
        assert (family["name"], family["fragment_count"]) == ("net", 4)
        assert family["versions"] == [2, 2, 1, 1]
        names = [each["spec"]["name"] for each in family["fragments"]]
        assert names == [f"net.fragment-{n}" for n in range(4)]
        said = {each["worker_id"]: each["progress"]["inner_steps"] for each in family["learners"]}
        assert said == ({"w0": 6, "w1": 6} if index == 0 else {})


def test_top_has_the_same_lines(watched: Any) -> None:
    lines = shown(watched, "top", "--once", "--interval-s", "0.1")
    (line,) = [line for line in lines if "versions 2 2 1 1" in line]
    assert line.split()[0] == "net"
    assert [line.split()[:3] for line in lines if "ago" in line] == [
        ["net", "w0", "6"],
        ["net", "w1", "6"],
    ]


def test_the_page_has_a_family_as_one(watched: Any) -> None:
    plain, family = json.loads(read(watched, "status.json"))["parameters"]
    assert (plain["name"], plain["fragments"], plain["learners"]) == ("a", [], [])
    assert (family["name"], family["elements"], family["step"]) == ("net", 42, 1)
    assert family["fragments"] == [f"net.fragment-{n}" for n in range(4)]
    assert (family["versions"], family["versions_words"]) == ([2, 2, 1, 1], "versions 2 2 1 1")
    assert (family["in_step"], family["missing"], family["ready"]) == (["w0"], ["w1"], True)
    assert [(each["worker_id"], each["inner_steps"]) for each in family["learners"]] == [
        ("w0", 6),
        ("w1", 6),
    ]
    details = json.loads(read(watched, "details.json?kind=parameter&name=net"))
    assert (details["of"], details["tensor_count"]) == ("net.fragment-0", 4)
    assert sum(each["size"] for each in details["tensors"]) == 42
    assert [each["fragment"] for each in details["tensors"]] == [0, 1, 2, 3]
    assert {each["name"] for each in details["last_steps"]} <= set(family["fragments"])
    assert details["last_steps"]
    assert "learner-part" in read(watched, "")
    assert "versions_words" in read(watched, "page.js")


def test_metrics_of_learners(watched: Any) -> None:
    reported = {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(read(watched, "metrics"))
        for sample in family.samples
        if sample.name.startswith("shardwell_learner_")
    }
    pages = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    for name in {key[0] for key in reported if not key[0].endswith("_created")}:
        assert f"`{name}`" in pages
    for worker in ("w0", "w1"):
        of = ("family", "net", worker)
        assert reported["shardwell_learner_inner_steps", *of] == 6
        assert reported["shardwell_learner_samples_total", *of] == 18
        assert reported["shardwell_learner_offers_total", *of] == 6
        assert reported["shardwell_learner_bytes_total", "in", *of] > 0
        assert reported["shardwell_learner_bytes_total", "out", *of] > 0
        assert reported["shardwell_learner_silent_seconds", *of] >= 0
        for rest in ("hidden_seconds", "waited_seconds", "offers_overdue", "takes_kept"):
            assert reported[f"shardwell_learner_{rest}_total", *of] >= 0


def test_notebooks_show_a_family_as_one(watched: Any, connect: Any) -> None:
    shown_html = connect(watched, "notebook").status()._repr_html_()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", shown_html)
    for row in (["family", "net", "versions 2 2 1 1", "w1"], ["net", "w0", "6", "18"]):
        assert row in [cells[at : at + 4] for at in range(len(cells))]
    assert "fragment-" not in shown_html


def test_a_trace_has_offers_and_takes_by_fragment(watched: Any, tmp_path: Path) -> None:
    shown(watched, "trace", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of = {event["args"]["of"] for event in events if event["name"] == "exchange"}
    assert of == {f"net.fragment-{n}" for n in range(4)}

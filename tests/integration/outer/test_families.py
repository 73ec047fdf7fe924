"""Goal: the fragments of a family are saved, restored, exported and deleted as one, by its name.

Method: real learners train a family beside a parameter; what a checkpoint has of it goes on with
the bits of the training that was not interrupted, on another number of shards too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.inside import client_of
from harness.programs.commands import run_command

WEIGHTS = {f"layers.{n}.w": np.full((3, n + 2), n + 1, np.float32) for n in range(4)}
NAMES = [f"net.fragment-{n}" for n in range(4)]


def learner(client: shardwell.Client, name: str = "net", **changes: Any) -> shardwell.Outer:
    options: dict[str, Any] = {
        "tensors": WEIGHTS,
        "sync_every": 4,
        "fragments": 4,
        "codec": "fp32",
        "worker_count": 1,
    }
    return shardwell.Outer(client, name, **{**options, **changes})


class Training:
    """Inner steps whose moves depend on the outer step alone, so that a replay has their bits."""

    def __init__(self, outer: shardwell.Outer) -> None:
        self.outer = outer
        self.weights = outer.init(WEIGHTS)

    def run(self, step_count: int) -> None:
        for _ in range(step_count):
            self.weights = {name: array - np.float32(0.25) for name, array in self.weights.items()}
            self.weights.update(self.outer.after_step(self.weights))


def begin(client: shardwell.Client, **changes: Any) -> Training:
    """A family of versions 2 2 1 1, and a parameter beside it."""
    training = Training(learner(client, **changes))
    training.run(6)
    plain = client.parameter("plain", size=5, optimizer=shardwell.SGD(1.0))
    plain.init(np.arange(5, dtype=np.float32))
    return training


def versions(outer: shardwell.Outer) -> list[int]:
    return [each.version for each in outer.fragments]


def held(client: shardwell.Client) -> list[set[str]]:
    return [
        {each.spec.name for each in (*shard.parameters, *shard.tables)} for shard in client.status()
    ]


def run(running: Any, *words: str) -> tuple[int, str]:
    """A command's exit code and output; those that need a cluster are given it."""
    needs_none = words[:2] in (("checkpoint", "inspect"), ("checkpoint", "export"))
    shards = () if needs_none else ("--shards", running.target)
    code, output, log = run_command(*words, *shards, environment={"COLUMNS": "300"})
    assert log == ""
    return code, output


# Checkpoints.


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("shard_count", [1, 3])
def test_learners_go_on_from_a_family_that_was_saved(
    cluster: Any, connect: Any, tmp_path: Path, shard_count: int, codec: str
) -> None:
    training = begin(connect(cluster(2), "w0"), codec=codec)
    ops = connect(cluster(2), "ops")  # of another cluster, which has none of it
    with pytest.raises(shardwell.UnknownParameterError, match="'net'"):
        ops.save_checkpoint(tmp_path / "none", parameters=["net"])
    client = client_of(training.outer)
    made = client.save_checkpoint(tmp_path / "c", parameters=["net"])
    assert [(each.name, each.version) for each in made.parameters] == list(
        zip(NAMES, [2, 2, 1, 1], strict=True)
    )
    (family,) = made.families
    assert (family.name, family.versions, family.size) == ("net", (2, 2, 1, 1), 42)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert [each["version"] for each in manifest["parameters"]] == [2, 2, 1, 1]
    saved = training.outer.image()
    training.weights = training.outer.reload()
    training.run(8)

    other = cluster(shard_count)
    restorer = connect(other, "ops")
    restorer.restore_checkpoint(tmp_path / "c", parameters=["net"])
    again = Training(learner(connect(other, "w0"), codec=codec))
    assert versions(again.outer) == [2, 2, 1, 1]
    for name, array in again.outer.image().items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)
    again.run(8)
    assert versions(again.outer) == versions(training.outer) == [4, 4, 3, 3]
    for name, array in again.outer.image().items():
        if codec == "fp32":  # a residual is the learner's, and not in a checkpoint
            np.testing.assert_array_equal(array, training.outer.image()[name], err_msg=name)
        else:
            np.testing.assert_allclose(array, training.outer.image()[name], atol=0.05)


def test_a_checkpoint_of_all_has_families_too(cluster: Any, connect: Any, tmp_path: Path) -> None:
    running = cluster(2)
    client = begin(connect(running, "w0")).outer._client
    made = client.save_checkpoint(tmp_path / "all")
    assert [each.name for each in made.parameters] == [*NAMES, "plain"]
    assert "<td" in made._repr_html_()
    assert "fragment-" not in made._repr_html_()
    code, output = run(running, "checkpoint", "inspect", str(tmp_path / "all"))
    assert code == 0
    (line,) = [line for line in output.splitlines() if "family net" in line]
    assert "42 in 4 fragments" in line
    assert "2 2 1 1" in line
    assert "fragment-" not in output
    target = tmp_path / "net.safetensors"
    code, output = run(
        running, "checkpoint", "export", str(tmp_path / "all"), str(target), "--parameter", "net"
    )
    assert (code, output) == (
        0,
        f"wrote 4 tensors, 42 elements, of net at version 1 to {target}",
    )
    other = cluster(3)
    code, output = run(other, "checkpoint", "restore", str(tmp_path / "all"), "--parameter", "net")
    assert code == 0
    assert "restored family net (versions 2 2 1 1) from" in output
    assert held(connect(other, "look")) == [set(NAMES)] * 3


def test_a_family_that_lacks_a_fragment_is_refused_by_name(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    running = cluster(2)
    training = begin(connect(running, "w0"))
    client = client_of(training.outer)
    part = client.save_checkpoint(tmp_path / "part", parameters=[NAMES[0], NAMES[3], "plain"])
    words = "lacks fragment 1, 2 of 4 of family 'net'"
    other = connect(cluster(1), "ops")
    for names in (None, ["net"], ["plain", "net"]):
        with pytest.raises(shardwell.ArgumentError, match=words):
            other.restore_checkpoint(part.path, parameters=names)
    with pytest.raises(shardwell.ArgumentError, match=words):
        shardwell.export_checkpoint(part.path, tmp_path / "e.safetensors", "net")
    assert held(other) == [set()]
    other.restore_checkpoint(part.path, parameters=["plain"])

    client.delete(NAMES[2])
    for names in (None, ["net"], ["plain", "net"]):
        with pytest.raises(shardwell.ArgumentError, match="lacks fragment 2 of 4 of family 'net'"):
            client.save_checkpoint(tmp_path / "no", parameters=names)
    assert not (tmp_path / "no").exists()
    client.save_checkpoint(tmp_path / "plain", parameters=["plain"])
    code, output = run(running, "status")
    assert code == 0
    assert "lacks fragment 2: restore it, or delete the family" in output
    client.delete("net")
    assert held(client) == [{"plain"}] * 2


def test_a_family_without_all_first_weights_is_not_saved(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    client = connect(cluster(1), "w0")
    learner(client)
    client.save_checkpoint(tmp_path / "none")  # no learner has begun it
    first = client.parameter(NAMES[0])
    first.init({"layers.0.w": WEIGHTS["layers.0.w"]})
    for names in (None, ["net"]):
        with pytest.raises(
            shardwell.NotInitializedError, match="fragment 1, 2, 3 of family 'net' has no first"
        ):
            client.save_checkpoint(tmp_path / "some", parameters=names)


# Deleting.


@pytest.mark.parametrize("how", ["client", "command", "kind"])
def test_a_family_is_deleted_by_its_name(cluster: Any, connect: Any, how: str) -> None:
    running = cluster(2)
    training = begin(connect(running, "w0"))
    client = client_of(training.outer)
    if how == "command":
        client.close()
        code, output = run(running, "delete", "net")
        assert code == 0
        assert output.startswith("deleted net: ")
        client = connect(running, "w1")
    else:
        freed = client.delete("net", kind="family" if how == "kind" else None)
        assert freed >= 42 * 4
        with pytest.raises(shardwell.ClosedError):
            training.run(1)
    assert held(client) == [{"plain"}] * 2
    with pytest.raises(shardwell.UnknownParameterError, match="'net'"):
        client.delete("net")
    with pytest.raises(shardwell.UnknownParameterError, match="'net'"):
        client.delete("net", kind="family")
    anew = Training(learner(client))
    anew.run(4)
    assert versions(anew.outer) == [1, 1, 1, 1]


def test_a_family_that_learners_use_is_not_deleted_in_part(cluster: Any, connect: Any) -> None:
    """Not even the fragments that they have not given yet."""
    running = cluster(2)
    training = Training(learner(connect(running, "w0")))
    training.run(1)  # fragment 0 alone
    ops = connect(running, "ops")
    with pytest.raises(shardwell.MembersAliveError, match="family 'net' is in use by 'w0'"):
        ops.delete("net")
    assert held(ops) == [set(NAMES)] * 2
    training.run(3)
    assert versions(training.outer) == [1, 1, 1, 1]
    ops.delete("net", force=True)
    assert held(ops) == [set()] * 2
    with pytest.raises(shardwell.UnknownParameterError, match="was deleted by 'ops'"):
        training.run(1)


def test_a_deletion_that_was_cut_off_is_finished_by_the_same_call(
    cluster: Any, connect: Any
) -> None:
    client = begin(connect(cluster(2), "w0")).outer._client
    for name in NAMES[2:]:
        client.delete(name)
    with pytest.raises(shardwell.NotInitializedError, match="delete the family"):
        learner(client, timeout_s=0.5).init(WEIGHTS)
    client.delete("net")
    assert held(client) == [{"plain"}] * 2


# Names.


def test_what_is_named_like_a_family_is_refused(cluster: Any, connect: Any) -> None:
    client = begin(connect(cluster(2), "w0")).outer._client
    sgd = shardwell.SGD(1.0)
    with pytest.raises(shardwell.SpecMismatchError, match="'net' is a family of fragments"):
        client.parameter("net", size=3, optimizer=sgd)
    with pytest.raises(shardwell.SpecMismatchError, match="'net' is a family of fragments"):
        client.table("net", row_count=3, dim=2, optimizer=sgd)
    with pytest.raises(shardwell.UnknownParameterError, match="family of 4 fragments"):
        client.parameter("net")
    assert held(client) == [{*NAMES, "plain"}] * 2


@pytest.mark.parametrize("kind", ["parameter", "table"])
def test_a_family_named_like_something_is_refused(cluster: Any, connect: Any, kind: str) -> None:
    client = connect(cluster(2), "w0")
    if kind == "parameter":
        client.parameter("net", size=3, optimizer=shardwell.SGD(1.0))
    else:
        client.table("net", row_count=3, dim=2, optimizer=shardwell.SGD(1.0))
    with pytest.raises(shardwell.SpecMismatchError, match="'net' is a parameter or table"):
        learner(client)
    assert held(client) == [{"net"}] * 2
    client.delete("net")
    learner(client)


def test_a_fragment_of_another_deal_is_refused(cluster: Any, connect: Any) -> None:
    client = connect(cluster(2), "w0")
    learner(client)
    other = shardwell.Fragment(family="net", index=5, count=6, assignment="strided")
    with pytest.raises(shardwell.SpecMismatchError, match="'strided' into 4 fragments"):
        client.parameter(other.parameter, size=3, optimizer=shardwell.SGD(1.0), fragment=other)


# Members.


def test_members_of_a_family(cluster: Any, connect: Any) -> None:
    """Listed as one, asked to leave all fragments, and taken out of all."""
    running = cluster(2)
    elastic = shardwell.Elastic(min_count=1, max_count=4)
    trainings = []
    for number in range(2):
        client = connect(running, f"w{number}")
        outer = learner(client, worker_count=None, members=elastic)
        trainings.append(Training(outer))
        trainings[-1].run(4)
        outer.leave()
    trainings[0].run(4)  # alone, and takes part anew
    ops = connect(running, "ops")
    states = {each.worker_id: each.state for each in ops.members("net")}
    assert states == {"w0": "awaited", "w1": "over"}
    code, output = run(running, "members")
    assert code == 0
    rows = [line.split()[:3] for line in output.splitlines() if " w" in line and "net" in line]
    assert rows == [["net", "w0", "awaited"], ["net", "w1", "over"]]
    assert "fragment-" not in output
    with pytest.raises(shardwell.ArgumentError, match="no member of family 'net'"):
        ops.drain("w9", "net")
    assert ops.drain("w0", "net") == NAMES
    trainings[0].run(4)
    assert trainings[0].outer.is_draining
    assert ops.remove_member("w0", "net") == NAMES
    assert {each.state for each in ops.members("net")} <= {"over", "lost"}
    with pytest.raises(shardwell.UnknownParameterError, match="parameter or table 'nothing'"):
        ops.members("nothing")


def test_learners_of_a_fixed_crew_are_not_sent_away(cluster: Any, connect: Any) -> None:
    running = cluster(1)
    begin(connect(running, "w0"))
    with pytest.raises(shardwell.ArgumentError, match="family 'net' has 1 worker"):
        connect(running, "ops").remove_member("w0", "net")


def test_a_client_names_its_families_and_not_their_fragments(cluster: Any, connect: Any) -> None:
    client = connect(cluster(2), "w0")
    begin(client)
    client.table("rows", row_count=4, dim=2, optimizer=shardwell.SGD(1.0))
    assert client.open_names() == (["plain", "net"], ["rows"])

"""Goal: what is restored under another name differs in that alone, and takes nothing's name.

Method: real clusters of several sizes; beside it the checkpoint restored under its own names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.programs.commands import run_command
from harness.tokens import Tokens

ADAM = shardwell.Adam(learning_rate=0.125)
SHAPES = {"a": (4, 5), "b": (3,), "c": (7,)}
IDS = np.array([1, 2, 40])


def opened(client: shardwell.Client, name: str, rows: str) -> list[Any]:
    return [
        client.parameter(name, tensors=SHAPES, optimizer=ADAM),
        client.table(rows, row_count=50, dim=2, optimizer=ADAM, initializer=shardwell.Zeros()),
    ]


def step(net: Any, table: Any) -> list[Any]:
    """A step of both, another one each time; what came of it."""
    value = float(net.next_step % 5) - 1.5
    weights = net.exchange({name: np.full(shape, value) for name, shape in SHAPES.items()})
    rows = table.exchange_rows(IDS, np.full((3, 2), value))
    return [*weights.values(), rows]


@pytest.fixture
def saved(cluster: Any, connect: Any, tmp_path: Path) -> Path:
    """A parameter, a table and a family, trained a little."""
    client = connect(cluster(2), "w0")
    net, table = opened(client, "net", "rows")
    net.init({name: np.zeros(shape) for name, shape in SHAPES.items()})
    net.set_learning_rate(0.5)
    for _ in range(3):
        step(net, table)
    outer(client, "model").init({name: np.ones(shape) for name, shape in SHAPES.items()})
    client.save_checkpoint(tmp_path / "saved")
    return tmp_path / "saved"


def outer(client: shardwell.Client, name: str) -> shardwell.Outer:
    return shardwell.Outer(client, name, tensors=SHAPES, fragments=2)


def held(client: shardwell.Client) -> set[str]:
    """What all shards have."""
    (names,) = {
        tuple(sorted(each.spec.name for each in (*shard.parameters, *shard.tables)))
        for shard in client.status()
    }
    return set(names)


@pytest.mark.parametrize("shard_count", [1, 3])
def test_it_goes_on_under_its_new_name(
    cluster: Any, connect: Any, saved: Path, shard_count: int
) -> None:
    client = connect(cluster(shard_count), "w0")
    names = {"net": "net-2", "rows": "net", "model": "model-2"}
    made = client.restore_checkpoint(saved, names=names)
    assert [each.name for each in (*made.tables, *made.families)] == ["rows", "model"]
    fragments = {"model-2.fragment-0", "model-2.fragment-1"}
    assert held(client) == {"net-2", "net", *fragments}
    other = connect(cluster(shard_count), "w0")
    other.restore_checkpoint(saved)
    named, beside = opened(client, "net-2", "net"), opened(other, "net", "rows")
    assert named[0].next_step == 3
    for _ in range(3):
        for found, expected in zip(step(*named), step(*beside), strict=True):
            np.testing.assert_array_equal(found, expected)
    for each in client.status():
        assert {part.spec.fragment for part in each.parameters if part.spec.fragment} == {
            shardwell.Fragment(family="model-2", index=index, count=2, assignment="strided")
            for index in range(2)
        }
    weights = outer(client, "model-2").init({name: np.zeros(s) for name, s in SHAPES.items()})
    np.testing.assert_array_equal(weights["a"], 1)


def test_it_is_put_beside_what_it_was_saved_from(cluster: Any, connect: Any, saved: Path) -> None:
    """So a parameter is renamed: saved, restored under another name, deleted."""
    client = connect(cluster(2), "w0")
    client.restore_checkpoint(saved)
    names = {"net": "net-2"}
    for _ in range(2):  # one that was cut off after its end is done again
        client.restore_checkpoint(saved, parameters=["net"], names=names)
    client.delete("net")
    assert held(client) == {"net-2", "rows", "model.fragment-0", "model.fragment-1"}
    step(*opened(client, "net-2", "rows"))
    with pytest.raises(
        shardwell.ArgumentError, match=r"'net-2' has first weights already; .*names="
    ):
        client.restore_checkpoint(saved, parameters=["net"], names=names)
    with pytest.raises(shardwell.ArgumentError, match=r"'rows' has rows already; .*--name"):
        client.restore_checkpoint(saved, tables=["rows"])


@pytest.mark.parametrize(
    ("chosen", "names", "words"),
    [
        ({}, {"nte": "other"}, "names has 'nte', which is not restored.*'model', 'net', 'rows'"),
        ({"tables": ["rows"]}, {"net": "other"}, "'net', which is not restored"),
        ({}, {"net": "rows"}, "parameter 'net' and table 'rows' would both be restored as 'rows'"),
        ({}, {"net": "new", "rows": "new"}, "would both be restored as 'new'; give one of them"),
        ({}, {"model": "net"}, "family 'model' and parameter 'net' would both"),
        ({}, {"net": "model.fragment-1"}, "both be restored as 'model.fragment-1'"),
        ({}, {"model.fragment-0": "other"}, "is a fragment of family 'model', which has one name"),
        ({}, {"net": "../net"}, "the new name of 'net'"),
        ({}, {"net": ""}, "the new name of 'net'"),
        ({}, {"net": 3}, "the new name of 'net'"),
        ({}, [("net", "new")], "names must be a dict"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_names_that_can_t_be_given(
    cluster: Any, connect: Any, saved: Path, chosen: Any, names: Any, words: str
) -> None:
    client = connect(cluster(2), "w0")
    with pytest.raises(shardwell.ArgumentError, match=words):
        client.restore_checkpoint(saved, names=names, **chosen)
    assert held(client) == set()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"net": "a-table"}, "'a-table' is a table on this cluster, and the .* a parameter for"),
        ({"rows": "a-parameter"}, "'a-parameter' is a parameter on this cluster, and the .* table"),
        ({"net": "a-family"}, "'a-family' is a family on this cluster"),
        ({"model": "a-table"}, "'a-table' is a table on this cluster, and the .* a family for"),
        ({"net": "a-parameter"}, "'a-parameter' exists with another spec .*names="),
        ({"model": "q"}, "'q.fragment-1' is a table on this cluster"),
        ({"rows": "a-table"}, "'a-table' exists with another spec .*names="),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_name_that_something_has_is_refused_before_anything_is_made(
    cluster: Any, connect: Any, saved: Path, names: dict[str, str], words: str
) -> None:
    client = connect(cluster(2), "w0")
    client.parameter("a-parameter", size=3, optimizer=ADAM)
    for name in ("a-table", "q.fragment-1"):
        client.table(name, row_count=9, dim=3, optimizer=ADAM)
    outer(client, "a-family").init({name: np.zeros(shape) for name, shape in SHAPES.items()})
    before = held(client)
    with pytest.raises(shardwell.SpecMismatchError, match=words):
        client.restore_checkpoint(saved, names=names)
    assert held(client) == before


def test_it_takes_the_right_to_the_new_name(
    cluster: Any, connect: Any, saved: Path, tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path)
    running = cluster(2, tokens=tokens.path)
    owner = connect(running, "w0", token_file=tokens.add("owner", "create:mine-", "read"))
    with pytest.raises(shardwell.AccessDeniedError, match="'theirs'"):
        owner.restore_checkpoint(saved, parameters=["net"], names={"net": "theirs"})
    owner.restore_checkpoint(saved, parameters=["net"], names={"net": "mine-net"})
    assert held(owner) == {"mine-net"}


def test_the_command(cluster: Any, connect: Any, saved: Path) -> None:
    running = cluster(2)
    restore = ("checkpoint", "restore", str(saved), f"--shards={running.target}")
    code, output, errors = run_command(*restore, "--name", "net=new", "--name=model=new-model")
    assert (code, errors) == (0, "")
    words = "restored net as new, family model as new-model (versions 0 0), table rows from"
    assert words in " ".join(output.split())
    assert held(connect(running, "w0")) == {
        *("new", "rows", "new-model.fragment-0", "new-model.fragment-1")
    }
    for given in ("net", "net=", "=new"):
        code, _, errors = run_command(*restore, "--name", given)
        assert code == 2
        assert f"give OLD=NEW; got {given!r}" in errors
    code, _, errors = run_command(*restore, "--name=net=a", "--name=net=b")
    assert (code, "'net' can't be both 'a' and 'b'" in errors) == (2, True)

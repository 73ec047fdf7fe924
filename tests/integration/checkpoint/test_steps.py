"""Goal: "ckpt/{step}" keeps the newest whole checkpoints of a training, and finds the newest.

Method: real checkpoints, some of which are damaged as disks and kills damage them.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import shardwell

SGD = shardwell.SGD(learning_rate=1.0)
SIZE = 40


@pytest.fixture
def model(cluster, connect) -> tuple[shardwell.Client, shardwell.Parameter]:
    client = connect(cluster(2), "w0")
    parameter = client.parameter("model", size=SIZE, optimizer=SGD)
    parameter.init(np.zeros(SIZE, np.float32))
    parameter.keep_state({"seen": {"count": 0}})  # a file of its own in each
    return client, parameter


def save_steps(model, path: Path, steps: int, **options) -> None:
    client, parameter = model
    for _ in range(steps):
        parameter.exchange(np.ones(SIZE, np.float32))
        client.save_checkpoint(path / "{step}", **options)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def damage(path: Path) -> None:
    """As a disk does: the checkpoint's CRCs tell, its sizes do not."""
    file = next(path.glob("*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_each_step_has_its_directory_and_the_newest_is_found(model, tmp_path) -> None:
    save_steps(model, tmp_path, 3)
    assert names(tmp_path) == ["1", "2", "3"]
    found = shardwell.inspect_checkpoint(tmp_path / "{step}", verify=True)
    assert (found.path, found.parameters[0].version) == (tmp_path / "3", 3)


def test_who_names_parameters_saves_no_tables(model, tmp_path) -> None:
    """Whose versions would be in the directories' names, and take the places of one another."""
    client, _ = model
    table = client.table("rows", row_count=10, dim=2, optimizer=shardwell.SGD(1.0))
    for _ in range(7):
        table.put_row_gradients([1], np.ones((1, 2), np.float32))
    save_steps(model, tmp_path / "named", 2, parameters=["model"])
    assert names(tmp_path / "named") == ["1", "2"]
    save_steps(model, tmp_path / "other", 2, tables=["rows"])
    assert names(tmp_path / "other") == ["7"]
    assert not shardwell.inspect_checkpoint(tmp_path / "other" / "7").parameters
    made = client.save_checkpoint(tmp_path / "all", parameters=[])
    assert (len(made.parameters), len(made.tables)) == (0, 1)
    made = client.save_checkpoint(tmp_path / "both")
    assert (len(made.parameters), len(made.tables)) == (1, 1)


def test_so_many_are_kept(model, tmp_path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "007").mkdir()
    save_steps(model, tmp_path, 5, keep=2)
    assert names(tmp_path) == ["007", "4", "5", "notes"]


def test_those_that_are_not_whole_do_not_count(model, tmp_path) -> None:
    save_steps(model, tmp_path, 3)
    (tmp_path / "3" / "manifest.json").unlink()
    save_steps(model, tmp_path, 1, keep=2)
    assert names(tmp_path) == ["2", "3", "4"]  # 3 is newer than what is kept: it may be looked at
    save_steps(model, tmp_path, 2, keep=2)
    assert names(tmp_path) == ["3", "5", "6"]  # without its manifest nothing says whose 3 is


def test_one_whose_files_are_not_whole_is_removed_when_it_is_old(model, tmp_path) -> None:
    save_steps(model, tmp_path, 2)
    next((tmp_path / "1").glob("*/*.safetensors")).unlink()
    save_steps(model, tmp_path, 1, keep=2)
    assert names(tmp_path) == ["2", "3"]


def test_the_newest_whole_one_is_restored(model, tmp_path, cluster, connect, caplog) -> None:
    save_steps(model, tmp_path, 3)
    damage(tmp_path / "3")
    shutil.rmtree(next((tmp_path / "2").glob("0*")))
    client = connect(cluster(3), "w0")
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        restored = client.restore_checkpoint(tmp_path / "{step}")
    assert restored.path == tmp_path / "1"
    warned = [each.getMessage() for each in caplog.records if each.name == "shardwell"]
    assert all(str(tmp_path / step) in line for step, line in zip("32", warned, strict=True))
    parameter = client.parameter("model")
    assert parameter.next_step == 1
    assert parameter.get_weights().tolist() == [-1.0] * SIZE


def test_the_same_step_saved_again(model, tmp_path) -> None:
    client, parameter = model
    save_steps(model, tmp_path, 1)
    before = (tmp_path / "1" / "manifest.json").stat().st_ino
    again = client.save_checkpoint(tmp_path / "{step}")
    assert again == shardwell.inspect_checkpoint(tmp_path / "1")
    assert (tmp_path / "1" / "manifest.json").stat().st_ino == before
    assert names(tmp_path) == ["1"]
    for rate in (0.5, 0.25):
        parameter.set_learning_rate(rate)
        if rate == 0.25:
            next((tmp_path / "1").glob("*/*.safetensors")).unlink()
        client.save_checkpoint(tmp_path / "{step}")
        assert shardwell.inspect_checkpoint(tmp_path / "1").parameters[0].learning_rate == rate
        assert names(tmp_path) == ["1"]


def test_a_save_stays_beside_later_steps_of_an_abandoned_training(model, tmp_path) -> None:
    save_steps(model, tmp_path, 1)
    (tmp_path / "1").rename(tmp_path / "9")
    (tmp_path / "1.removed").mkdir()  # a kill left it
    save_steps(model, tmp_path, 2, keep=1)
    assert names(tmp_path) == ["3", "9"]


def test_none_is_whole(model, tmp_path) -> None:
    client, _ = model
    for path in (tmp_path, tmp_path / "away"):
        with pytest.raises(shardwell.StorageError, match=r"no checkpoint that can be used"):
            client.restore_checkpoint(path / "{step}")
    save_steps(model, tmp_path, 1)
    (tmp_path / "1" / "manifest.json").write_text("{}")
    with pytest.raises(shardwell.StorageError, match=r"of the newest: .*1/manifest.json"):
        shardwell.inspect_checkpoint(tmp_path / "{step}")


@pytest.mark.parametrize(
    "name", ["{steps}", "run-{ Step }", "{stp}", "{step:06d}", "{epoch}/{step}", "{}", "{job}/last"]
)
def test_another_field_than_the_step_is_no_name(model, tmp_path, name) -> None:
    client, _ = model
    with pytest.raises(shardwell.ArgumentError, match=r"write \{step\} in place of \{"):
        client.save_checkpoint(tmp_path / name)
    assert names(tmp_path) == []


def test_a_directory_of_the_user_s_may_have_braces_in_its_name(model, tmp_path) -> None:
    (tmp_path / "{2026}").mkdir()
    save_steps(model, tmp_path / "{2026}", 2)
    assert names(tmp_path / "{2026}") == ["1", "2"]


@pytest.mark.parametrize("name", ["{step}/{step}", "{step}/a", "{step}-{step}"])
def test_where_the_step_may_be(model, tmp_path, name) -> None:
    client, _ = model
    for call in (client.save_checkpoint, client.restore_checkpoint, shardwell.inspect_checkpoint):
        with pytest.raises(
            shardwell.ArgumentError, match="must be once in a checkpoint's own name"
        ):
            call(tmp_path / name)
    assert not names(tmp_path)


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True])
def test_keeps_that_are_none(model, tmp_path, keep) -> None:
    with pytest.raises(shardwell.ArgumentError, match="keep must be an integer"):
        model[0].save_checkpoint(tmp_path / "{step}", keep=keep)
    with pytest.raises(shardwell.ArgumentError, match=r"keep is for a path with \{step\}"):
        model[0].save_checkpoint(tmp_path / "1", keep=2)
    assert not names(tmp_path)

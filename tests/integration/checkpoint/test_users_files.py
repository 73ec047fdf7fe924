"""Goal: no checkpoint, and no keep=, removes or replaces what a save did not make.

Method: directories and files of the user's lie where checkpoints of a training have their names.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.files import contents_of

SGD = shardwell.SGD(learning_rate=1.0)


@pytest.fixture
def model(cluster, connect) -> tuple[shardwell.Client, shardwell.Parameter]:
    client = connect(cluster(2), "w0")
    parameter = client.parameter("model", size=40, optimizer=SGD)
    parameter.init(np.zeros(40, np.float32))
    return client, parameter


def save_steps(model, path: Path, steps: int, **options) -> None:
    client, parameter = model
    for _ in range(steps):
        parameter.exchange(np.ones(40, np.float32))
        client.save_checkpoint(path / "{step}", **options)


def notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def note(path: Path) -> None:
    path.write_text("mine")


def manifest_of_others(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "an app"}')


def nothing(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    notes(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


THEIRS = [notes, note, manifest_of_others, nothing, link]


@pytest.mark.parametrize("theirs", THEIRS)
def test_keep_leaves_what_is_no_checkpoint(model, tmp_path, caplog, theirs) -> None:
    theirs(tmp_path / "1")
    save_steps(model, tmp_path / "other", 1)
    before = contents_of(tmp_path / "1")
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        save_steps(model, tmp_path, 2, keep=1)
    assert contents_of(tmp_path / "1") == before
    assert not (tmp_path / "2").exists()
    assert (tmp_path / "3").exists()
    assert f"keep= left {tmp_path / '1'} as it is" in caplog.text


@pytest.mark.parametrize("theirs", THEIRS)
def test_a_step_that_is_no_checkpoint_is_not_replaced(model, tmp_path, theirs) -> None:
    theirs(tmp_path / "1")
    before = contents_of(tmp_path)
    path = tmp_path / "1"
    with pytest.raises(shardwell.StorageError, match=rf"{path} is not replaced.*move {path} away"):
        save_steps(model, tmp_path, 1)
    assert contents_of(tmp_path) == before


def test_a_checkpoint_with_something_of_the_users_in_it_stays(model, tmp_path, caplog) -> None:
    save_steps(model, tmp_path, 1)
    place = next((tmp_path / "1").glob("0*"))
    (place / "plot.png").write_bytes(b"mine")
    before = contents_of(tmp_path / "1")
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        save_steps(model, tmp_path, 1, keep=1)
    assert contents_of(tmp_path / "1") == before
    assert f"{place / 'plot.png'}, which its manifest does not name" in caplog.text
    (place / "plot.png").unlink()
    save_steps(model, tmp_path, 1, keep=1)
    assert not (tmp_path / "1").exists()


def test_a_removal_that_was_cut_off_is_finished(model, tmp_path) -> None:
    save_steps(model, tmp_path, 3)
    for step in "12":  # killed after some files, and after all but the manifest
        (tmp_path / step).rename(tmp_path / f"{step}.removed")
    next((tmp_path / "1.removed").glob("*/*.safetensors")).unlink()
    shutil.rmtree(next((tmp_path / "2.removed").glob("0*")))
    save_steps(model, tmp_path, 1, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("theirs", [notes, note, manifest_of_others])
def test_what_only_has_the_name_of_a_removal_stays(model, tmp_path, caplog, theirs) -> None:
    save_steps(model, tmp_path, 1)
    theirs(tmp_path / "1.removed")
    before = contents_of(tmp_path / "1.removed")
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        save_steps(model, tmp_path, 2, keep=1)
    assert contents_of(tmp_path / "1.removed") == before
    assert (tmp_path / "1").exists()  # its name is needed
    assert not (tmp_path / "2").exists()
    assert str(tmp_path / "1.removed") in caplog.text

"""Goal: a directory that was never made goes, and one that another process put there stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwell.errors import StorageError
from shardwell_server.store.files.atomic_directory import AtomicDirectories


def numbered(path: Path) -> AtomicDirectories:
    made = AtomicDirectories(path, lambda _: None, is_synced=False)
    assert list(made.existing()) == []
    return made


def fill(directory: Path) -> None:
    (directory / "file").write_text("made")


def test_a_copy_that_was_put_there_meanwhile_is_not_removed(tmp_path) -> None:
    directories = numbered(tmp_path / "n")
    copied = tmp_path / "n" / "000001"
    copied.mkdir()
    (copied / "file").write_text("somebody's")
    with (
        pytest.raises(StorageError, match="000001"),
        directories.making(fill, "making it"),
    ):
        pytest.fail("it was made")
    assert (copied / "file").read_text() == "somebody's"


def test_what_could_not_be_removed_is_at_the_next_call(tmp_path, monkeypatch) -> None:
    directories = numbered(tmp_path / "n")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.suffix == ".new":
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with (
            pytest.raises(ValueError, match="taken over"),
            directories.making(fill, "making it"),
        ):
            raise ValueError("not taken over")
    assert (tmp_path / "n" / "000001").exists()
    with directories.making(fill, "making it") as made:
        assert made.name == "000001"
    assert [entry.name for entry in (tmp_path / "n").iterdir()] == ["000001"]

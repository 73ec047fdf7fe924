"""Goal: two shards never write into one directory, whatever their names and times.

Method: real directories and files; another process holds the lock where one is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastcrc import crc32

import shardwell
from harness.files import contents_of
from shardwell.errors import ShardwellError, StorageError
from shardwell_server.config import ShardConfig
from shardwell_server.store.contract import Layout
from shardwell_server.store.files.atomic_directory import AtomicDirectories
from shardwell_server.store.files.data_dir import DataDir, DataDirError, kept_cluster_id
from shardwell_server.store.files.mapped import MappedFile
from shardwell_server.store.mmap.kept import KeptWeights, kept_size, make_room

MINE = ShardConfig(shard_index=1, shard_count=3, cluster_id="mine")
HOLD = """
import fcntl, os, sys
directory = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(directory, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_new_directory_is_made_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "shard-1"
    with DataDir(path, MINE) as data_dir:
        assert data_dir.path == path
        found = json.loads((path / "shard.json").read_text())
    fields = {
        "format_version": 3,
        "shardwell_version": shardwell.__version__,
        "cluster_id": "mine",
        "shard_index": 1,
        "shard_count": 3,
    }
    assert found == {**fields, "crc32c": crc32.iscsi(json.dumps(fields).encode())}
    assert sorted(entry.name for entry in path.iterdir()) == ["shard.json"]


def test_its_own_shard_comes_back(tmp_path: Path) -> None:
    for _ in range(3):
        with DataDir(tmp_path, MINE):
            pass
    other_settings = ShardConfig(
        shard_index=1, shard_count=3, cluster_id="mine", chunk_size_bytes=64, listen="127.0.0.2:1"
    )
    DataDir(tmp_path, other_settings).close()


@pytest.mark.parametrize(
    "other",
    [
        ShardConfig(shard_index=0, shard_count=3, cluster_id="mine"),
        ShardConfig(shard_index=1, shard_count=4, cluster_id="mine"),
        ShardConfig(shard_index=1, shard_count=3, cluster_id="yours"),
    ],
)
def test_another_shards_directory_is_refused_and_left_alone(
    tmp_path: Path, other: ShardConfig
) -> None:
    DataDir(tmp_path, MINE).close()
    before = (tmp_path / "shard.json").read_bytes()
    with pytest.raises(DataDirError, match=r"belongs to another shard.*found") as caught:
        DataDir(tmp_path, other)
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value, ShardwellError)
    assert (tmp_path / "shard.json").read_bytes() == before
    DataDir(tmp_path, MINE).close()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path, MINE).close()
    path = tmp_path / "shard.json"
    found = json.loads(path.read_text()) | {"format_version": 4, "shardwell_version": "9.1.0"}
    del found["crc32c"]
    path.write_text(json.dumps(found | {"crc32c": crc32.iscsi(json.dumps(found).encode())}))
    told = (
        r"shard\.json has format 4, written by shardwell 9\.1\.0; shardwell .* reads format 1 to 3"
    )
    with pytest.raises(DataDirError, match=told):
        DataDir(tmp_path, MINE)


def test_an_older_format_has_the_newest_number_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that the version that wrote it refuses what this one goes on to write."""
    fields = {"format_version": 1, "cluster_id": "mine", "shard_index": 1, "shard_count": 3}
    checked = {**fields, "crc32c": crc32.iscsi(json.dumps(fields).encode())}
    path = tmp_path / "shard.json"
    path.write_text(json.dumps(checked))
    for log_count in (1, 1):
        DataDir(tmp_path, MINE).close()
        assert json.loads(path.read_text())["format_version"] == 3
        assert len(caplog.records) == log_count
    path.write_text(json.dumps(checked))
    with pytest.raises(DataDirError, match="belongs to another shard"):
        DataDir(tmp_path, ShardConfig(shard_index=0, shard_count=3, cluster_id="mine"))
    assert json.loads(path.read_text())["format_version"] == 1


def test_every_flipped_bit_of_the_identity_is_found(
    tmp_path: Path,
) -> None:
    """Also by a caller that only asks which cluster it was: a wrong name is never believed."""
    DataDir(tmp_path, MINE).close()
    path = tmp_path / "shard.json"
    good = path.read_bytes()
    refused = 0
    for bit in range(8 * len(good)):
        spoilt = bytearray(good)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        assert kept_cluster_id(tmp_path) in ("mine", None)
        if kept_cluster_id(tmp_path) is None:
            refused += 1
            with pytest.raises(DataDirError, match=re.escape(str(path))):
                DataDir(tmp_path, MINE)
        else:
            DataDir(tmp_path, MINE).close()
    assert refused > 7 * len(good)


def test_whose_it_is_is_said_in_words(tmp_path: Path) -> None:
    DataDir(tmp_path, MINE).close()
    other = ShardConfig(shard_index=0, shard_count=1, cluster_id="yours")
    with pytest.raises(DataDirError) as caught:
        DataDir(tmp_path, other)
    assert "expected shard 0 of 1 of cluster 'yours', found shard 1 of 3 of cluster 'mine'" in str(
        caught.value
    )


@pytest.mark.parametrize("contents", [b"", b"{", b"\xff\xfe", b"null", b"[]", b"7", b"{}"])
def test_an_unreadable_identity_is_refused_and_kept(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "shard.json"
    path.write_bytes(contents)
    with pytest.raises(DataDirError, match=r"shard\.json"):
        DataDir(tmp_path, MINE)
    assert path.read_bytes() == contents
    path.unlink()
    DataDir(tmp_path, MINE).close()


def test_an_identity_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shard.json").mkdir()
    with pytest.raises(DataDirError, match="can't be read"):
        DataDir(tmp_path, MINE)


def test_a_directory_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    with DataDir(tmp_path, MINE), pytest.raises(DataDirError, match="in use by another process"):
        DataDir(tmp_path, MINE)
    DataDir(tmp_path, MINE).close()


def test_a_lock_ends_with_the_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(DataDirError, match="in use by another process"):
                DataDir(tmp_path, MINE)
            assert not (tmp_path / "shard.json").exists()
        finally:
            holder.kill()
    DataDir(tmp_path, MINE).close()


def test_no_file_that_is_removed_lets_another_process_in(tmp_path: Path) -> None:
    path, link = tmp_path / "shard", tmp_path / "link"
    link.symlink_to(path)
    with DataDir(path, MINE):
        for entry in path.iterdir():
            entry.unlink()
        for name in (path, link):
            with pytest.raises(DataDirError, match="in use by another process"):
                DataDir(name, MINE)
        assert not list(path.iterdir())


def test_a_directory_is_new_once(tmp_path: Path) -> None:
    for is_new in (True, False):
        with DataDir(tmp_path / "shard", MINE) as data_dir:
            assert data_dir.is_new is is_new


def test_a_refusal_lets_go_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "shard.json").write_text("{")
    for _ in range(2):
        with pytest.raises(DataDirError, match="can't be read"):
            DataDir(tmp_path, MINE)


def test_a_half_written_identity_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "shard.json.new").write_text("{")
    DataDir(tmp_path, MINE).close()
    assert json.loads((tmp_path / "shard.json").read_text())["cluster_id"] == "mine"


@pytest.mark.parametrize("theirs", ["notes.txt", ".bashrc", "shard.json.new", "boot.json"])
def test_a_directory_with_files_of_the_users_is_refused_and_stays(tmp_path, theirs) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / theirs).write_text("mine")
    for _ in range(2):
        with pytest.raises(
            DataDirError, match=rf"{home} has '{theirs}'.*stays as it is; give an empty directory"
        ):
            DataDir(home, MINE)
    assert contents_of(home) == {"": None, theirs: b"mine"}
    assert home.stat().st_mode & 0o777 == 0o755


def test_a_shard_json_of_others_is_refused_and_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "shard.json").write_text('{"name": "an app"}')
    with pytest.raises(DataDirError, match=r"shard\.json can't be read"):
        DataDir(tmp_path, MINE)
    assert contents_of(tmp_path) == {"": None, "shard.json": b'{"name": "an app"}'}
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_root_of_a_new_volume_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with DataDir(tmp_path, MINE) as data_dir:
        assert data_dir.is_new


def test_an_identity_that_was_begun_for_another_shard_is_not_taken(tmp_path: Path) -> None:
    other = ShardConfig(shard_index=2, shard_count=3, cluster_id="mine")
    DataDir(tmp_path, other).close()
    (tmp_path / "shard.json").rename(tmp_path / "shard.json.new")
    with pytest.raises(DataDirError, match=r"has 'shard\.json\.new'"):
        DataDir(tmp_path, MINE)
    DataDir(tmp_path, other).close()


def test_a_path_that_leads_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "shard"):
        with pytest.raises(DataDirError, match="give a directory"):
            DataDir(path, MINE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_parent_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for path in (tmp_path, tmp_path / "shard"):
            with pytest.raises(DataDirError, match="this user can write to"):
                DataDir(path, MINE)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system without writes")
def test_a_file_system_that_takes_no_directories_is_refused() -> None:
    with pytest.raises(DataDirError, match="this user can write to"):
        DataDir(Path("/proc/self/shard"), MINE)


# A directory that was never made goes, and one that another process put there stays.


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


# Places of an older data directory have room for what is kept today.


@pytest.mark.parametrize("count", [1, 31, 700, 8191, 491_384, 524_288])
def test_places_of_0_2_0_are_enlarged_once(tmp_path: Path, count: int) -> None:
    path, size = tmp_path / "kept", 2 * count + 256
    before, layout = (
        Layout(
            name="m",
            slice_size=2 * count,
            chunk_element_count=count,
            with_sum=False,
            kept_size_bytes=size,
            description={"spec": {"cutsBlocks": True}} if cuts_blocks else {},
        )
        for cuts_blocks in (False, True)
    )
    KeptWeights(MappedFile.create(path, kept_size(before)), before, print).put(1, 7, b"7" * size)
    message = b"8" * (2 * count + 100 + -(-count // max(min(count // 64, 256), 1)))
    for _ in range(2):
        make_room(path, layout)
        kept = KeptWeights(MappedFile.open(path, kept_size(layout)), layout, print)
        assert kept.get(1, 9) in (None, message)
        kept.put(1, 9, message)
        assert kept.get(1, 9) == message
    make_room(path, before)
    assert path.stat().st_size == kept_size(layout)

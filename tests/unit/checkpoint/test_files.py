"""Goal: a checkpoint's files say what they held, or are refused with the reason; never in between.

Method: checkpoints are written by the modules that a cluster's are, read back with the package
safetensors and with inspect_checkpoint, and damaged in every way that a disk, a copy or a stranger
may think of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import shardwell
from harness.data.manifests import MANIFEST, change_manifest
from shardwell.checkpoint.directory import MARK_NAME, whole_directory
from shardwell.checkpoint.format import (
    Checkpoint,
    CheckpointParameter,
    SliceFile,
    opened,
    slice_path,
)
from shardwell.checkpoint.manifest import write_manifest
from shardwell.checkpoint.tensor_files import TensorsReader, TensorsWriter, slice_tensors
from shardwell.errors import ArgumentError, DeadlineError, StorageError
from shardwell.numerics.update_rules import UpdateRule
from shardwell.placement.slices import slice_of
from shardwell.specs.optimizers import SGD, Adagrad, Adam, AdamW, Average, Optimizer, RMSProp
from shardwell.specs.parameter import ParameterSpec

OPTIMIZERS: list[Optimizer] = [
    Average(),
    SGD(learning_rate=0.1),
    SGD(learning_rate=0.1, momentum=0.9),
    Adagrad(learning_rate=0.1),
    RMSProp(learning_rate=0.1),
    RMSProp(learning_rate=0.1, momentum=0.5),
    Adam(clip_value=0.1),
    AdamW(),
]


def values_of(array_index: int, size: int) -> np.ndarray:
    return np.arange(size, dtype=np.float32) + np.float32(1000 * array_index)


def write(
    path: Path,
    optimizer: Optimizer = OPTIMIZERS[2],
    *,
    size: int = 103,
    shard_count: int = 2,
    name: str = "model",
    version: int = 7,
) -> Checkpoint:
    """A whole checkpoint of one parameter."""
    spec = ParameterSpec(name=name, size=size, optimizer=optimizer, worker_count=2)
    names = ("weights", *optimizer.slot_names)
    with whole_directory(path) as partial:
        (partial / f"000001-{name}").mkdir()
        files = []
        for index in range(min(shard_count, size)):
            where = slice_of(size, index, shard_count)
            relative = slice_path(1, name, index)
            tensors = slice_tensors(names, where.size)
            with TensorsWriter(partial / relative, tensors, {"parameter": name}) as writer:
                for array_index in reversed(range(len(names))):
                    values = values_of(array_index, size)[where.offset : where.stop]
                    for start in reversed(range(0, where.size, 10)):
                        writer.put(names[array_index], start, values[start : start + 10])
                size_bytes, crc = writer.finish()
            files.append(
                SliceFile(
                    path=relative,
                    offset=where.offset,
                    size=where.size,
                    size_bytes=size_bytes,
                    crc32c=crc,
                )
            )
        rate = getattr(optimizer, "learning_rate", None)
        checkpoint = Checkpoint(
            path=path,
            cluster_id="c",
            shard_count=shard_count,
            software_version="0.1.0",
            parameters=(
                CheckpointParameter(
                    spec=spec,
                    version=version,
                    version_max=version,
                    learning_rate=rate,
                    files=tuple(files),
                ),
            ),
        )
        write_manifest(partial, checkpoint)
    return checkpoint


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("shard_count", [1, 3, 200])
def test_what_is_written_is_read(tmp_path: Path, optimizer: Optimizer, shard_count: int) -> None:
    made = write(tmp_path / "c", optimizer, shard_count=shard_count)
    assert shardwell.inspect_checkpoint(tmp_path / "c", verify=True) == made
    (entry,) = made.parameters
    loaded = [load_file(made.path / file.path) for file in entry.files]
    for array_index, name in enumerate(entry.tensor_names):
        whole = np.concatenate([tensors[name] for tensors in loaded])
        np.testing.assert_array_equal(whole, values_of(array_index, entry.size))
    with safe_open(made.path / entry.files[0].path, framework="numpy") as file:
        assert file.metadata() == {"parameter": "model"}
    assert made.size_bytes == sum(path.stat().st_size for path in made.path.glob("*/*"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_every_array_of_state_has_a_name(optimizer: Optimizer) -> None:
    assert len(optimizer.slot_names) == len(UpdateRule(optimizer).initial_slots)


def test_the_manifest_is_json_that_says_everything(tmp_path: Path) -> None:
    write(tmp_path / "c")
    fields = json.loads((tmp_path / "c" / MANIFEST).read_text())
    (entry,) = fields["parameters"]
    assert (fields["format"], fields["format_version"]) == ("shardwell-checkpoint", 3)
    assert (entry["name"], entry["version"], entry["learning_rate"]) == ("model", 7, 0.1)
    assert entry["slots"] == ["momentum_buffer"]
    assert entry["spec"]["optimizer"]["sgd"]["momentum"] == 0.9
    for file in entry["files"]:
        data = (tmp_path / "c" / file["path"]).read_bytes()
        assert (len(data), f"{crc32.iscsi(data):08x}") == (file["bytes"], file["crc32c"])


def test_ranges_may_be_read_from_anywhere(tmp_path: Path) -> None:
    made = write(tmp_path / "c", shard_count=1)
    (entry,) = made.parameters
    with opened(made.path, entry, entry.files[0]) as reader:
        np.testing.assert_array_equal(
            reader.read("momentum_buffer", 90, 103), values_of(1, 103)[90:]
        )
        assert reader.read("weights", 5, 5).size == 0


class TestDamage:
    """A file that is not as it was written is refused by name."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "c").path

    def refused(self, path: Path, match: str, *, verify: bool = False) -> None:
        with pytest.raises(StorageError, match=match) as caught:
            shardwell.inspect_checkpoint(path, verify=verify)
        assert str(path) in caught.value.message

    @pytest.mark.parametrize("size_bytes", [0, 7, 100, 300])
    def test_a_file_that_was_cut_off(self, path: Path, size_bytes: int) -> None:
        file = path / slice_path(1, "model", 1)
        file.write_bytes(file.read_bytes()[:size_bytes])
        self.refused(path, rf"slice-00001.* has {size_bytes} bytes; expected")

    def test_a_file_that_is_too_long(self, path: Path) -> None:
        with (path / slice_path(1, "model", 0)).open("ab") as file:
            file.write(b"\0")
        self.refused(path, "slice-00000.* expected")

    @pytest.mark.parametrize("position", [0, 9, 60, -1, -200])
    def test_a_bit_that_flipped(self, path: Path, position: int) -> None:
        file = path / slice_path(1, "model", 1)
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)
        self.refused(path, "slice-00001", verify=True)

    def test_a_file_that_is_missing(self, path: Path) -> None:
        (path / slice_path(1, "model", 1)).unlink()
        self.refused(path, "slice-00001.*No such file")

    def test_two_files_that_changed_places(self, path: Path) -> None:
        first, second = (path / slice_path(1, "model", index) for index in (0, 1))
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
        self.refused(path, "slice-0000")

    def test_another_version_of_a_file(self, path: Path, tmp_path: Path) -> None:
        other = write(tmp_path / "other", version=8)
        file = path / slice_path(1, "model", 0)
        with file.open("r+b") as opened:
            opened.seek(-4, 2)
            opened.write(b"\0\0\0\0")
        assert file.stat().st_size == (other.path / slice_path(1, "model", 0)).stat().st_size
        shardwell.inspect_checkpoint(path)
        self.refused(path, "was damaged: CRC32C", verify=True)

    def test_a_directory_in_place_of_a_file(self, path: Path) -> None:
        file = path / slice_path(1, "model", 1)
        file.unlink()
        file.mkdir()
        self.refused(path, "slice-00001.* expected a file")

    def test_no_manifest(self, path: Path, tmp_path: Path) -> None:
        (path / MANIFEST).unlink()
        self.refused(path, "manifest.json.*No such file")
        self.refused(tmp_path / "nowhere", "No such file")

    def test_any_bit_of_the_manifest(self, path: Path) -> None:
        manifest = path / MANIFEST
        data = manifest.read_bytes()
        for position in range(0, len(data), 3):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 7
            manifest.write_bytes(changed)
            with pytest.raises(StorageError, match=r"manifest\.json"):
                shardwell.inspect_checkpoint(path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "[" * 10**5, "\0"])
    def test_what_is_no_manifest(self, path: Path, text: str) -> None:
        (path / MANIFEST).write_text(text)
        self.refused(path, "is no manifest of a checkpoint")

    def test_a_later_format(self, path: Path) -> None:
        change_manifest(path, lambda fields: fields.update(format_version=4))
        self.refused(
            path, "has format 4, written by shardwell .* reads format 1 to 3: run the version"
        )


def _first(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["parameters"][0]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path upwards": lambda f: _first(f)["files"][0].update(path="../c/secret"),
    "an absolute path": lambda f: _first(f)["files"][0].update(path="/etc/passwd"),
    "a hidden file": lambda f: _first(f)["files"][0].update(path=".secret"),
    "an empty part": lambda f: _first(f)["files"][0].update(path="000001-model//x"),
    "a NUL": lambda f: _first(f)["files"][0].update(path="a\0b"),
    "no path": lambda f: _first(f)["files"][0].update(path=""),
    "a path that is none": lambda f: _first(f)["files"][0].update(path=["a"]),
    "a name upwards": lambda f: (_first(f).update(name=".."), _first(f)["spec"].update(name="..")),
    "another name": lambda f: _first(f).update(name="other"),
    "a gap": lambda f: _first(f)["files"].pop(0),
    "an end too early": lambda f: _first(f)["files"].pop(),
    "an overlap": lambda f: _first(f)["files"].append(_first(f)["files"][0]),
    "files in another order": lambda f: _first(f)["files"].reverse(),
    "no files": lambda f: _first(f).update(files=[]),
    "a negative size": lambda f: _first(f)["files"][0].update(size=-1),
    "a size that is text": lambda f: _first(f)["files"][0].update(size="52"),
    "a size that is true": lambda f: _first(f)["files"][0].update(size=True),
    "an offset beyond everything": lambda f: _first(f)["files"][1].update(offset=2**80),
    "another size of the parameter": lambda f: _first(f)["spec"].update(size="104"),
    "a CRC that is none": lambda f: _first(f)["files"][0].update(crc32c="xyz"),
    "no version": lambda f: _first(f).pop("version"),
    "a version below 0": lambda f: _first(f).update(version=-1),
    "a version beyond everything": lambda f: _first(f).update(version=2**63, version_max=2**63),
    "two versions in synchronous mode": lambda f: _first(f).update(version_max=8),
    "an infinite rate": lambda f: _first(f).update(learning_rate=float("inf")),
    "a rate that is text": lambda f: _first(f).update(learning_rate="0.1"),
    "no rate": lambda f: _first(f).update(learning_rate=None),
    "other slots": lambda f: _first(f).update(slots=["exp_avg"]),
    "no optimizer": lambda f: _first(f)["spec"].pop("optimizer"),
    "another optimizer": lambda f: _first(f)["spec"].update(optimizer={"adam_w": {}}),
    "an unknown optimizer": lambda f: _first(f)["spec"].update(optimizer={"lion": {}}),
    "an unknown codec": lambda f: _first(f)["spec"].update(codec="CODEC_INT8"),
    "a spec that is none": lambda f: _first(f).update(spec=7),
    "a parameter that is none": lambda f: f.update(parameters=[7]),
    "a parameter twice": lambda f: f["parameters"].append(_first(f)),
    "parameters that are none": lambda f: f.update(parameters={}),
    "no shards": lambda f: f.update(shard_count=0),
    "a cluster id with a path": lambda f: f.update(cluster_id="../x"),
    "no software version": lambda f: f.pop("shardwell_version"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_makes_no_sense(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path = write(tmp_path / "c").path
    (tmp_path / "secret").write_text("x")
    change_manifest(path, change)
    with pytest.raises(StorageError, match=r"manifest\.json can't be used"):
        shardwell.inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("optimizer", "size"), [(OPTIMIZERS[1], 103), (OPTIMIZERS[6], 103), (OPTIMIZERS[2], 104)]
)
def test_tensors_that_are_not_those_of_the_spec(
    tmp_path: Path, optimizer: Optimizer, size: int
) -> None:
    path, other = write(tmp_path / "c", shard_count=1).path, tmp_path / "other"
    write(other, optimizer, size=size, shard_count=1)
    file = slice_path(1, "model", 0)
    shutil.copy(other / file, path / file)
    change_manifest(
        path, lambda f: _first(f)["files"][0].update(bytes=(path / file).stat().st_size)
    )
    with pytest.raises(StorageError, match="has tensors"):
        shardwell.inspect_checkpoint(path)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_files_of_anything_are_refused_in_words(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(data)
    with pytest.raises(StorageError, match="take another copy"):
        TensorsReader(path, slice_tensors(("weights",), 1))


class TestWholeDirectory:
    """It exists when it is complete, and never before."""

    def test_it_appears_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b"
        with whole_directory(path) as partial:
            (partial / "x").write_text("x")
            assert not path.exists()
        assert (path / "x").read_text() == "x"
        assert [entry.name for entry in path.parent.iterdir()] == ["b"]

    @pytest.mark.parametrize("error", [RuntimeError("x"), DeadlineError("x"), OSError(28, "full")])
    def test_an_error_leaves_nothing(self, tmp_path: Path, error: Exception) -> None:
        kind = StorageError if type(error) is OSError else type(error)

        def fill(directory: Path) -> None:
            (directory / "x").mkdir()
            raise error

        with pytest.raises(kind), whole_directory(tmp_path / "b") as partial:
            fill(partial)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
    def test_a_directory_that_exists_is_refused(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "b"
        if kind == "directory":
            path.mkdir()
        elif kind == "file":
            path.write_text("x")
        else:
            path.symlink_to("nowhere")
        with pytest.raises(ArgumentError, match="exists already"), whole_directory(path):
            raise AssertionError
        assert [entry.name for entry in tmp_path.iterdir()] == ["b"]

    def test_of_two_writers_at_once_one_wins(self, tmp_path: Path) -> None:
        with whole_directory(tmp_path / "b") as partial:
            (partial / "x").write_text("x")
            with (
                pytest.raises(ArgumentError, match="being written by another"),
                whole_directory(tmp_path / "b"),
            ):
                raise AssertionError
        assert (tmp_path / "b" / "x").exists()

    def test_one_that_appears_meanwhile_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "b"
        with pytest.raises(ArgumentError, match="exists already"), whole_directory(path):
            (path / "theirs").mkdir(parents=True)
        assert [entry.name for entry in path.iterdir()] == ["theirs"]

    def test_leftovers_are_removed(self, tmp_path: Path) -> None:
        left = tmp_path / "b.partial"
        (left / "deep").mkdir(parents=True)
        (left / "file").touch()
        (left / MARK_NAME).touch()
        (left / "link").symlink_to(tmp_path)
        with whole_directory(tmp_path / "b") as partial:
            assert [entry.name for entry in partial.iterdir()] == [MARK_NAME]
        assert tmp_path.is_dir()
        assert list((tmp_path / "b").iterdir()) == []

    def test_an_empty_leftover_is_taken(self, tmp_path: Path) -> None:
        """As a kill leaves it before the mark is in it."""
        (tmp_path / "b.partial").mkdir()
        with whole_directory(tmp_path / "b"):
            pass
        assert [entry.name for entry in tmp_path.iterdir()] == ["b"]

    def test_the_users_directory_of_that_name_stays(self, tmp_path: Path) -> None:
        theirs = tmp_path / "b.partial"
        theirs.mkdir()
        (theirs / "notes.txt").write_text("mine")
        with (
            pytest.raises(StorageError, match=rf"{theirs} has 'notes.txt'.*move it away"),
            whole_directory(tmp_path / "b"),
        ):
            raise AssertionError
        assert [entry.name for entry in tmp_path.rglob("*")] == ["b.partial", "notes.txt"]
        assert (theirs / "notes.txt").read_text() == "mine"

    def test_the_users_file_of_that_name_stays(self, tmp_path: Path) -> None:
        theirs = tmp_path / "b.partial"
        theirs.write_text("mine")
        with (
            pytest.raises(StorageError, match=rf"{theirs} is in the way"),
            whole_directory(tmp_path / "b"),
        ):
            raise AssertionError
        assert theirs.read_text() == "mine"

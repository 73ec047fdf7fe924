"""What the formats of files and messages are now: digests of bytes, and names of fields.

    PYTHONPATH=tests .venv/bin/python -m harness.formats     writes them down, with their numbers

tests/unit/test_formats.py compares them with tests/data/releases/formats.json.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from harness.stories.killed import STORIES, AccumulatorStory, ParameterStory, TableStory
from shardwell import v1
from shardwell.specs import formats

RELEASES = Path(__file__).parents[1] / "data/releases"
RECORD = RELEASES / "formats.json"
_FLOATING = ("boot.json", "shard.json")
"""Files whose bytes differ from machine to machine, or version to version; fields are compared."""


def make() -> ModuleType:
    """The program that writes what is kept of a release."""
    found = importlib.util.spec_from_file_location("make", RELEASES / "make.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def current() -> dict[str, Any]:
    """By kind: the number, and what it means."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        train = make()
        train.train(root / "live", [*train.parameters(), *train.tables()], "process", {})
        files = sorted((root / "live").rglob("*"))
        manifest = json.loads((root / "checkpoint/manifest.json").read_text())
        lines = (root / "contributions-process/shard-0.jsonl").read_text().splitlines()
        directory = {
            **_told(root / "told"),
            **{name: _json_fields(files, name) for name in ("shard", "parameter", "table")},
            "events": _event_fields(path for path in files if path.name == "events"),
            "names": _event_fields(path for path in files if path.name == "names"),
        }
        return {
            "directory": {"number": formats.DIRECTORY.newest, "is": directory},
            "checkpoint": {
                "number": formats.CHECKPOINT.newest,
                "is": {"manifest": sorted(set(_paths(manifest)))},
            },
            "sums": {"number": formats.SUMS.newest, "is": _accumulated(root / "sums")},
            "wire": {"number": formats.WIRE, "is": _messages()},
            "contributions": {
                "number": formats.CONTRIBUTIONS.newest,
                "is": {"line": sorted({key for each in lines for key in json.loads(each)})},
            },
        }


def _messages() -> dict[str, str]:
    """A digest of each .proto file without its comments."""
    found = {}
    for path in sorted(Path(v1.__file__).parent.glob("*_pb2.py")):
        descriptor = importlib.import_module(f"shardwell.v1.{path.stem}").DESCRIPTOR
        digest = hashlib.sha256(descriptor.serialized_pb).hexdigest()[:16]
        found[path.stem.removesuffix("_pb2")] = digest
    return found


def _told(root: Path) -> dict[str, str]:
    """Digests of the files that stories write, with journals, by file."""
    found = {}
    for story in (ParameterStory("step"), TableStory("step")):
        path = root / story.directory
        path.mkdir(parents=True)
        with _drawn():
            story.tell(path, lambda: None, lambda point: None)
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name not in _FLOATING:
                name = str(file.relative_to(path))
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return found


def _accumulated(path: Path) -> dict[str, str]:
    path.mkdir()
    with _drawn():
        story = STORIES["accumulator"]
        assert isinstance(story, AccumulatorStory)
        story.tell(path, lambda: None, lambda point: None)
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted(path.iterdir())
    }


def _drawn() -> Any:
    """While it lasts, what is drawn at random is the same each time."""
    numbers = itertools.count(1)
    return mock.patch.object(secrets, "randbits", side_effect=lambda _: next(numbers))


def _json_fields(files: list[Path], name: str) -> list[str]:
    found: set[str] = set()
    for path in files:
        if path.name == f"{name}.json":
            text = path.read_text()
            found.update(_paths(json.loads(text[: text.rindex("}") + 1])))
    return sorted(found)


def _event_fields(paths: Iterator[Path]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for path in paths:
        for line in path.read_bytes().rstrip(b"\0").splitlines()[1:]:
            event = json.loads(line[9:])
            found.setdefault(event["kind"], set()).update(_paths(event))
    return {kind: sorted(fields) for kind, fields in sorted(found.items())}


def _paths(value: Any, at: str = "") -> Iterator[str]:
    """The names of all fields, each with those that it is in."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from _paths(inner, f"{at}[]")
    else:
        yield at


if __name__ == "__main__":
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for kind, found in current().items():
        kept[kind] = {"released": kept.get(kind, {}).get("released", 0), **found}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")

"""Goal: everything that says the version says the same one, and the changelog has it.

Method: each file's own words for it, against pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import shardwell

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_package_says_its_version() -> None:
    assert shardwell.__version__ == VERSION


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("deploy/Dockerfile", r"^ARG VERSION=(.*)$"),
        ("deploy/helm/shardwell/Chart.yaml", r"^version: (.*)$"),
        ("deploy/helm/shardwell/Chart.yaml", r"^appVersion: (.*)$"),
        ("deploy/helm/shardwell/README.md", r"REGISTRY/shardwell:(\S+)"),
        ("examples/kubernetes/worker-job.yaml", r"shardwell-demo:(\S+)"),
    ],
)
def test_a_file_says_the_version(file: str, pattern: str) -> None:
    found = re.findall(pattern, (ROOT / file).read_text(), re.M)
    assert found
    assert {*found} == {VERSION}


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    releases = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0][0] == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", releases[0][1])

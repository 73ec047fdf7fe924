"""Goal: a URL is never taken for a local name, and `~` is the user's home."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell.errors import ArgumentError
from shardwell.process.local_paths import local_path


@pytest.mark.parametrize(
    ("given", "scheme", "advice"),
    [
        ("s3://bucket/run/{step}", "s3", "mount the store as a directory"),
        (Path("s3://bucket/run"), "s3", "mount the store as a directory"),
        ("gs://b", "gs", "mount the store as a directory"),
        ("HTTPS://host/a", "https", "mount the store as a directory"),
        ("abfss://c@a.dfs.core.windows.net/x", "abfss", "mount the store as a directory"),
        ("file:///data/ckpt", "file", "give '/data/ckpt'"),
        ("file:/data/ckpt", "file", "give '/data/ckpt'"),
        (Path("file:///data/ckpt"), "file", "give '/data/ckpt'"),
    ],
)
def test_urls_are_no_local_paths(given, scheme, advice) -> None:
    with pytest.raises(ArgumentError, match=f"is a URL of '{scheme}'; expected a local path: "):
        local_path(given)
    with pytest.raises(ArgumentError, match=advice):
        local_path(given)


@pytest.mark.parametrize(
    "given",
    [
        "ckpt/{step}",
        "/a//b",
        "/here/s3:/bucket",
        "a:b",
        "x/s3://b",
        "c:/windows",
        "s3:",
        "/here/~",
        "a~/b",
    ],
)
def test_local_names(given) -> None:
    assert local_path(given) == local_path(Path(given)) == Path(given)


def test_paths_in_home_directories_are_expanded(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    assert local_path("~/ckpt/{step}") == Path("/homes/me/ckpt/{step}")
    assert local_path(Path("~")) == Path("/homes/me")
    with pytest.raises(ArgumentError, match="'~nobody-here/a' has no home directory"):
        local_path("~nobody-here/a")

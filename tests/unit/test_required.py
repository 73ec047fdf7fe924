"""Goal: a test that lacks a program is skipped, and fails where SHARDWELL_TEST_REQUIRE names it.
One that lacks a package is run by `make test-extras`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import required


@pytest.mark.parametrize("value", ["", "slurm", "slurm,promtool-2"])
def test_it_is_skipped_with_the_command_that_installs_it(monkeypatch, value) -> None:
    monkeypatch.setenv(required.VARIABLE, value)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match="apt-get install -y prometheus"):
        required.program("promtool")


@pytest.mark.parametrize("value", ["promtool", "slurm, promtool"])
def test_it_fails_where_it_is_required(monkeypatch, value) -> None:
    monkeypatch.setenv(required.VARIABLE, value)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match="install it: apt-get install -y prometheus"):
        required.program("promtool")
    with pytest.raises(pytest.skip.Exception, match="chromium"):
        required.program("chromium")


def test_what_is_here_is_found(monkeypatch) -> None:
    monkeypatch.setenv(required.VARIABLE, "chromium")
    monkeypatch.setattr(required.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert required.program("chromium") == "/usr/bin/chromium"


INSTALLED = {"hatchling", "pyarrow", "pykeen", "sklearn"}
"""Packages of which some tests ask whether they are here, and which `make test` installs."""
SUITES = {"helm_python", "kubernetes_validate", "ray"}
"""Those of `make test-helm` and `make test-ray`."""


def test_tests_that_need_more_packages_have_their_mark() -> None:
    tests = Path(__file__).parents[1]
    for path in tests.rglob("test_*.py"):
        text = path.read_text()
        asked = re.findall(r'(?:importorskip|find_spec)\(\s*"(\w+)', text)
        if {*asked} - INSTALLED - SUITES and not {"torch", "jax"} & {*path.parts}:
            assert "pytest.mark.extras" in text, (path, asked)

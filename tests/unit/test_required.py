"""Goal: a test that lacks a program is skipped, and fails where SHARDWELL_TEST_REQUIRE names it."""

from __future__ import annotations

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

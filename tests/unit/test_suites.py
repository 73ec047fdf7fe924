"""Goal: CI runs a suite that takes long when, and only when, a file that it is about has changed.

Method: a repository of two files, of which one belongs to the suite.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import required

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import suites

    monkeypatch.setattr(suites, "FILES", {"slow": ("its",), "other": ("others",)})
    return suites


@pytest.fixture
def root(tmp_path: Path) -> Path:
    subprocess.run([required.program("git"), "init", "-q", str(tmp_path)], check=True)
    for name in ("its/one.py", "others/two.py", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("first")
    return tmp_path


def test_a_suite_that_passed_is_left_out_until_its_files_change(suites, root: Path) -> None:
    assert suites.changed(root) == ["slow", "other"]
    suites.note(root, "slow")
    assert suites.changed(root) == ["other"]
    suites.note(root, "other")
    assert suites.changed(root) == []
    (root / "its/one.py").write_text("second")
    assert suites.changed(root) == ["slow"]
    (root / "its/one.py").write_text("first")
    assert suites.changed(root) == []
    (root / "its/one.py").rename(root / "its/three.py")
    assert suites.changed(root) == ["slow"]


def test_every_suite_has_files_and_a_target() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import suites
    finally:
        sys.path.remove(str(ROOT / "tools"))
    makefile = (ROOT / "Makefile").read_text()
    for suite, paths in suites.FILES.items():
        assert f"\ntest-{suite}:" in makefile
        for path in paths:
            assert (ROOT / path).exists(), (suite, path)
    assert set(suites.passed(ROOT)) <= set(suites.FILES)

"""Goal: the images' locks are what pyproject.toml asks for, and anything else is reported.

Method: the repository's own files as they are, and with one defect each.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import lock

    return lock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def replace(path: Path, pattern: str, by: str) -> None:
    changed, count = re.subn(pattern, by, path.read_text(), count=1, flags=re.S | re.M)
    assert count == 1
    path.write_text(changed)


def test_what_is_committed_is_current(lock) -> None:
    assert lock.problems(ROOT) == []


IMAGE, DEMO, BUILD = "requirements.txt", "requirements-demo.txt", "requirements-build.txt"
LEFT_OUT = r"^{}==.*?\n(?=[a-z]|\Z)"


@pytest.mark.parametrize(
    ("name", "pattern", "by", "message"),
    [
        (IMAGE, LEFT_OUT.format("click"), "", "click.* is locked nowhere"),
        (DEMO, LEFT_OUT.format("click"), "", "click.* is locked nowhere"),
        (DEMO, LEFT_OUT.format("scikit-learn"), "", "scikit-learn.* is locked nowhere"),
        (DEMO, LEFT_OUT.format("mdurl"), "", "mdurl==.* of deploy/requirements.txt differs"),
        (DEMO, r"(?<=^mdurl==)\S+", "0.0.1", "mdurl==.* of deploy/requirements.txt differs"),
        (DEMO, r"(?<=^mdurl==)(.*?sha256:)[0-9a-f]{4}", r"\g<1>0000", "mdurl==.* differs there"),
        (BUILD, LEFT_OUT.format("hatchling"), "", "hatchling.* is locked nowhere"),
        (BUILD, LEFT_OUT.format("ziglang"), "", "ziglang.* is locked nowhere"),
        (IMAGE, r"^click==\d+", "click==0", "click.* is locked at 0"),
        (IMAGE, r"(?<=^click==)\S+", r'\g<0> ; python_version < "3"', "click.* is locked nowhere"),
        (IMAGE, r"^mdurl==", "click==", "click.* is locked 2 times"),
        (IMAGE, r"(?<=^mdurl)(==\S+).*?\n(?=[a-z])", r"\1\n", "without SHA-256 hashes: mdurl"),
        (IMAGE, r"sha256:[0-9a-f]{64}", "md5:" + "0" * 32, "without SHA-256 hashes"),
        (IMAGE, r"^click==", "click>=", "not one version of a package: click"),
        (IMAGE, r"^click==\S+", "click==8.*", "not one version of a package: click"),
        (IMAGE, r"^click==\S+", "click @ https://example.org/c.whl", "not one version"),
        (IMAGE, r"\A", "--index-url https://example.org\n", "not a requirement: --index-url"),
        (IMAGE, r"\A", "# https://example.org\n", "names an address"),
    ],
)
def test_a_lock_that_lacks_something_is_reported(lock, root, name, pattern, by, message) -> None:
    replace(root / "deploy" / name, pattern, by)
    found = lock.problems(root)
    own = [each for each in found if each.startswith(f"deploy/{name}: ")]
    assert any(re.search(message, each) for each in own), found
    # An entry that is wrong in the image's lock differs in the demo's.
    assert all(each.endswith("differs there") for each in found if each not in own)


def test_a_new_dependency_is_missing_in_the_lock(lock, root) -> None:
    replace(root / "pyproject.toml", r"^dependencies = \[", '\\g<0>\n  "pytest>=1",')
    assert lock.problems(root) == [
        f"deploy/{name}: pytest>=1 is locked nowhere" for name in (IMAGE, DEMO)
    ]


def test_a_missing_lock_is_reported(lock, root) -> None:
    (root / "deploy/requirements.txt").unlink()
    (problem,) = lock.problems(root)
    assert problem.startswith("deploy/requirements.txt: ")


def test_a_dependency_of_another_system_is_not_asked_for(lock, root) -> None:
    by = '  "click>=8.1",\n  "colorama>=1; sys_platform == \'win32\'",'
    replace(root / "pyproject.toml", r'^  "click>=8\.1",', by)
    assert lock.problems(root) == []

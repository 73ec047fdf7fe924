"""Goal: each known defect can be put into the code as it is, and names tests that there are."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["what"])
def test_it_fits_the_code(mutant: dict[str, object]) -> None:
    code = (ROOT / str(mutant["file"])).read_text()
    assert code.count(str(mutant["old"])) == 1
    assert mutant["old"] != mutant["new"]
    if str(mutant["file"]).endswith(".py"):  # else any test would tell
        compile(code.replace(str(mutant["old"]), str(mutant["new"])), str(mutant["file"]), "exec")
    tests = mutant["tests"]
    assert isinstance(tests, list)
    assert tests
    for test in tests:
        assert (ROOT / test.split("::")[0]).exists()


def test_contributing_has_their_number() -> None:
    assert f"puts {len(MUTANTS)} known defects" in (ROOT / "CONTRIBUTING.md").read_text()

"""Goal: the SBOM of each image has each locked package, with its version and hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.extras
@pytest.mark.parametrize("name", ["IMAGE_LOCK", "DEMO_LOCK"])
def test_the_sbom_has_each_locked_package(monkeypatch, tmp_path, name) -> None:
    pytest.importorskip("cyclonedx_py")
    monkeypatch.syspath_prepend(ROOT / "tools")
    import lock

    locked = ROOT / getattr(lock, name)
    made = tmp_path / "sbom.json"
    # As in the Makefile; the tool compares it with CycloneDX's schema.
    command = [sys.executable, "-W", "ignore::UserWarning", "-m", "cyclonedx_py", "requirements",
               "--output-file", str(made), str(locked)]  # fmt: skip
    subprocess.run(command, check=True)
    components = {
        each["purl"]: {
            one["content"] for place in each["externalReferences"] for one in place["hashes"]
        }
        for each in json.loads(made.read_text())["components"]
    }
    assert components == {
        f"pkg:pypi/{pin.name}@{pin.version}": {each.removeprefix("sha256:") for each in pin.hashes}
        for pin in lock.read(locked)
    }

"""Goal: a process that is killed at any step of removing or making a checkpoint leaves nothing that
the next one can't remove, and nothing of the user's is touched.

Method: a child process ends itself instead of its n-th call that changes a name; then the same is
done again by one that lives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwell
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.steps import StepPaths

CHILD = """
import os, sys
from pathlib import Path
from shardwell.checkpoint.directory import whole_directory
from shardwell.checkpoint.steps import StepPaths

left = int(sys.argv[3])

def dying(call):
    def made(*args, **kwargs):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return call(*args, **kwargs)
    return made

for name in ("unlink", "rmdir", "rename", "mkdir", "open"):
    setattr(os, name, dying(getattr(os, name)))
path = Path(sys.argv[2])
if sys.argv[1] == "prune":
    StepPaths(path / "{step}").prune(1, 2)
else:
    with whole_directory(path / "made") as partial:
        os.mkdir(partial / "deep")
"""


@pytest.fixture
def saved(cluster, connect, tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2, beside a directory of the user's."""
    client = connect(cluster(2), "w0")
    model = client.parameter("model", size=40, optimizer=shardwell.SGD(learning_rate=1.0))
    model.init(np.zeros(40, np.float32))
    for _ in range(2):
        model.exchange(np.ones(40, np.float32))
        client.save_checkpoint(tmp_path / "saved" / "{step}")
    (tmp_path / "saved" / "notes").mkdir()
    return tmp_path / "saved"


def killed(what: str, path: Path, after: int) -> bool:
    """Whether a child was killed before it had done it."""
    command = [sys.executable, "-c", CHILD, what, str(path), str(after)]
    code = subprocess.run(command, timeout=60, check=False).returncode
    assert code in (0, 9)
    return code == 9


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.timeout(180)
def test_a_removal_is_finished_wherever_it_was_killed(saved, tmp_path) -> None:
    left: set[tuple[str, ...]] = set()
    for after in range(100):
        path = tmp_path / str(after)
        shutil.copytree(saved, path)
        was_killed = killed("prune", path, after)
        left.add(tuple(names(path)))
        StepPaths(path / "{step}").prune(1, 2)
        assert names(path) == ["2", "notes"], after
        if not was_killed:
            break
    assert after > 5
    assert ("1.removed", "2", "notes") in left


@pytest.mark.timeout(180)
def test_a_making_is_taken_over_wherever_it_was_killed(tmp_path) -> None:
    left: set[tuple[str, ...]] = set()
    for after in range(100):
        path = tmp_path / str(after)
        path.mkdir()
        was_killed = killed("make", path, after)
        left.add(tuple(names(path)))
        if names(path) != ["made"]:
            with whole_directory(path / "made"):
                pass
        assert names(path) == ["made"], after
        if not was_killed:
            break
    assert after > 5
    assert {("made.partial",), ("made",)} <= left

"""Goal: a save or export that was killed leaves nothing that stays: the next one takes it over.

Method: a worker that is behind holds the command after it has begun to write; then a signal ends
it, and the same command is run again. Also two of them at the same time.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwell
from harness.polling import eventually
from harness.programs.commands import Program, run_command
from harness.threads import in_background
from harness.wire_client.table import WireTable
from harness.wire_client.worker import WireWorker

pytestmark = pytest.mark.timeout(90)

SGD = shardwell.SGD(learning_rate=1.0)
IDS = np.arange(40)
ONES = np.ones((40, 3), np.float32)


@pytest.fixture
def held(cluster, connect) -> Iterator[tuple[str, Callable[[], None]]]:
    """A cluster that lets a save begin and wait; its target, and what lets it go on.

    A worker has ended its step on shard 0 alone, so that shard 1 can't reach shard 0's version.
    """
    running = cluster(2)
    client = connect(running, "w0")
    client.parameter("model", size=9, optimizer=SGD).init(np.ones(9))
    table = client.table("rows", row_count=100, dim=3, optimizer=SGD, codec="fp32", worker_count=2)
    table.put_row_gradients(IDS, ONES)
    with WireWorker(running.target, "late") as worker:
        late = WireTable(worker, table.spec.to_proto())
        list(late.stream(0, late.parts([], [])))
        yield running.target, lambda: list(late.stream(1, late.parts([], [])))


def _has_begun(path: Path) -> Callable[[], bool]:
    return lambda: bool(list(path.glob("*.partial/*")))


COMMANDS = {
    "save": ("checkpoint", "save", "made"),
    "export": ("table", "export", "rows", "made.safetensors"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_next_one_takes_over(held, tmp_path, command, ending) -> None:
    target, go_on = held
    *words, name = COMMANDS[command]
    arguments = [*words, str(tmp_path / name), "--shards", target]
    with Program("-m", "shardwell_server", *arguments) as program:
        eventually("it has begun", _has_begun(tmp_path), timeout_s=60)
        program.send(ending)
        program.end()
    left = [path.name for path in tmp_path.iterdir()]
    assert left in ([f"{name}.partial"], [])  # one name, if any
    go_on()
    code, _, log = run_command(*arguments)
    assert (code, log) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if command == "export":
        np.testing.assert_array_equal(load_file(tmp_path / name)["ids"], IDS)
    else:
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {"000001-model", "000002-rows", "manifest.json"}


@pytest.mark.parametrize("command", COMMANDS)
def test_two_saves_at_once_leave_one_whole(held, connect, tmp_path, command) -> None:
    """The second is refused, and the first one's files stay."""
    target, go_on = held
    client = connect(target, "saver", timeout_s=60.0)
    path = tmp_path / COMMANDS[command][-1]

    def make() -> object:
        if command == "save":
            return client.save_checkpoint(path)
        return client.export_table("rows", path)

    first = in_background(make)
    eventually("it has begun", _has_begun(tmp_path), timeout_s=60)
    for _ in range(2):
        with pytest.raises(shardwell.ArgumentError, match="is being written by another process"):
            make()
    go_on()
    first.result(60)
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_takes_over_does_not_follow_a_link(cluster, connect, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("mine")
    (tmp_path / "made.partial").symlink_to(other)
    with pytest.raises(shardwell.StorageError, match="in the way of making it"):
        connect(cluster(1), "saver").save_checkpoint(tmp_path / "made")
    assert (other / "precious").read_text() == "mine"

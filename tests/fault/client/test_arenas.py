"""Goal: memory that a worker and a shard share is gone with either of them, however it ends.

Method: real processes, killed and stopped while a step is under way; the kernel's list of what a
process has mapped. That nothing is lost meanwhile, test_kill_nine.py shows: its large chunks are
shared.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.inside import idle_sets
from harness.oracles.parameter import integer_gradient
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import TRAINING_WORKER, Program, ServingShard
from harness.threads import in_background
from shardwell.process.shared_memory import IS_SUPPORTED

pytestmark = [
    pytest.mark.same_host,
    pytest.mark.skipif(not IS_SUPPORTED, reason="no memory can be sealed on this system"),
]
SIZE = 400_000
"""One chunk of 800 kB."""
LAST_STEP = 2


def mapped_count(pid: int) -> int:
    """Pieces of shared memory that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:shardwell")


def worker(address: str, index: int) -> Program:
    return Program(TRAINING_WORKER, address, str(index), "2", str(SIZE), str(LAST_STEP))


def expected() -> np.ndarray:
    means = [(integer_gradient(0, n, SIZE) + integer_gradient(1, n, SIZE)) / 2 for n in range(3)]
    return -0.5 * np.sum(means, axis=0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_that_ends_in_a_step_leaves_nothing(how: signal.Signals) -> None:
    with ServingShard() as shard:
        address = shard.address()
        with worker(address, 0) as first:
            eventually("it has offered its memory", lambda: mapped_count(shard.pid) == 1)
            assert mapped_count(first.pid) == 1
            first.process.send_signal(how)
            first.process.wait(PATIENCE_S)
        eventually("the shard has let go of it", lambda: mapped_count(shard.pid) == 0)
        with worker(address, 0) as again, worker(address, 1) as other:
            assert (again.end(), other.end()) == (0, 0)
        with shardwell.connect(address, worker_id="reader") as client:
            weights = client.parameter("model").get_weights()
        np.testing.assert_array_equal(weights, expected())


def test_a_shard_that_is_killed_in_a_step(tmp_path: Path) -> None:
    with ServingShard(f"--data-dir={tmp_path / 'shard'}") as shard:
        address = shard.address()
        port = int(address.rpartition(":")[2])
        with worker(address, 0) as first:
            eventually("it has offered its memory", lambda: mapped_count(shard.pid) == 1)
            shard.process.kill()
            shard.process.wait(PATIENCE_S)
            eventually("the worker has let go of it", lambda: mapped_count(first.pid) == 0)
            with ServingShard(f"--data-dir={tmp_path / 'shard'}", port=port) as back:
                assert back.address() == address
                eventually("it has offered other memory", lambda: mapped_count(back.pid) == 1)
                with worker(address, 1) as other:
                    assert (first.end(), other.end()) == (0, 0)
                with shardwell.connect(address, worker_id="reader") as client:
                    weights = client.parameter("model").get_weights()
                np.testing.assert_array_equal(weights, expected())


def test_a_shard_that_stops_while_memory_is_offered(connect) -> None:
    """The offer is given up, and what goes over the network is answered when it goes on."""
    with ServingShard() as shard:
        client = connect(shard.address(), "w0")
        net = client.parameter("net", size=SIZE, optimizer=shardwell.SGD(1.0))
        net.init(np.zeros(SIZE, np.float32))
        net.put_gradient(np.ones(SIZE, np.float32))  # which takes its seat
        for streams in list(idle_sets(client)):
            streams.close()  # the step offers memory of its own
        eventually("none is there", lambda: mapped_count(shard.pid) == 0)
        shard.process.send_signal(signal.SIGSTOP)
        step = in_background(lambda: net.exchange(np.ones(SIZE, np.float32)))
        with pytest.raises(TimeoutError):
            step.result(3.0)
        shard.process.send_signal(signal.SIGCONT)
        assert step.result(PATIENCE_S)[0] == -2
        eventually("nothing is kept", lambda: mapped_count(shard.pid) == 0)

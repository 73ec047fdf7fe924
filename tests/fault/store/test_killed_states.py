"""Goal: whatever write of its log of states a shard is killed at, a program goes on with its own.

Method: a shard's process kills itself after a write of that log, and the program ends with it.
Another shard goes on with its files, and another process of the program with its objects: these
count its steps, and weights count the visits of samples.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import numpy as np

import shardwell
from harness.inside import vanish
from harness.polling import PATIENCE_S, readable
from harness.programs import killed_shard
from harness.programs.forkserver import ForkedCalls
from harness.programs.ports import free_port
from harness.threads import in_background

LENGTH = 24
SAMPLES = shardwell.Samples(LENGTH, 4, seed=5)
STEP_COUNT = 6
POLL_S = 0.02
WRITE_COUNT_MIN = 12


def work(client: shardwell.Client) -> dict[str, int]:
    """Trains to the end, and returns what it counts."""
    net = client.parameter(
        "visits", size=LENGTH, optimizer=shardwell.SGD(lr=1.0), codec="fp32", worker_count=1
    )
    net.init(np.zeros(LENGTH))
    progress = {"steps": 0}
    net.keep_state({"progress": progress})
    for batch in net.batches(SAMPLES, epochs=1):
        assert progress["steps"] == net.next_step
        gradient = np.zeros(LENGTH, np.float32)
        gradient[batch.indices] = -1.0
        net.exchange(gradient, batch=batch)
        progress["steps"] += 1
    net.end_state()
    assert net.get_weights().tolist() == [1.0] * LENGTH
    return progress


def test_states_are_of_their_step_whatever_write_a_shard_is_killed_at(
    tmp_path: Path,
) -> None:
    number, was_killed = 0, True
    with ForkedCalls() as forked:
        while was_killed:
            number += 1
            address = f"127.0.0.1:{free_port()}"
            flags = (
                "--shard-count=1",
                "--shard-index=0",
                f"--listen={address}",
                f"--data-dir={tmp_path / str(number)}",
                "--session-lease-s=1",
            )
            shard = forked.start(killed_shard.serve_with_log, "states", number, *flags)
            client = shardwell.connect(address, worker_id="w0", timeout_s=PATIENCE_S)
            first = in_background(lambda client=client: work(client))
            while not (was_killed := readable([shard], POLL_S) and shard.read_lines() is None):
                if first.done():
                    break
            if not was_killed:
                assert first.result(0)["steps"] == STEP_COUNT
                client.close()
            else:
                vanish(client)
                assert shard.kill() == -signal.SIGKILL
                with contextlib.suppress(shardwell.ShardwellError):
                    first.result(PATIENCE_S)
                shard = forked.start(killed_shard.serve, 0, *flags)
                with shardwell.connect(address, worker_id="w0", timeout_s=PATIENCE_S) as again:
                    found = work(again)
                assert found["steps"] == STEP_COUNT, number
            shard.kill()
    assert number > WRITE_COUNT_MIN

"""A shard's process ends when one of its threads does, instead of answering no call."""

from __future__ import annotations

import json

from harness.programs.commands import Program

DYING = """
import threading
from shardwell_server.processes.own import end_when_a_thread_dies
from shardwell_server.logs import configure_logs

configure_logs(log_format="json")
end_when_a_thread_dies()

def die():
    raise MemoryError

threading.Thread(target=die, name="serving").start()
threading.Event().wait()  # as a shard does, for its signals
"""


def test_a_dead_thread_ends_the_process_and_is_logged() -> None:
    with Program("-c", DYING) as program:
        assert program.end() == 70
        (line,) = program.log
    logged = json.loads(line)
    assert logged["level"] == "critical"
    assert logged["thread_name"] == "serving"
    assert "MemoryError" in logged["exception"]

"""Goal: the functions that a call enters are counted, on both sides, and no others.

Method: the tool as `make lint` runs it, beside what is known of an exchange and a row gradient; the
look at files, which a thread of the shard takes twice a second, is none of either.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OF_AN_EXCHANGE = {
    ("shardwell.parameter.parameter", "Parameter.exchange"),
    ("shardwell_server.shard.step_tracker", "StepTracker.decide"),
    ("shardwell_server.shard.parameter.averaging", "close_step"),
}
OF_ROWS = {
    ("shardwell.table.table", "Table.put_row_gradients"),
    ("shardwell_server.shard.table.step_tracker", "TableStepTracker.decide"),
}
OF_NEITHER = {
    ("shardwell_server.shard.shard", "Shard.look_at_files"),
    ("shardwell_server.store.files.presence", "Presence.look"),
    ("shardwell.client", "connect"),
}


def test_functions_of_a_call() -> None:
    printed = subprocess.run(
        [sys.executable, ROOT / "tools/count_calls.py", "--json"],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    counted = {
        what: {(module, name) for module, name in functions}
        for what, functions in json.loads(printed).items()
    }
    exchange, rows = counted["exchange"], counted["put_row_gradients"]
    assert exchange >= OF_AN_EXCHANGE
    assert rows >= OF_ROWS
    assert not (exchange | rows) & OF_NEITHER
    assert not exchange & OF_ROWS
    assert not rows & OF_AN_EXCHANGE
    for module, name in exchange | rows:
        assert module.split(".")[0] in ("shardwell", "shardwell_server")
        assert not name.startswith("<")

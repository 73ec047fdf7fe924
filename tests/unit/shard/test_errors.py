"""Goal: what a shard advises, every caller can do.

Method: all of its errors about values, whose texts name nothing of the SDK in Python.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import shardwell
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell_server.shard import errors

SGD = shardwell.SGD(learning_rate=0.5)
NET = ParameterSpec(name="net", size=4, optimizer=SGD, worker_count=1)
ROWS = TableSpec(
    name="rows", row_count=9, dim=2, optimizer=SGD, initializer=shardwell.Zeros(), worker_count=1
)
IDS = np.array([3, 5])


def overflow(too_large: str) -> shardwell.NonFiniteError:
    return errors.state_overflow(
        "parameter 'net'",
        "element 1",
        "gradient of 'w0'",
        "sum",
        too_large=too_large,
        ending="send the step again",
        element_index=1,
        parameter="net",
    )


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.non_finite(NET, 1, "gradient of 'w0'"), "mend it and send it again"),
        (errors.non_finite_row(ROWS, IDS, 3, "gradient of 'w0'"), "mend it and send it again"),
        (overflow("gradient"), "clip gradients, and send the step again"),
        (overflow("weight decay"), "restore a checkpoint and lower the learning rate, and send"),
        (errors.diverged(NET, 1, 7), "restore a checkpoint from before, and lower the learning"),
        (errors.diverged_row(ROWS, IDS, 3, 7), "restore a checkpoint from before, and lower the"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_advised_is_no_argument_or_method(error: Exception, advice: str) -> None:
    assert advice in str(error)
    assert not re.search(r"=|\(\)|allow_non_finite|abandon_step", str(error))

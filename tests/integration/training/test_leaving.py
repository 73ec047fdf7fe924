"""Goal: SIGTERM lets the step under way end, and the others learn that the worker has left.

Method: `shardwell run` starts the ranks of a group, and each prints how it has ended; a member of a
parameter is a process beside the test's own.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import eventually
from harness.programs.commands import Program

RANK = """
import itertools, os
import numpy as np
import shardwell

def gradient(weights, batch):
    return 0.0, np.ones_like(weights)

def report(result):
    if result.step == 5:
        print("trains", flush=True)

with shardwell.join_group() as group:
    trainer = shardwell.DataParallelTrainer(
        gradient, np.zeros(4, np.float32), shardwell.SGD(1e-6), shardwell.GroupSync(group)
    )
    try:
        if {fits}:
            trainer.fit(itertools.repeat(np.zeros((1, 1))), on_step=report)
        while not trainer.is_leaving:
            report(trainer.step_share(np.zeros((1, 1))))
        print("leaves by itself", flush=True)
    except SystemExit as end:
        print("leaves with", end.code, flush=True)
        raise
"""


@pytest.mark.parametrize("fits", [True, False])
def test_the_ranks_of_a_group_leave(tmp_path: Path, fits: bool) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK.replace("{fits}", str(fits)))
    command = ("-m", "shardwell_server", "run", "-n2", "--", sys.executable, str(program))
    with Program(*command) as run:
        assert {run.read_line()[4:], run.read_line()[4:]} == {"trains"}
        run.send(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
        ends = {line[4:] for line in run.lines[2:]}
        assert ends <= {"leaves with 143", "leaves by itself"}, run.log
        assert len(run.lines) == 4
        assert not fits or ends == {"leaves with 143"}


MEMBER = """
import sys
import numpy as np
import shardwell

with shardwell.connect(sys.argv[1], worker_id="leaving") as client:
    net = client.parameter("net")
    with shardwell.LeaveRequest() as request:
        while True:
            net.exchange(np.ones(8, np.float32))
            request.check()
"""


def test_the_other_members_go_on(cluster, connect, tmp_path: Path) -> None:
    program = tmp_path / "member.py"
    program.write_text(MEMBER)
    running = cluster(2)
    net = connect(running, "staying").parameter(
        "net",
        size=8,
        optimizer=shardwell.SGD(learning_rate=0.5),
        members=shardwell.Elastic(min_count=1, max_count=4),
    )
    net.init(np.zeros(8, np.float32))

    def contributors() -> tuple[str, ...]:
        net.exchange(np.ones(8, np.float32))
        assert net.outcome is not None
        return net.outcome.contributors

    with Program(str(program), running.target) as leaving:
        eventually("it takes part", lambda: contributors() == ("leaving", "staying"))
        leaving.send(signal.SIGTERM)
        eventually("it has left", lambda: contributors() == ("staying",))
        assert leaving.end() == 128 + signal.SIGTERM, leaving.log
        assert contributors() == ("staying",)


@pytest.mark.parametrize(
    ("crew", "notes"),
    [
        ({"worker_count": 2}, False),
        ({"worker_count": 1}, True),
    ],
)
def test_sigterm_is_noted_where_the_others_go_on(cluster, connect, crew, notes) -> None:
    average = shardwell.Average()
    net = connect(cluster(1), "w0").parameter("net", size=5, optimizer=average, **crew)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        trainer = shardwell.DataParallelTrainer(
            lambda weights, batch: (0.0, weights),
            np.zeros(4, np.float32),
            shardwell.SGD(learning_rate=0.5),
            shardwell.ServerSync(net),
        )
        assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) == notes
        assert not trainer.is_leaving
    finally:
        signal.signal(signal.SIGTERM, before)

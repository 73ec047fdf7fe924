"""Goal: SIGTERM ends a training loop between two steps, the one under way included, in order.

Method: processes that make a step for each line on their standard input, so that a test knows where
the signal meets them; what they left behind is read from the cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.leaks import child_pids
from harness.polling import PATIENCE_S, eventually
from harness.programs.commands import Program
from harness.threads import in_background

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
import shardwell.torch  # noqa: E402

WORKER = """
import sys
import shardwell, shardwell.torch, torch

target, worker_id, worker_count, mode, leaves, asks = sys.argv[1:]
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
options = {} if leaves == "default" else {"leave_on_sigterm": leaves == "True"}
if mode == "elastic":
    options["members"] = shardwell.Elastic(min_count=1, max_count=4)
else:
    options |= {"worker_count": int(worker_count), "mode": mode}
with shardwell.connect(target, worker_id=worker_id) as client:
    optimizer = shardwell.torch.ServerOptimizer(model, client, shardwell.SGD(0.5), **options)
    print("at", optimizer.next_step, flush=True)
    for line in sys.stdin:
        if asks == "True" and optimizer.is_leaving:
            print("saves", optimizer.next_step, flush=True)
            break
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("made", optimizer.next_step, flush=True)
print("closed", flush=True)
"""


class Worker(Program):
    """One process of it."""

    def step(self) -> None:
        """Has it begin a step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def work(tmp_path: Path):
    """Starts workers; each has come to its first step."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER)

    @contextmanager
    def start(
        target: str,
        name: str = "w0",
        worker_count: int = 1,
        mode: str = "sync",
        leaves: str = "default",
        *,
        asks: bool = False,
    ) -> Iterator[Worker]:
        arguments = (target, name, str(worker_count), mode, leaves, str(asks))
        with Worker(str(program), *arguments, stdin=subprocess.PIPE) as worker:
            assert worker.read_line().startswith("at ")
            yield worker

    return start


def done(client: shardwell.Client) -> list[str]:
    """Who has left in order."""
    return [name for each in client.status()[0].parameters for name in each.done_worker_ids]


def contributed(client: shardwell.Client) -> list[str]:
    """Who has given a gradient to the step under way."""
    return [name for each in client.status()[0].parameters for name in each.contributed_worker_ids]


def joined_at(client: shardwell.Client, worker_id: str) -> int:
    """The first step that awaits a member; 0: none does."""
    return next(
        (
            each.joined_at or 0
            for each in client.members("model")
            if (each.worker_id, each.state) == (worker_id, "awaited")
        ),
        0,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_loop_that_does_not_ask_is_ended_by_the_step_after(cluster, connect, work, mode) -> None:
    running = cluster(2)
    with work(running.target, mode=mode) as worker:
        worker.step()
        assert worker.read_line() == "made 1"
        worker.send(signal.SIGTERM)
        worker.step()
        assert worker.read_line() == "made 2"
        worker.step()
        assert worker.end() == 128 + signal.SIGTERM
        assert worker.lines[-1] == "made 2"  # the third is made, and what follows it is not
        assert worker.log == []
    observer = connect(running, "observer")
    assert done(observer) == ["w0"]
    weights = observer.parameter("model").get_weights()["weight"]
    np.testing.assert_array_equal(weights, np.full((1, 4), -1.5, np.float32))


def test_a_loop_that_asks_ends_by_itself(cluster, connect, work) -> None:
    running = cluster(2)
    with work(running.target, asks=True) as worker:
        worker.step()
        assert worker.read_line() == "made 1"
        worker.send(signal.SIGTERM)
        worker.step()
        assert worker.end() == 0
        assert worker.lines[-2:] == ["saves 1", "closed"]
    assert done(connect(running, "observer")) == ["w0"]


def test_a_step_that_waits_for_another_worker_is_made(cluster, connect, work) -> None:
    """And the other worker has the name of who has left, at once, for the step that follows."""
    running = cluster(2)
    with work(running.target, "w0", 2, leaves="True") as worker:
        net = connect(running, "w1").parameter("model")
        worker.step()
        eventually(
            "it waits for the other worker",
            lambda: list(connect(running, "w1").status()[0].parameters[0].contributed_worker_ids),
        )
        worker.send(signal.SIGTERM)
        ones = {"weight": np.ones((1, 4), np.float32)}
        net.exchange(ones)
        assert worker.read_line() == "made 1"
        worker.step()
        net.exchange(ones)
        assert worker.end() == 128 + signal.SIGTERM
        waiting = in_background(lambda: net.exchange(ones, timeout_s=600.0))
        error = waiting.exception(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError), error
        assert error.missing_worker_ids == ("w0",)
        assert net.version == 2


def test_a_worker_that_is_drained_ends_as_after_sigterm(cluster, connect) -> None:
    running = cluster(2)
    model = torch.nn.Linear(4, 1, bias=False)
    client = connect(running, "w0")
    optimizer = shardwell.torch.ServerOptimizer(
        model, client, shardwell.SGD(0.5), members=shardwell.Elastic()
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    assert not optimizer.is_leaving
    assert connect(running, "ops").drain("w0") == ["model"]
    step()
    assert optimizer.is_leaving
    with pytest.raises(SystemExit) as ended:
        step()
    assert ended.value.code == 128 + signal.SIGTERM
    assert optimizer.next_step == 3
    optimizer.close()


def test_who_trains_beside_it_goes_on(cluster, work) -> None:
    running = cluster(2)
    with (
        work(running.target, "w0", 2, "async") as leaving,
        work(running.target, "w1", 2, "async") as staying,
    ):
        for worker in (leaving, staying):
            worker.step()
            assert worker.read_line() == "made 1"
        leaving.send(signal.SIGTERM)
        leaving.step()
        assert leaving.read_line() == "made 2"
        leaving.step()
        assert leaving.end() == 128 + signal.SIGTERM
        staying.step()
        assert staying.read_line() == "made 2"


def test_the_other_members_go_on_without_it(cluster, connect, work) -> None:
    running = cluster(2)
    with (
        work(running.target, "staying", mode="elastic") as staying,
        work(running.target, "leaving", mode="elastic") as leaving,
    ):
        staying.step()
        assert staying.read_line() == "made 1"
        leaving.step()  # it takes part from one of the next steps on, whose weights it waits for
        observer = connect(running, "observer")
        joined = eventually("it takes part", lambda: joined_at(observer, "leaving"))
        for _ in range(1, max(joined, 2)):
            staying.step()
            assert staying.read_line().startswith("made ")
        assert leaving.read_line().startswith("made ")
        for _ in range(2):
            staying.step()
            leaving.step()
            assert staying.read_line().startswith("made ")
            assert leaving.read_line().startswith("made ")
        leaving.send(signal.SIGTERM)
        staying.step()
        leaving.step()
        assert leaving.read_line().startswith("made ")  # with which it may end by itself
        leaving.step()
        for _ in range(3):
            staying.step()
            assert staying.read_line().startswith("made ")
        assert leaving.end() == 128 + signal.SIGTERM, leaving.log
        assert "leaving" in done(observer)


def test_where_others_wait_for_it_a_worker_is_killed_and_started_again(
    cluster, connect, work
) -> None:
    """As before: the default where the number of workers is fixed."""
    running = cluster(2)
    net = None
    for life in range(2):
        with work(running.target, "w0", 2) as worker:
            net = net or connect(running, "w1").parameter("model")
            exchange = in_background(
                lambda net=net: net.exchange({"weight": np.ones((1, 4), np.float32)})
            )
            worker.step()
            exchange.result(PATIENCE_S)
            assert worker.read_line() == f"made {life + 1}"
            worker.send(signal.SIGTERM)
            assert worker.end() == -signal.SIGTERM
    assert done(connect(running, "observer")) == []


def test_all_workers_of_a_run_leave(cluster, connect, tmp_path) -> None:
    """One has left before the other makes a step that needs it."""
    running = cluster(2)
    program = tmp_path / "trains.py"
    program.write_text(
        "import os, shardwell, shardwell.torch, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "with shardwell.connect(worker_id='w' + os.environ['RANK']) as client:\n"
        "    optimizer = shardwell.torch.ServerOptimizer(\n"
        "        model, client, shardwell.SGD(1e-6), worker_count=2, leave_on_sigterm=True\n"
        "    )\n"
        "    try:\n"
        "        while True:\n"
        "            model(torch.ones(1, 4)).sum().backward()\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n"
        "            if optimizer.next_step == 5:\n"
        "                print('trains', flush=True)\n"
        "    except SystemExit as end:\n"
        "        print('leaves with', end.code, flush=True)\n"
        "        raise\n"
    )
    command = ("-m", "shardwell_server", "run", "-n2", "--", sys.executable, str(program))
    with Program(*command, environment={"SHARDWELL_SHARDS": running.target}) as run:
        assert {run.read_line()[4:], run.read_line()[4:]} == {"trains"}
        run.send(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
        assert sorted(run.lines[-2:]) == ["[0] leaves with 143", "[1] leaves with 143"]
        told = "SIGTERM: workers have 120 s to stop; another one kills them at once"
        assert run.log == [f"shardwell: {told}"]
    assert sorted(done(connect(running, "observer"))) == ["w0", "w1"]


LOADING = """
import os, sys, time
import shardwell, shardwell.torch, torch

worker_count, slow_from = map(int, sys.argv[1:])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10000
    def __getitem__(self, index):
        if index >= slow_from:
            time.sleep(60)
        return torch.ones(4)

model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
with shardwell.connect(worker_id="w" + os.environ.get("RANK", "0")) as client:
    optimizer = shardwell.torch.ServerOptimizer(
        model, client, shardwell.SGD(0.5), worker_count=worker_count, leave_on_sigterm=True
    )
    for batch in torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("made", optimizer.next_step, flush=True)
"""


def signal_all(pid: int) -> None:
    """Sends SIGTERM to a process and all that it has started, those first: as Slurm may."""
    pids, found = [pid], [pid]
    while found:
        found = [each for parent in found for each in child_pids(parent)]
        pids += found
    for each in reversed(pids):
        os.kill(each, signal.SIGTERM)


def loading(target: str, path: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Program:
    path.write_text(LOADING)
    command = (*launcher, str(path), *arguments)
    return Program(*command, environment={"SHARDWELL_SHARDS": target})


def test_a_signal_to_a_loader_s_processes_too_does_not_break_the_step(
    cluster, connect, tmp_path
) -> None:
    running = cluster(1)
    with loading(running.target, tmp_path / "loads.py", "2", "10000") as worker:
        other = connect(running, "w1")
        eventually("it waits for the other worker", lambda: contributed(other) == ["w0"])
        signal_all(worker.pid)
        model, gradient = other.parameter("model"), {"weight": np.ones((1, 4), np.float32)}
        model.exchange(gradient)
        assert worker.read_line() == "made 1"
        # It may have data for a step more, after which it leaves.
        more = in_background(lambda: model.exchange(gradient))
        assert worker.end() == 128 + signal.SIGTERM, worker.log
        assert isinstance(more.exception(PATIENCE_S), shardwell.WorkersMissingError | None)
    assert "Traceback" not in "\n".join(worker.log), worker.log
    assert done(other) == ["w0"]


def test_a_signal_to_a_loader_s_processes_too_while_data_are_awaited(
    cluster, connect, tmp_path
) -> None:
    running = cluster(1)
    with loading(running.target, tmp_path / "loads.py", "1", "2") as worker:
        assert [worker.read_line(), worker.read_line()] == ["made 1", "made 2"]
        signal_all(worker.pid)
        assert worker.end() == 128 + signal.SIGTERM, worker.log
    assert "Traceback" not in "\n".join(worker.log), worker.log
    assert done(connect(running, "observer")) == ["w0"]


def test_a_signal_to_a_launcher_and_all_that_it_started(cluster, connect, tmp_path) -> None:
    """Workers get it twice, from the sender and from the launcher, and so does that."""
    running = cluster(1)
    launcher = ("-m", "shardwell_server", "run", "-n2", "--", sys.executable)
    path = tmp_path / "loads.py"
    with loading(running.target, path, "2", "10000", launcher=launcher) as run:
        while not run.read_line().endswith("made 5"):
            pass
        signal_all(run.pid)
        assert run.end() == 128 + signal.SIGTERM, run.log
    assert "Traceback" not in "\n".join(run.log), run.log
    assert sorted(done(connect(running, "observer"))) == ["w0", "w1"]

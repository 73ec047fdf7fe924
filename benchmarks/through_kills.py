"""Training while a worker is killed again and again: shards beside DDP under torchrun.

    python benchmarks/through_kills.py [--seconds 55] [--kill-at 10 25 40] [--json FILE]

Four workers train one PyTorch model on this machine, first with two shards and elastic members,
then with DDP over gloo under torchrun. A worker computes by sleeping 100 ms a step, so that four
fit on few cores. At each of the times, counted from the first step, one worker is killed with
SIGKILL. Beside shards it is started again at once. Of DDP the first kill ends all ranks; how soon
it begins anew, and from which checkpoint, is up to what starts it, and is not measured.

Printed: the model's step at the end, and for how long after each kill no step ended. The JSON has
the model's step over time, which `tools/charts.py` draws. Needs torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WORKER_COUNT = 4
STEP_S = 0.1
VICTIM = 2


def model_and_loss() -> tuple:
    """A model of 100,000 weights, and a loss of it that takes no time beside the sleep."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 100)
    inputs = torch.randn(4, 1000)

    def loss() -> torch.Tensor:
        time.sleep(STEP_S)
        return model(inputs).square().mean()

    return model, loss


def say(*words: object) -> None:
    print(*words, flush=True)


def train_with_shards(worker_id: str) -> None:
    """A worker; one that is started again goes on at the step that is open."""
    import shardwell
    import shardwell.torch

    model, loss = model_and_loss()
    with shardwell.connect(worker_id=worker_id) as client:
        optimizer = shardwell.torch.ServerOptimizer(
            model, client, shardwell.AdamW(lr=1e-3), members=shardwell.Elastic()
        )
        say("pid", os.getpid())
        while True:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            say("step", optimizer.next_step)


def train_with_ddp() -> None:
    """A rank."""
    import torch

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = model_and_loss()[0]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    if rank == VICTIM:
        say("pid", os.getpid())
    for step in itertools.count():
        time.sleep(STEP_S)
        wrapped(torch.ones(4, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            say("step", step + 1)


class Arm:
    """Workers that run, and what they say."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        """Seconds since the first step, and the model's step."""
        self.killed: list[float] = []
        """Seconds since the first step, of each kill."""
        self.began_s: float | None = None
        self._victim = 0
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], *, is_victim: bool, **environment: str) -> None:
        """Starts a program whose output counts."""
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            command, env=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._processes.append(process)
        threading.Thread(target=self._read, args=(process, is_victim), daemon=True).start()

    def _read(self, process: subprocess.Popen[str], is_victim: bool) -> None:
        for line in process.stdout or ():
            word, _, number = line.strip().partition(" ")
            if word == "pid" and is_victim:
                self._victim = int(number)
            elif word == "step":
                now = time.monotonic()
                self.began_s = self.began_s or now
                self.points.append((round(now - self.began_s, 3), int(number)))

    def run(self, kill_at: list[float], seconds: float, again: Callable[[], None] | None) -> None:
        """Waits for the first step, kills at the times, and ends."""
        while self.began_s is None:
            time.sleep(0.05)
        for when in kill_at:
            time.sleep(max(0.0, self.began_s + when - time.monotonic()))
            while not self._victim:  # it has not come back since the kill before
                time.sleep(0.05)
            os.kill(self._victim, 9)
            self.killed.append(round(time.monotonic() - self.began_s, 3))
            self._victim = 0
            if again:
                again()
        time.sleep(max(0.0, self.began_s + seconds - time.monotonic()))
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)


def with_shards(kill_at: list[float], seconds: float) -> Arm:
    from shardwell_server import LocalCluster

    arm = Arm()
    with LocalCluster(2, processes=True) as cluster:

        def start(index: int) -> None:
            command = [sys.executable, __file__, "--worker", f"w{index}"]
            arm.start(command, is_victim=index == VICTIM, SHARDWELL_SHARDS=cluster.target)

        for index in range(WORKER_COUNT):
            start(index)
        arm.run(kill_at, seconds, lambda: start(VICTIM))
    return arm


def with_ddp(kill_at: list[float], seconds: float) -> Arm:
    arm = Arm()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
        *("--nproc-per-node", str(WORKER_COUNT), __file__, "--rank"),
    ]
    arm.start(command, is_victim=True)
    arm.run(kill_at[:1], min(seconds, kill_at[0] + 10), None)
    return arm


def progress(points: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The model's step over time: of several that are said, each once."""
    last = -1
    for second, step in sorted(points):
        if step != last:
            yield second, step
        last = step


def longest_pause_s(points: list[tuple[float, int]], since: float, until: float) -> float:
    """How long no step ended."""
    times = [second for second, _ in points if since <= second < until]
    ends = [since, *times, *([until] if not times else [])]
    return max(b - a for a, b in itertools.pairwise(ends))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--kill-at", type=float, nargs="+", default=[10.0, 25.0, 40.0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arms", nargs="+", default=["shards", "ddp"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return train_with_shards(given.worker)
    if given.rank:
        return train_with_ddp()
    result = {
        "kill_at_s": given.kill_at,
        "seconds": given.seconds,
        "step_s": STEP_S,
        "workers": WORKER_COUNT,
    }
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for name in given.arms:
        run = {"shards": with_shards, "ddp": with_ddp}[name]
        arm = run(given.kill_at, given.seconds)
        points = [*progress(arm.points)]
        steps = [step for second, step in points if second <= given.seconds]
        ends = [*arm.killed[1:], given.seconds]
        pauses = [longest_pause_s(points, *each) for each in zip(arm.killed, ends, strict=True)]
        result[name] = {
            "points": points,
            "killed_s": arm.killed,
            "pauses_s": pauses,
            "steps": steps[-1],
        }
        words = ", ".join(f"{pause:.1f} s" for pause in pauses)
        print(
            f"{name:7} {steps[-1]} steps in {given.seconds:g} s; longest pause by kill: {words}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(result) + "\n")
    return None


if __name__ == "__main__":
    main()

"""Training while workers die, stand still, are slow and come back, beside the same undisturbed.

    python benchmarks/storm.py [storm kill slow random uplink] [--workers 4 8] [--seconds 120]
                               [--faults-per-hour 125] [--step-ms 200] [--size 100000]
                               [--uplink-seconds 600] [--seed 1] [--json FILE]

Two shards on this machine, and workers, processes of their own, that all give a gradient a step. A
worker computes by sleeping `step-ms`, so that many fit on few cores: measured is what a step costs
besides. Elastic members throughout; with `storm`, `slow` and `random` a quorum, whose bounds are
printed. Parts:

    storm    faults at random, from a seed, as ft-diloco publishes of torchft (32 replicas, 125
             faults an hour): kill -9, SIGSTOP for 10 to 20 s, and a worker's cable pulled for as
             long. Who was killed is started again. Steps a second, beside the same without faults;
             and how many members the steps have, of those that live. Needs Linux and root: each
             worker is on a host of its own, a network namespace.
    kill     kill -9 of one of 8, ten times: how long until the next step has closed
             and the victim is started again: from when it has opened the parameter, which ends its
             own start-up, to its first gradient that counts
    slow     8 workers, one of which takes 5 times as long, always: steps a second, beside 7 without
             it; one backup worker (min_contributors=7)
    random   each step of each takes 5 times as long with a probability of 0.1: with 6 of 8,
             beside all 8
    uplink   a worker behind a link of 10 Mbit/s with 20 ms, whose gradients fill it, beside one
             that is not: members lost. Needs Linux and root.

All ratios are of one run. Every process that this starts ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shardwell
from link import PORT, Network, run, serve
from shardwell.connection.credentials import INSECURE_VARIABLE

NAME = "net"
WARM_UP_S = 3.0
"""The time that is not counted: workers find one another."""


# A worker.


def work(arguments: list[str]) -> None:
    """Trains until it is ended; prints a line of JSON a step."""
    options = json.loads(arguments[0])
    chance = random.Random(options["seed"])
    more = {key: options[key] for key in ("min_contributors", "grace_s") if options.get(key)}
    with shardwell.connect(
        options["target"],
        worker_id=options["worker_id"],
        timeout_s=120.0,
        same_host=options.get("same_host", True),
    ) as client:
        net = client.parameter(
            NAME,
            size=options["size"],
            optimizer=shardwell.SGD(learning_rate=0.01),
            members=shardwell.Elastic(min_count=1, max_count=64),
            **more,
        )
        net.init(np.zeros(net.size, np.float32))
        net.get_weights()
        say(kind="opened")
        gradient = np.ones(net.size, np.float32)
        weights = np.empty(net.size, np.float32)
        while True:
            is_slow = chance.random() < options.get("slow_chance", 0.0)
            time.sleep(options["step_s"] * (options.get("factor", 5.0) if is_slow else 1.0))
            net.exchange(gradient, out=weights)
            found = net.outcome
            assert found is not None
            say(
                kind="step",
                step=found.step,
                counted=found.counted,
                members=len(found.contributors),
                version=net.version,
            )


def say(**fields: Any) -> None:
    """Prints a line, with the time on a clock that all processes of a machine share."""
    print(json.dumps({"at_s": time.monotonic(), **fields}), flush=True)


# The crew.


class Worker:
    """One worker's process, and after it is killed the next one's.

    Args:
        options: What `work` is given.
        prefix: The command that runs it elsewhere.
        program: The program, run with `--worker` and the options.
    """

    def __init__(
        self,
        options: dict[str, Any],
        prefix: tuple[str, ...] = (),
        program: tuple[str, ...] = (sys.executable, __file__),
    ) -> None:
        self._options = options
        self._command = [*prefix, *program]
        self.worker_id: str = options["worker_id"]
        self.events: list[dict[str, Any]] = []
        """What it has said, with "start" for each process."""
        self.is_disturbed = False
        """Whether it is dead, or stopped."""
        self.start()

    def start(self) -> None:
        """Starts its process."""
        words = [*self._command, "--worker", json.dumps(self._options)]
        self.events.append({"at_s": time.monotonic(), "kind": "start"})
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, INSECURE_VARIABLE: "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))

    def kill(self) -> None:
        """Kills its process."""
        self.process.kill()
        self.process.wait()

    def steps(self, since_s: float, until_s: float) -> list[dict[str, Any]]:
        """What it has said of steps in a time."""
        return [
            each
            for each in list(self.events)
            if each["kind"] == "step" and since_s <= each["at_s"] < until_s
        ]


@contextlib.contextmanager
def crew(
    args: argparse.Namespace, count: int, target: str, network: Network | None = None, **more: Any
) -> Iterator[list[Worker]]:
    """So many workers, who all take part when the block begins; on hosts from 1 on, if given."""
    slow_count = more.pop("slow_count", 0)
    workers = [
        Worker(
            {
                "target": target,
                "worker_id": f"w{index}",
                "size": args.size,
                "step_s": args.step_ms / 1000 * (5.0 if index < slow_count else 1.0),
                "seed": args.seed * 1000 + index,
                "same_host": network is None,
                **more,
            },
            () if network is None else tuple(network.command(index + 1, [])),
        )
        for index in range(count)
    ]
    try:
        wait_until(lambda: all(len(each.steps(0, 1e12)) > 1 for each in workers), 120.0)
        time.sleep(WARM_UP_S)
        yield workers
    finally:
        for each in workers:
            with contextlib.suppress(ProcessLookupError):
                each.process.send_signal(signal.SIGCONT)
            each.kill()


def wait_until(look: Any, timeout_s: float) -> None:
    """Returns when `look` is true.

    Raises:
        RuntimeError: it was not in time.
    """
    until_s = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > until_s:
            raise RuntimeError(f"it did not come to that within {timeout_s:g} s")
        time.sleep(0.02)


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Two shards, processes of their own."""
    from shardwell_server import LocalCluster

    with LocalCluster(shard_count=2, processes=True, log_level="error") as made:
        yield made.target


def closed_at_s(workers: list[Worker]) -> dict[int, float]:
    """When each version was first seen by a worker."""
    found: dict[int, float] = {}
    for each in workers:
        for said in list(each.events):
            if said["kind"] == "step":
                version = said["version"]
                found[version] = min(found.get(version, said["at_s"]), said["at_s"])
    return found


def steps_a_second(workers: list[Worker], since_s: float, until_s: float) -> float:
    """Versions that came in a time, a second."""
    versions = [v for v, at_s in closed_at_s(workers).items() if since_s <= at_s < until_s]
    return (max(versions) - min(versions)) / (until_s - since_s) if versions else 0.0


# The parts.


def storm(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Faults, beside none."""
    quorum = {"min_contributors": max(1, count // 2), "grace_s": args.step_ms / 4000}
    found: dict[str, Any] = {"workers": count, **quorum}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(count + 1, 1000, ""))
        for index in range(2):
            serve(network, index, 2, 1024, stack, host=0, port=PORT + index)
        target = ",".join(f"{network.address(0)}:{PORT + index}" for index in range(2))
        workers = stack.enter_context(crew(args, count, target, network, **quorum))
        since_s = time.monotonic()
        time.sleep(args.seconds)
        until_s = time.monotonic()
        calm = steps_a_second(workers, since_s, until_s)
        faults, disturbed_s = disturb(args, workers, network)
        stormy = steps_a_second(workers, until_s, time.monotonic())
        members = [
            said["members"]
            for each in workers
            for said in each.steps(until_s, time.monotonic())
            if said["counted"] == "all"
        ]
        length_s = time.monotonic() - until_s
        living = count - disturbed_s / length_s
        found.update(
            faults=faults,
            steps_per_second_calm=round(calm, 3),
            steps_per_second=round(stormy, 3),
            ratio=round(stormy / calm, 3),
            members=round(statistics.mean(members), 2),
            living=round(living, 2),
            take_part=round(min(statistics.mean(members) / living, 1.0), 3),
        )
    return found


def disturb(
    args: argparse.Namespace, workers: list[Worker], network: Network
) -> tuple[dict[str, int], float]:
    """Faults for so many seconds; how many, and for how long workers were dead or stood still."""
    chance = random.Random(args.seed)
    end_s = time.monotonic() + args.seconds
    threads: list[threading.Thread] = []
    gone_s: list[float] = []

    def fault(worker: Worker, kind: str, length_s: float) -> None:
        began_s = time.monotonic()
        if kind == "kill":
            worker.kill()
            time.sleep(min(length_s, 3.0))
            opened = len([each for each in worker.events if each["kind"] == "opened"])
            worker.start()
            with contextlib.suppress(RuntimeError):
                wait_until(
                    lambda: len([e for e in worker.events if e["kind"] == "opened"]) > opened,
                    60.0,
                )
        elif kind == "stop":
            worker.process.send_signal(signal.SIGSTOP)
            time.sleep(length_s)
            worker.process.send_signal(signal.SIGCONT)
        else:
            cable = network.command(workers.index(worker) + 1, ["ip", "link", "set", "eth0"])
            run(*cable, "down")
            time.sleep(length_s)
            run(*cable, "up")
        worker.is_disturbed = False
        gone_s.append(time.monotonic() - began_s)

    counts = dict.fromkeys(("kill", "stop", "cut"), 0)
    while time.monotonic() < end_s:
        time.sleep(min(chance.expovariate(args.faults_per_hour / 3600), 3600))
        standing = [each for each in workers if not each.is_disturbed]
        if time.monotonic() >= end_s or len(standing) <= len(workers) // 2:
            continue
        worker, kind = chance.choice(standing), chance.choice(tuple(counts))
        worker.is_disturbed = True
        counts[kind] += 1
        threads.append(threading.Thread(target=fault, args=(worker, kind, chance.uniform(10, 20))))
        threads[-1].start()
    for each in threads:
        each.join()
    return counts, sum(gone_s)


def kill(args: argparse.Namespace) -> dict[str, Any]:
    """The next step after a kill -9 of one of 8; and the victim, started again."""
    gaps, backs = [], []
    with cluster() as target, crew(args, 8, target) as workers:
        ends_s = sorted(closed_at_s(workers).values())[-20:]
        normal = [after - before for before, after in itertools.pairwise(ends_s)]
        chance = random.Random(args.seed)
        for _ in range(args.kills):
            victim = chance.choice(workers)
            time.sleep(chance.uniform(0.5, 1.0))
            victim.kill()
            at_s = time.monotonic()
            rest = [each for each in workers if each is not victim]
            # The first step that the victim is not in: the one before may lack only the answer.
            wait_until(
                lambda at_s=at_s, rest=rest: any(
                    said["members"] == 7 for each in rest for said in each.steps(at_s, 1e12)
                ),
                60.0,
            )
            first = min(
                said["at_s"]
                for each in rest
                for said in each.steps(at_s, 1e12)
                if said["members"] == 7
            )
            gaps.append(first - at_s)
            before = len(victim.events)
            victim.start()
            wait_until(
                lambda victim=victim, before=before: any(
                    said["kind"] == "step" and said["counted"] == "all"
                    for said in victim.events[before:]
                ),
                60.0,
            )
            new = victim.events[before:]
            opened_s = next(said["at_s"] for said in new if said["kind"] == "opened")
            counted_s = next(said["at_s"] for said in new if said.get("counted") == "all")
            backs.append(counted_s - opened_s)
    return {
        "kills": len(gaps),
        "step_s": round(statistics.median(normal), 3),
        "next_step_s_median": round(statistics.median(gaps), 3),
        "next_step_s_worst": round(max(gaps), 3),
        "back_s_median": round(statistics.median(backs), 3),
        "back_s_worst": round(max(backs), 3),
    }


def rate_of(args: argparse.Namespace, count: int, **more: Any) -> float:
    """Steps a second of a crew."""
    with cluster() as target, crew(args, count, target, **more) as workers:
        since_s = time.monotonic()
        time.sleep(args.seconds / 4)
        return steps_a_second(workers, since_s, time.monotonic())


def slow(args: argparse.Namespace) -> dict[str, Any]:
    """One that is always slow."""
    alone = rate_of(args, 7)
    all_ = rate_of(args, 8, slow_count=1)
    backup = rate_of(args, 8, slow_count=1, min_contributors=7)
    return {
        "without_it": round(alone, 3),
        "waiting_for_it": round(all_ / alone, 3),
        "with_a_backup": round(backup / alone, 3),
    }


def random_slowness(args: argparse.Namespace) -> dict[str, Any]:
    """Anyone is slow now and then."""
    all_ = rate_of(args, 8, slow_chance=0.1)
    some = rate_of(args, 8, slow_chance=0.1, min_contributors=6)
    return {"all_8": round(all_, 3), "6_of_8_to_all": round(some / all_, 3)}


def uplink(args: argparse.Namespace) -> dict[str, Any]:
    """A worker whose gradients fill its uplink."""
    with Network(2, 1000, "") as network, contextlib.ExitStack() as stack:
        for index in range(2):
            serve(network, index, 2, 1024, stack, host=0, port=PORT + index)
        target = ",".join(f"{network.address(0)}:{PORT + index}" for index in range(2))
        inside = network.command(1, [])
        run(*inside, "tc", "qdisc", "del", "dev", "eth0", "root")
        limit = ("rate", "10mbit", "burst", "16kb", "latency", "500ms")
        run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", *limit)
        delay = ("netem", "delay", "20ms")
        with contextlib.suppress(RuntimeError):  # a kernel without it
            run(*inside, "tc", "qdisc", "add", "dev", "eth0", "parent", "1:1", *delay)
        common = {
            "target": target,
            "size": args.uplink_size,
            "step_s": 0.0,
            "seed": args.seed,
        }
        far = Worker({**common, "worker_id": "far"}, tuple(inside))
        near = Worker({**common, "worker_id": "near"}, tuple(network.command(0, [])))
        stack.callback(far.kill)
        stack.callback(near.kill)
        wait_until(lambda: any(each["members"] == 2 for each in near.steps(0, 1e12)), 120.0)
        since_s = time.monotonic()
        time.sleep(args.uplink_seconds)
        until_s = time.monotonic()
        steps = near.steps(since_s, until_s)
        late = [each for each in far.steps(since_s, until_s) if each["counted"] != "all"]
        return {
            "seconds": args.uplink_seconds,
            "gradient_megabytes": round(args.uplink_size * 2 / 1e6, 1),
            "steps": len(steps),
            "steps_without_it": sum(each["members"] < 2 for each in steps),
            "lost": len(late),
        }


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("storm", "kill", "slow", "random", "uplink")
    parser.add_argument("parts", nargs="*", choices=(*parts, []), default=list(parts[:4]))
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--uplink-seconds", type=float, default=600.0)
    parser.add_argument("--uplink-size", type=int, default=4_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", flush=True)
    found: dict[str, Any] = {}
    for part in args.parts:
        if part == "storm":
            for count in args.workers:
                found[f"storm {count}"] = storm(args, count)
                print(f"storm {count}: {json.dumps(found[f'storm {count}'])}", flush=True)
            continue
        if part == "kill":
            found[part] = kill(args)
        elif part == "slow":
            found[part] = slow(args)
        elif part == "random":
            found[part] = random_slowness(args)
        else:
            found[part] = uplink(args)
        print(f"{part}: {json.dumps(found[part])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2:])
    else:
        main()

"""Bytes, and seconds that a kill costs, beside torchft's DiLoCo over gloo, of the same job."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from link import PORT, Network, run, serve, why_not
from outer.rows import Row
from peers.installed import has_module
from storm import Worker, wait_until

LEARNER_COUNT = 8
SIZE = 1_000_000
STEP_S = 0.031
OUTER: dict[str, Any] = {"sync_every": 100, "fragments": 4, "overlap": 12}
ROUND_S = STEP_S * OUTER["sync_every"]
CALM_STEP_COUNT = 5 * OUTER["fragments"]
KILL_COUNT = 2
WINDOW_S = 30.0
"""After a kill, in which the others are watched; the victim is started again at once."""
START_LIMIT_S = 90.0
TOGETHER_LIMIT_S = 30.0
"""For all to take part in the same outer step."""
LIGHTHOUSE_PORT = 29510
BYTES_GOAL, LOST_GOAL = 0.3, 0.1


class Found(NamedTuple):
    """What one of both systems has done."""

    bytes_per_step: float
    """On the loopback, of all, with all headers; of an outer step of a fragment."""
    step_s: float
    """From one outer step of a fragment to the next, undisturbed."""
    lost_s: list[float]
    """Seconds of outer steps that the others did not make, by kill."""
    member_count: float
    """Who took part in an outer step, undisturbed, at the mean; who lives may not."""


def after_step(worker: Worker, count: int) -> float:
    """Waits until a worker has made so many outer steps of fragments more; when it said so."""
    wanted = len(worker.steps(0, 1e12)) + count
    wait_until(lambda: len(worker.steps(0, 1e12)) >= wanted, START_LIMIT_S)
    return float(worker.steps(0, 1e12)[wanted - 1]["at_s"])


def last_members(worker: Worker) -> int:
    """How many took part in the last outer step that a worker has reported; ours report none."""
    return int(worker.steps(0, 1e12)[-1].get("members", LEARNER_COUNT))


def lost_s(steps_at_s: Sequence[float], kill_s: float, until_s: float, step_s: float) -> float:
    """What a kill has cost one worker.

    Args:
        steps_at_s: When it has made outer steps, in order; one before the kill at least.
        kill_s: When another was killed.
        until_s: How long it is watched.
        step_s: What an outer step takes, undisturbed.

    Returns:
        From its last step before the kill to its last one watched, less what these steps take; all
        of the time if it made none.
    """
    before = [at_s for at_s in steps_at_s if at_s <= kill_s]
    after = [at_s for at_s in steps_at_s if kill_s < at_s < until_s]
    if not after:
        return until_s - kill_s
    return max(after[-1] - before[-1] - len(after) * step_s, 0.0)


def opened(worker: Worker) -> bool:
    """Whether a worker has said that it could begin."""
    return any(said["kind"] == "opened" for said in list(worker.events))


def loopback_bytes(network: Network) -> int:
    """What has passed on the loopback of the one host."""
    links = json.loads(run(*network.command(0, ["ip", "-s", "-j", "link", "show", "lo"])))
    return int(links[0]["stats64"]["tx"]["bytes"])


def watch(network: Network, workers: Sequence[Worker]) -> Found:
    """Lets workers train, undisturbed first."""
    wait_until(lambda: all(len(each.steps(0, 1e12)) > 4 for each in workers), START_LIMIT_S)
    with contextlib.suppress(RuntimeError):  # said with the figures
        wait_until(lambda: min(map(last_members, workers)) == len(workers), TOGETHER_LIMIT_S)
    time.sleep(ROUND_S)
    # From the end of a step to that of another: between them nothing is on its way.
    since_s, before = after_step(workers[-1], 1), loopback_bytes(network)
    until_s, after = after_step(workers[-1], CALM_STEP_COUNT), loopback_bytes(network)
    step_s = (until_s - since_s) / CALM_STEP_COUNT
    lost = []
    for number in range(KILL_COUNT):
        victim = workers[number]
        kill_s = time.monotonic()
        victim.kill()
        victim.start()
        time.sleep(WINDOW_S)
        lost.append(
            statistics.mean(
                lost_s(
                    [said["at_s"] for said in each.steps(0, 1e12)],
                    kill_s,
                    kill_s + WINDOW_S,
                    step_s,
                )
                for each in workers
                if each is not victim
            )
        )
    calm = [
        said.get("members", LEARNER_COUNT)
        for each in workers
        for said in each.steps(since_s, until_s)
    ]
    return Found((after - before) / CALM_STEP_COUNT, step_s, lost, statistics.mean(calm))


@contextlib.contextmanager
def started(workers: list[Worker]) -> Iterator[list[Worker]]:
    """Workers that end with the block; those that are appended in it, too."""
    try:
        yield workers
    finally:
        for each in workers:
            each.kill()


def program(name: str, python: str = sys.executable) -> tuple[str, str]:
    """A program beside this file."""
    return python, str(Path(__file__).with_name(name))


def ours() -> Found:
    """Two shards, and learners with elastic members."""
    with Network(1, 10_000, "") as network, contextlib.ExitStack() as stack:
        for index in range(2):
            serve(network, index, 2, 1024, stack, host=0, port=PORT + index)
        target = ",".join(f"{network.address(0)}:{PORT + index}" for index in range(2))
        options = {"target": target, "size": SIZE, "step_s": STEP_S, "outer": OUTER}
        workers = stack.enter_context(started([]))
        for index in range(LEARNER_COUNT):
            own = {**options, "worker_id": f"w{index}", "same_host": False}
            workers.append(Worker(own, tuple(network.command(0, [])), program("member.py")))
        return watch(network, workers)


def theirs(python: str) -> Found:
    """A lighthouse, and replicas."""
    with Network(1, 10_000, "") as network, contextlib.ExitStack() as stack:
        prefix = tuple(network.command(0, []))
        replica = program("replica.py", python)
        all_ = stack.enter_context(started([]))
        all_.append(Worker({"serve": LIGHTHOUSE_PORT, "worker_id": ""}, prefix, replica))
        wait_until(lambda: all_[0].steps(0, 1e12), START_LIMIT_S)
        gate = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gate"
        options = {"lighthouse": f"127.0.0.1:{LIGHTHOUSE_PORT}", "size": SIZE, "step_s": STEP_S}
        for index in range(LEARNER_COUNT):
            own = {**options, **OUTER, "worker_id": f"w{index}", "gate": str(gate)}
            all_.append(Worker(own, prefix, replica))
        # Replicas that begin apart stay so: they are healed at each step, and count in none.
        wait_until(lambda: all(opened(each) for each in all_[1:]), START_LIMIT_S)
        gate.touch()
        return watch(network, all_[1:])


def rows_of(own: Found, other: Found) -> list[Row]:
    """The rows of both."""
    lost = statistics.mean(own.lost_s), statistics.mean(other.lost_s)
    ratio = lost[0] / lost[1] if lost[1] else math.inf
    both = [", ".join(f"{each:.1f}" for each in found.lost_s) for found in (own, other)]
    return [
        Row(
            "bytes / torchft's DiLoCo, gloo",
            f"{BYTES_GOAL:g}",
            f"{own.bytes_per_step / other.bytes_per_step:.3f}: {own.bytes_per_step / 1e6:.2f} of "
            f"{other.bytes_per_step / 1e6:.2f} MB a fragment's outer step of {LEARNER_COUNT} "
            f"learners of {SIZE:,} elements, headers counted in; of torchft's "
            f"{other.member_count:.1f} took part in one",
        ),
        Row(
            "seconds lost to a kill / torchft's",
            f"{LOST_GOAL:g}",
            f"{ratio:.3f}: {both[0]} s of {both[1]} s by those not killed; an outer "
            f"step each {own.step_s:.2f} s, and {other.step_s:.2f} s",
        ),
    ]


def measure(python: str) -> Iterator[Row]:
    """Measures torchft in turns with ours, if it is installed."""
    reason = why_not()
    if reason is None and not has_module(python, "torchft.local_sgd"):
        reason = f"{python} can't import torchft; pass --torchft-python PYTHON"
    if reason is not None:
        yield Row("torchft", "", f"skipped: {reason}")
        return
    own = ours()
    try:
        other = theirs(python)
    except RuntimeError as error:
        yield Row("torchft", "", f"failed: {error}; {own}")
        return
    yield from rows_of(own, other)

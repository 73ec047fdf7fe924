"""Inner steps a second on slow links, and the part of a transfer that inner steps hide."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from link import PORT, Network, run, serve, why_not
from outer.relay import room_bytes
from outer.rows import Row
from outer.traffic import learner_command, moved
from peers.turns import Crew, Step

LEARNER_COUNT = SHARD_COUNT = 2
COMPUTE_MS = 31.0
"""Of an inner step, which sleeps: what GPT-2 of 124 M takes on the GPU of docs/performance.md. Two
cores can't compute two learners' steps of 25 million."""
SYNC_EVERY, FRAGMENT_COUNT = 100, 4
DELAY_MS = 10.0
"""Each way."""
RELAY_PORT = 7171
FAST_MBIT = 4000
"""While first weights are given and read, which is not measured."""
STEP_LIMIT_S = 120.0
"""For the longest order: a synchronous step on the slowest link."""


class Rate(NamedTuple):
    """The measurements on links of one rate."""

    mbit: int
    goal: float
    """Times as many steps; 0: it finishes."""
    rounds: int
    """Times each fragment's outer step is made."""
    warm_up_count: int
    """Synchronous steps that are not counted."""
    exchange_count: int


RATES = (
    Rate(1000, 7.0, 2, 1, 6),
    Rate(100, 20.0, 2, 1, 3),
    Rate(50, 30.0, 2, 0, 2),
    Rate(10, 0.0, 1, 0, 1),
)


def interval(sync_every: int) -> int:
    """Inner steps from one fragment to the next."""
    return sync_every // FRAGMENT_COUNT


def overlap(sync_every: int) -> int:
    """The longest. Of H=100 it takes 0.74 s; at 100 Mbit/s 6.25 MB need 0.52 s either way."""
    return interval(sync_every) - 1


class Setup:
    """Shards and learners, each on a host of its own; a learner's relays are on its host.

    Args:
        stack: Ends it all.
        with_exchange: Whether synchronous learners are started, too.
        sync_every: Inner steps between offers of a fragment.
    """

    def __init__(
        self, stack: contextlib.ExitStack, *, with_exchange: bool, sync_every: int = SYNC_EVERY
    ) -> None:
        self.sync_every = sync_every
        self.network = stack.enter_context(
            Network(LEARNER_COUNT + SHARD_COUNT, FAST_MBIT, congestion())
        )
        hosts = range(LEARNER_COUNT, LEARNER_COUNT + SHARD_COUNT)
        for index, host in enumerate(hosts):
            serve(self.network, index, SHARD_COUNT, 1024, stack, host=host)
        direct = ",".join(f"{self.network.address(host)}:{PORT}" for host in hosts)
        relayed = ",".join(f"127.0.0.1:{RELAY_PORT + index}" for index in range(SHARD_COUNT))
        self._relays = stack.enter_context(contextlib.ExitStack())
        self.limit(FAST_MBIT)
        self.outer = self._crew(stack, "outer", relayed, "outer")
        self.exchanges: dict[str, Crew] = {}
        """Synchronous learners, without the relays, too: what these cost is theirs alone."""
        if with_exchange:
            self.exchanges["20 ms"] = self._crew(stack, "exchange", relayed, "relayed")
            self.exchanges["no delay"] = self._crew(stack, "exchange", direct, "direct")

    def limit(self, mbit: int) -> None:
        """Gives all links another rate, and makes all connections over them anew.

        Buffers of a connection grow with what its link carries, and do not shrink. That of a
        learner's connection to its relay would grow with what this machine carries, and hold
        seconds of a slow link, before which nothing else gets through.
        """
        self._relays.close()
        self.network.limit(mbit)
        for host in range(LEARNER_COUNT):
            buffer = f"4096 16384 {room_bytes(DELAY_MS / 1e3, mbit)}"
            run(*self.network.command(host, ["sysctl", "-qw", f"net.ipv4.tcp_wmem={buffer}"]))
            self._relay(host, mbit)

    def _relay(self, host: int, mbit: int) -> None:
        program = str(Path(__file__).with_name("relay.py"))
        words = [sys.executable, program, f"{DELAY_MS:g}", str(mbit)]
        for index in range(SHARD_COUNT):
            shard = f"{self.network.address(LEARNER_COUNT + index)}:{PORT}"
            words.append(f"{RELAY_PORT + index}={shard}")
        process = subprocess.Popen(
            self.network.command(host, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._relays.callback(process.wait)
        self._relays.callback(process.kill)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("a relay did not start")

    def _crew(self, stack: contextlib.ExitStack, mode: str, shards: str, name: str) -> Crew:
        flags = {
            "compute_ms": COMPUTE_MS,
            "sync_every": self.sync_every,
            "fragments": FRAGMENT_COUNT,
            "overlap": overlap(self.sync_every),
        }
        words = learner_command(mode, shards, name, **flags)
        commands = [self.network.command(host, words) for host in range(LEARNER_COUNT)]
        crew = Crew(commands, LEARNER_COUNT, {"SHARDWELL_INSECURE": "1"}, STEP_LIMIT_S)
        return stack.enter_context(crew)

    def train_outer(self, rounds: int) -> tuple[Step, Step]:
        """Trains each fragment so many outer steps; returns the reports before and after.

        One fragment before, so that the measured steps begin as they end: with one on its way.
        """
        before = self.outer.step(do="train", steps=interval(self.sync_every))
        after = self.outer.step(do="train", steps=self.sync_every * rounds)
        self.outer.step(do="settle")
        return before, after


def congestion() -> str:
    """TCP's, the same on all machines where it can be chosen."""
    found = run("sysctl", "-n", "net.ipv4.tcp_available_congestion_control").split()
    return "cubic" if "cubic" in found else ""


def hidden_part(before: Step, after: Step) -> float:
    """Of the seconds that offers travelled; the mean of the learners."""
    parts = []
    for old, new in zip(before.reports, after.reports, strict=True):
        hidden_s, waited_s = (moved(old, new, key) for key in ("hidden_s", "waited_s"))
        parts.append(hidden_s / (hidden_s + waited_s))
    return statistics.mean(parts)


def row_of(rate: Rate, outer: tuple[Step, Step], exchange_s: dict[str, float]) -> Row:
    """Of one rate.

    Args:
        rate: The links' rate.
        outer: See `Setup.train_outer`.
        exchange_s: Seconds of a synchronous step, by delay.
    """
    step_s = outer[1].seconds / (SYNC_EVERY * rate.rounds)
    times = (
        ", ".join(
            f"{seconds / step_s:.1f} times the {seconds:.2f} s of a synchronous one"
            + (" without the delay" if name == "no delay" else "")
            for name, seconds in exchange_s.items()
        )
        or f"a synchronous step did not end within {STEP_LIMIT_S:g} s"
    )
    found = f"{times}; an inner step {step_s * 1e3:.1f} ms, hidden {hidden_part(*outer):.2f}"
    goal = f"{rate.goal:g}" if rate.goal else "finishes"
    return Row(f"inner steps a second / synchronous fp16, {rate.mbit} Mbit/s", goal, found)


def about(sync_every: int) -> str:
    """The measurement, in words."""
    return (
        f"{LEARNER_COUNT} learners of 25 M elements and {SHARD_COUNT} shards, each on a host of "
        f"its own; an inner step sleeps for {COMPUTE_MS:g} ms; H={sync_every}, {FRAGMENT_COUNT} "
        f"fragments, overlap={overlap(sync_every)}; a relay delays by {DELAY_MS:g} ms each way"
    )


def link() -> Iterator[Row]:
    """On links of each rate."""
    if reason := why_not():
        yield Row("link", "", f"skipped: {reason}")
        return
    yield Row("link", "", about(SYNC_EVERY))
    with contextlib.ExitStack() as stack:
        setup = Setup(stack, with_exchange=True)
        setup.train_outer(1)  # the first step opens streams and touches memory
        for rate in RATES:
            setup.limit(rate.mbit)
            outer = setup.train_outer(rate.rounds)
            exchange_s: dict[str, float] = {}
            for name, crew in setup.exchanges.items():
                if name == "no delay" and rate.mbit < RATES[0].mbit:
                    continue  # the delay is nothing beside such steps
                try:
                    if rate.warm_up_count:
                        crew.step(do="train", steps=rate.warm_up_count)
                    step = crew.step(do="train", steps=rate.exchange_count)
                except RuntimeError:  # outer training's figure is one all the same
                    break
                exchange_s[name] = step.seconds / rate.exchange_count
            yield row_of(rate, outer, exchange_s)


HIDDEN_MBIT, HIDDEN_GOAL, HIDDEN_ROUNDS = 100, 0.95, 3
HIDDEN_SYNC_EVERY = (100, 200)


def hidden() -> Iterator[Row]:
    """On links of 100 Mbit/s, of which a fragment each 0.78 s takes most, and with half as many."""
    if reason := why_not():
        yield Row("hidden", "", f"skipped: {reason}")
        return
    for sync_every in HIDDEN_SYNC_EVERY:
        with contextlib.ExitStack() as stack:
            setup = Setup(stack, with_exchange=False, sync_every=sync_every)
            setup.train_outer(1)
            setup.limit(HIDDEN_MBIT)
            outer = setup.train_outer(HIDDEN_ROUNDS)
        step_s = outer[1].seconds / (sync_every * HIDDEN_ROUNDS)
        found = f"{hidden_part(*outer):.3f}; an inner step {step_s * 1e3:.1f} ms"
        what = f"part of a transfer that is hidden, {HIDDEN_MBIT} Mbit/s, H={sync_every}"
        yield Row(what, f"{HIDDEN_GOAL:g}", f"{found}; {about(sync_every)}")

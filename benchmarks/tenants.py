"""What one tenant's flood costs another: his step time beside that without it, in turns in one run.

    python benchmarks/tenants.py [--rounds 5] [--steps 6] [--megabytes 8] [--json FILE]

Two shards on this machine, which ask for tokens. One tenant trains: two workers that exchange 8 MB
of float32, or one with 10 elements, over gRPC. The other floods, by a token with a quota, or one
without: with exchanges of 16 MB, with 64 status calls at any time, or with connections. Its own
processes take from the same cores; so the same flood is let loose on shards of its own beside, too,
and what counts is the ratio of both: what it costs to share the shards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from peers.turns import Crew, worker_command
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.transport.arena import SAME_HOST_VARIABLE
from shardwell_server import LocalCluster
from shardwell_server.access.rights import Grant, Right
from shardwell_server.access.tokens import (
    Token,
    changing_tokens,
    digest_of,
    new_secret,
    private_file,
)
from shardwell_server.shard.quotas import NO_QUOTA, Quota
from shardwell_server.terminal import console

QUOTA = Quota(streams=8, members=8, bytes_per_s=2_000_000)
"""Of the tenant that floods, on each shard."""
KINDS = ("payload", "calls", "connections")
SETTLE_S = 1.5
"""For a flood to begin, or to be over."""
FLOOD = Path(__file__).parent / "peers" / "flood.py"


def make_tokens(directory: Path) -> Path:
    """The file of tokens; that of each secret is NAME.token."""
    path = directory / "tokens.json"
    with changing_tokens(path) as tokens:
        for name, quota in (("trains", NO_QUOTA), ("bounded", QUOTA), ("unbounded", NO_QUOTA)):
            secret = new_secret()
            tokens[name] = Token(
                name=name,
                digests=(digest_of(secret).hex(),),
                grants=(Grant(Right.CREATE),),
                quota=quota,
            )
            path = directory / f"{name}.token"
            with private_file(path, secret, is_ours=lambda path: True):
                pass
    return path


@contextlib.contextmanager
def flood(kind: str, target: str, token: Path):
    """A flood as long as the block."""
    environment = {**os.environ, TOKEN_FILE_VARIABLE: str(token), SAME_HOST_VARIABLE: "off"}
    words = [sys.executable, str(FLOOD), "--shards", target, "--kind", kind]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()
        time.sleep(SETTLE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = make_tokens(directory)
        shared, beside = (
            stack.enter_context(LocalCluster(2, processes=True, tokens=tokens)) for _ in range(2)
        )
        variables = {
            TOKEN_FILE_VARIABLE: str(directory / "trains.token"),
            SAME_HOST_VARIABLE: "off",
        }
        flags = ["--shards", shared.target]
        large = worker_command("shardwell_exchange.py", *flags, "--megabytes", str(args.megabytes))
        small = worker_command("shardwell_exchange.py", *flags, "--small", "10-elements")
        crews = {
            f"{args.megabytes} MB": (stack.enter_context(Crew([large] * 2, 2, variables)), {}),
            "10 elements": (
                stack.enter_context(Crew([small], 1, variables)),
                {"do": "10-elements", "calls": 20},
            ),
        }

        def steps() -> dict[str, float]:
            """The median step of each."""
            medians = {}
            for what, (crew, order) in crews.items():
                times = []
                for _ in range(args.steps):
                    step = crew.step(**order)
                    times += step.reports[0]["times"] if "calls" in order else [step.seconds]
                medians[what] = statistics.median(times)
            return medians

        steps()  # warm up
        times: dict[tuple[str, str, str], list[float]] = {}

        def note(kind: str, where: str) -> None:
            for what, seconds in steps().items():
                times.setdefault((kind, where, what), []).append(seconds)

        for _ in range(args.rounds):
            for kind in KINDS:
                note(kind, "alone")
                for token in ("bounded", "unbounded"):
                    for where, cluster in (("beside", beside), ("shared", shared)):
                        with flood(kind, cluster.target, directory / f"{token}.token"):
                            note(kind, f"{token} {where}")
    table = Table(
        "flood", "step", "alone, ms", "quota / alone", "quota, sharing", "no quota, sharing"
    )
    for kind in KINDS:
        for what in crews:
            median = {
                where: statistics.median(each)
                for (of, where, step), each in times.items()
                if of == kind and step == what
            }
            ratios = {
                "bounded over alone": median["bounded shared"] / median["alone"],
                "bounded": median["bounded shared"] / median["bounded beside"],
                "unbounded": median["unbounded shared"] / median["unbounded beside"],
            }
            found[f"{kind}, {what}"] = {"ms": 1000 * median["alone"], "ratios": ratios}
            cells = [f"{each:.2f}" for each in ratios.values()]
            table.add_row(kind, what, f"{1000 * median['alone']:.3g}", *cells)
    console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

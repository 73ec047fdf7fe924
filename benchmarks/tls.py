"""What TLS costs: a step over mutual TLS beside the same step without, in turns in one run.

    python benchmarks/tls.py [--steps 15] [--megabytes 64] [--json FILE]

Two workers and two shards on this machine, each a process: `exchange` of 64 MB of float32 (fp16),
over gRPC and between neighbours, who share memory and talk over a Unix socket, which TLS does not
touch; and `exchange` of 10 elements by one worker. Certificates are those of `shardwell certs`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path

from rich.table import Table

from peers.turns import Crew, worker_command
from shardwell import Tls
from shardwell.rpc.arena import SAME_HOST_VARIABLE
from shardwell.rpc.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell_server import LocalCluster
from shardwell_server.certificates import make_certificates
from shardwell_server.terminal import console

WORKER_COUNT = 2
WARM_UP_COUNT = 3
TINY_CALL_COUNT = 50
Key = tuple[str, str]
"""What is done, and "plain" or "tls"."""


def start(stack: contextlib.ExitStack, megabytes: int) -> dict[Key, tuple[Crew, dict[str, object]]]:
    """Workers of each kind, and what they are told to do."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    files = make_certificates(directory, ["127.0.0.1"], 1)
    of_workers = {
        CA_VARIABLE: str(files.ca),
        CERT_VARIABLE: str(files.client),
        KEY_VARIABLE: str(files.client_key),
    }
    crews: dict[Key, tuple[Crew, dict[str, object]]] = {}
    for side, tls, variables in (
        ("plain", None, {}),
        ("tls", Tls(ca=files.ca, cert=files.server, key=files.server_key), of_workers),
    ):
        for where, same_host in (("over gRPC", "off"), ("same host", "auto")):
            cluster = stack.enter_context(LocalCluster(2, processes=True, tls=tls))
            environment = {**variables, SAME_HOST_VARIABLE: same_host}
            flags = ["--shards", cluster.target]
            large = worker_command("shardwell_exchange.py", *flags, "--megabytes", str(megabytes))
            small = worker_command("shardwell_exchange.py", *flags, "--small", "10-elements")
            crew = stack.enter_context(Crew([large] * WORKER_COUNT, WORKER_COUNT, environment))
            crews[f"{megabytes} MB, {where}", side] = crew, {}
            crew = stack.enter_context(Crew([small], 1, environment))
            order: dict[str, object] = {"do": "10-elements", "calls": TINY_CALL_COUNT}
            crews[f"10 elements, {where}", side] = crew, order
    return crews


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    times: dict[Key, list[float]] = {}
    with contextlib.ExitStack() as stack:
        crews = start(stack, args.megabytes)
        for number in range(args.steps + WARM_UP_COUNT):
            for key, (crew, order) in crews.items():
                step = crew.step(**order)
                if number >= WARM_UP_COUNT:
                    calls = step.told[0]["times"] if "calls" in order else [step.seconds]
                    times.setdefault(key, []).append(statistics.median(calls))
    table = Table("exchange", "plain, ms", "TLS, ms", "ratio (quartiles)")
    found = {}
    for what in dict.fromkeys(what for what, _ in times):
        plain, tls = times[what, "plain"], times[what, "tls"]
        low, ratio, high = statistics.quantiles(
            [a / b for a, b in zip(tls, plain, strict=True)], n=4
        )
        medians = [1000 * statistics.median(each) for each in (plain, tls)]
        found[what] = {"plain_ms": medians[0], "tls_ms": medians[1], "ratio": ratio}
        cells = [f"{each:.3g}" for each in medians]
        table.add_row(what, *cells, f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

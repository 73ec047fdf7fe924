"""What it costs to be closed: steps over mutual TLS, and with a token besides, beside open ones.

    python benchmarks/security.py [--steps 15] [--megabytes 64] [--json FILE]

In turns, in one run: without, with TLS, and with TLS, a token, a quota and an audit log. On this
machine two workers and two shards, each a process: `exchange` of 64 MB of float32 (fp16), over gRPC
and between neighbours, who share memory and talk over a Unix socket, which TLS does not touch; and
`exchange` of 10 elements by one worker. Certificates are those of `shardwell certs`; the token is
one of 100.
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
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
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
from shardwell_server.operations.certificates import make_certificates
from shardwell_server.shard.quotas import Quota
from shardwell_server.terminal import console

WORKER_COUNT = 2
WARM_UP_COUNT = 3
TINY_CALL_COUNT = 50
Key = tuple[str, str]
"""The kind of work, and one of SIDES."""
SIDES = ("plain", "TLS", "TLS, token, audit")
TOKEN_COUNT = 100


def start(stack: contextlib.ExitStack, megabytes: int) -> dict[Key, tuple[Crew, dict[str, object]]]:
    """Workers of each kind, and their orders."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    files = make_certificates(directory, ["127.0.0.1"], 1)
    of_workers = {
        CA_VARIABLE: str(files.ca),
        CERT_VARIABLE: str(files.client),
        KEY_VARIABLE: str(files.client_key),
    }
    tls = Tls(ca=files.ca, cert=files.server, key=files.server_key)
    tokens, token = make_tokens(directory)
    crews: dict[Key, tuple[Crew, dict[str, object]]] = {}
    for side, given, variables in (
        (SIDES[0], {}, {}),
        (SIDES[1], {"tls": tls}, of_workers),
        (
            SIDES[2],
            {"tls": tls, "tokens": tokens},
            {**of_workers, TOKEN_FILE_VARIABLE: str(token)},
        ),
    ):
        for where, same_host in (("over gRPC", "off"), ("same host", "auto")):
            if side == SIDES[2]:
                given["audit_dir"] = directory / f"audit {same_host}"
            cluster = stack.enter_context(LocalCluster(2, processes=True, **given))
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


def make_tokens(directory: Path) -> tuple[Path, Path]:
    """A file of many tokens, and the file of one's secret."""
    path, secret = directory / "tokens.json", new_secret()
    with changing_tokens(path) as tokens:
        for number in range(TOKEN_COUNT):
            found = secret if number == TOKEN_COUNT // 2 else new_secret()
            tokens[f"t{number}"] = Token(
                name=f"t{number}",
                digests=(digest_of(found).hex(),),
                grants=(Grant(Right.CREATE),),
                quota=Quota(streams=100, members=100, bytes_per_s=10**12),
            )
    file = directory / "own.token"
    with private_file(file, secret, is_ours=lambda path: True):
        pass
    return path, file


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
                    calls = step.reports[0]["times"] if "calls" in order else [step.seconds]
                    times.setdefault(key, []).append(statistics.median(calls))
    table = Table("exchange", *(f"{side}, ms" for side in SIDES), *SIDES[1:])
    found = {}
    for what in dict.fromkeys(what for what, _ in times):
        plain = times[what, SIDES[0]]
        cells, ratios = [], {}
        for side in SIDES[1:]:
            pairs = zip(times[what, side], plain, strict=True)
            low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
            ratios[side] = ratio
        medians = {side: 1000 * statistics.median(times[what, side]) for side in SIDES}
        found[what] = {"ms": medians, "ratios": ratios}
        table.add_row(what, *(f"{each:.3g}" for each in medians.values()), *cells)
    console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

"""All-reduce and parameter server over links of a known rate, beside what the links could do.

    python benchmarks/link.py [--hosts 2 4] [--mbit 1000] [--megabytes 64] [--steps 7]
                              [--chunk-kib 1024] [--congestion cubic] [--limit-s 300]
                              [--json FILE]

Needs Linux and root. Each host is a network namespace; all are plugged into a switch, a namespace
with a bridge; both ends of each cable let `mbit` Mbit/s pass (tbf), so that a host sends and
receives that much at once. On each host: a worker, and a shard. Measured are the ring all-reduce
of all workers; `exchange` of all workers with all shards, open, and with TLS and a token; and a
ring of bare gRPC streams that move the all-reduce's bytes.

The bound: 2 (n - 1) / n of the encoded bytes must leave each host, and as many must come in. For
the ring that is known. Of the parameter server: a worker sends (n - 1) / n of its gradient to other
hosts' shards, and its own host's shard sends 1 / n of the weights to n - 1 other hosts' workers;
what comes in is as much. The raw bound divides these bytes by the rate. The goodput bound counts
the Ethernet, IP and TCP headers too, 66 bytes for each 1448 of data: nothing over TCP can be
faster. What crossed the cables is counted as well, in the direction that had the most.

Cleans up after itself, and after runs that were killed; nothing outside its namespaces changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from peers.turns import Crew, Step, worker_command
from security import make_tokens
from shardwell.connection.credentials import INSECURE_VARIABLE, TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell.numerics.codec import CODECS
from shardwell_server.operations.certificates import make_certificates
from shardwell_server.processes.child import PARENT_FLAG

PREFIX = "shardwell-bench"
PORT = 7070
WARM_UP_COUNT = 2
INSECURE = {INSECURE_VARIABLE: "1"}
"""These links are the benchmark's own."""
BURST_BYTES = 128 * 1024
"""What may pass at once after a pause: two of the kernel's largest packets; 1 ms of a Gbit/s."""
QUEUE_MS = 50
"""What waits at the end of a cable at the most, before packets are dropped."""
FRAME_BYTES, FRAME_DATA_BYTES = 1514, 1448
"""Of a full packet, as tbf counts it: with Ethernet's, IP's and TCP's headers, and of data."""


def run(*words: str) -> str:
    """Runs a command; its output.

    Raises:
        RuntimeError: it failed; says how.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


class Network:
    """Hosts on a switch. A context manager that leaves nothing behind."""

    def __init__(self, host_count: int, mbit: int, congestion: str) -> None:
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._hosts = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(host_count)]
        self._mbit = mbit
        self._congestion = congestion

    def address(self, index: int) -> str:
        """A host's."""
        return f"10.99.0.{index + 1}"

    def command(self, index: int, words: list[str]) -> list[str]:
        """Runs on a host."""
        return ["ip", "netns", "exec", self._hosts[index], *words]

    def sent_bytes(self) -> list[tuple[int, int]]:
        """What each host and the switch's end of its cable have sent, with all headers."""
        found = []
        for index, host in enumerate(self._hosts):
            ends = ((host, "eth0"), (self._switch, f"port{index}"))
            found.append(tuple(_statistics(*end)["bytes"] for end in ends))
        return found  # type: ignore[return-value]

    def drop_count(self) -> int:
        """Packets for which a queue had no room."""
        ends = [(host, "eth0") for host in self._hosts]
        ends += [(self._switch, f"port{index}") for index in range(len(self._hosts))]
        return sum(_statistics(*end)["drops"] for end in ends)

    def congestion_control(self) -> str:
        """TCP's, on the hosts."""
        if self._congestion:
            return self._congestion
        name = "net.ipv4.tcp_congestion_control"
        return run(*self.command(0, ["sysctl", "-n", name])).strip()

    def limit(self, mbit: int) -> None:
        """Gives all cables another rate."""
        self._mbit = mbit
        for index, host in enumerate(self._hosts):
            for end in ((host, "eth0"), (self._switch, f"port{index}")):
                self._limit("change", *end)

    def __enter__(self) -> Network:
        remove_stale()
        try:
            run("ip", "netns", "add", self._switch)
            inside = ("ip", "-n", self._switch)
            run(*inside, "link", "add", "br0", "type", "bridge")
            run(*inside, "link", "set", "br0", "up")
            for index in range(len(self._hosts)):
                self._plug_in(index)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the namespaces, and with them all that is in them."""
        for name in (*self._hosts, self._switch):
            remove(name)

    def _plug_in(self, index: int) -> None:
        host, port = self._hosts[index], f"port{index}"
        run("ip", "netns", "add", host)
        run("ip", "-n", host, "link", "set", "lo", "up")
        peer = ("peer", "name", port, "netns", self._switch)
        run("ip", "-n", host, "link", "add", "eth0", "type", "veth", *peer)
        run("ip", "-n", host, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        run("ip", "-n", self._switch, "link", "set", port, "master", "br0")
        for namespace, device in ((host, "eth0"), (self._switch, port)):
            self._limit("add", namespace, device)
            run("ip", "-n", namespace, "link", "set", device, "up")
        if self._congestion:  # of routes: the setting may be for init's namespace alone
            route = ("route", "replace", "10.99.0.0/24", "dev", "eth0", "congctl")
            run("ip", "-n", host, *route, self._congestion)

    def _limit(self, verb: str, namespace: str, device: str) -> None:
        limit = ("rate", f"{self._mbit}mbit", "burst", f"{BURST_BYTES}b")
        limit += ("latency", f"{QUEUE_MS}ms")
        run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf", *limit)


def _statistics(namespace: str, device: str) -> dict[str, Any]:
    """Of the end of a cable."""
    found = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
    statistics_: dict[str, Any] = found[0]
    return statistics_


def remove_stale() -> None:
    """Removes what runs that were killed have left."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not Path(f"/proc/{name.split('-')[2]}").exists():
            remove(name)


def remove(namespace: str) -> None:
    """Removes a namespace of this benchmark, and the processes in it."""
    with contextlib.suppress(RuntimeError):
        for pid in run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "del", namespace)


def serve(
    network: Network,
    index: int,
    count: int,
    chunk_kib: int,
    stack: contextlib.ExitStack,
    *,
    host: int | None = None,
    port: int = PORT,
    more: Sequence[str] = ("--insecure",),
) -> None:
    """Starts a shard on the host of its index, or on another."""
    host = index if host is None else host
    words = [sys.executable, "-m", "shardwell_server", "serve", "--shard-index", str(index)]
    words += ["--shard-count", str(count), "--listen", f"{network.address(host)}:{port}", *more]
    words += ["--log-level", "error", "--chunk-size-bytes", str(chunk_kib * 1024), PARENT_FLAG]
    process = subprocess.Popen(
        network.command(host, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.callback(_end, process)
    assert process.stdout is not None
    if "serving" not in (line := process.stdout.readline()):
        raise RuntimeError(f"shard {index} did not start: {line!r}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def crews(
    args: argparse.Namespace, network: Network, count: int, stack: contextlib.ExitStack
) -> list[tuple[str, str, str, Crew, dict[str, Any]]]:
    """Starts all; (name, label, codec, crew, order) of each row."""
    for index in range(count):
        serve(network, index, count, args.chunk_kib, stack)
    target = ",".join(f"{network.address(index)}:{PORT}" for index in range(count))

    def crew(
        worker: str, *flags: str, with_host: bool = False, variables: dict[str, str] = INSECURE
    ) -> Crew:
        commands = []
        for index in range(count):
            more = ("--host", network.address(index)) if with_host else ()
            commands.append(network.command(index, worker_command(worker, *flags, *more)))
        return stack.enter_context(Crew(commands, count, variables))

    ring = crew("shardwell_group.py", "--rendezvous", target, "--strategies", "ring")
    bare = crew("bare_ring.py", with_host=True)
    flags = ("--shards", target, "--megabytes", str(args.megabytes), "--codec", "fp16")
    exchange = crew("shardwell_exchange.py", *flags)
    rows: list[tuple[str, str, str, Crew, dict[str, Any]]] = []
    for codec in ("fp16", "fp32"):
        order = {"strategy": "ring", "codec": codec}
        rows.append((f"ring_{codec}", f"all-reduce {codec}", codec, ring, order))
        rows.append((f"bare_{codec}", f"bare gRPC {codec}", codec, bare, {"codec": codec}))
    rows.append(("exchange_fp16", "exchange fp16", "fp16", exchange, {}))
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    hosts = [network.address(index) for index in range(count)]
    files = make_certificates(directory, hosts, 1)
    tokens, token = make_tokens(directory)
    of_shards = [f"--tls-cert={files.server}", f"--tls-key={files.server_key}"]
    of_shards += [f"--tls-client-ca={files.ca}", f"--tokens={tokens}"]
    for index in range(count):
        serve(network, index, count, args.chunk_kib, stack, port=PORT + 1, more=of_shards)
    variables = {
        CA_VARIABLE: str(files.ca),
        CERT_VARIABLE: str(files.client),
        KEY_VARIABLE: str(files.client_key),
        TOKEN_FILE_VARIABLE: str(token),
    }
    closed = ",".join(f"{host}:{PORT + 1}" for host in hosts)
    flags = ("--shards", closed, *flags[2:])
    exchange = crew("shardwell_exchange.py", *flags, variables=variables)
    rows.append(("exchange_closed", "exchange fp16, TLS, token", "fp16", exchange, {}))
    return rows


def busy_s() -> float:
    """Seconds that the cores have worked, all together: what is not idle."""
    user, nice, system, _, _, interrupts, soft_interrupts = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def bound_bytes(count: int, megabytes: int, codec: str) -> float:
    """What must leave each host, and as much must come in: see the module."""
    return 2 * (count - 1) / count * megabytes * 10**6 / 4 * CODECS[codec].item_size


def measure(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Figures by row; rows take turns."""
    with Network(count, args.mbit, args.congestion) as network, contextlib.ExitStack() as stack:
        rows = crews(args, network, count, stack)
        steps: dict[str, list[Step]] = {row[0]: [] for row in rows}
        sent: dict[str, list[int]] = {row[0]: [] for row in rows}
        cores: dict[str, list[float]] = {row[0]: [] for row in rows}
        drops: dict[str, int] = dict.fromkeys(steps, 0)
        for number in range(args.steps + WARM_UP_COUNT):
            for name, _, _, crew, order in rows:
                before, dropped, worked = network.sent_bytes(), network.drop_count(), busy_s()
                step = crew.step(do="step", megabytes=args.megabytes, **order)
                worked = busy_s() - worked
                if number < WARM_UP_COUNT:
                    continue
                steps[name].append(step)
                cores[name].append(worked / step.seconds)
                drops[name] += network.drop_count() - dropped
                ends = zip(before, network.sent_bytes(), strict=True)
                sent[name].append(
                    max(b - a for old, new in ends for a, b in zip(old, new, strict=True))
                )
        found: dict[str, Any] = {"congestion_control": network.congestion_control(), "rows": {}}
        for name, label, codec, _, _ in rows:
            needed_bytes = bound_bytes(count, args.megabytes, codec)
            raw_ms = needed_bytes * 8 / args.mbit / 1e3
            goodput_ms = raw_ms * FRAME_BYTES / FRAME_DATA_BYTES
            median_ms = statistics.median(step.seconds for step in steps[name]) * 1e3
            found["rows"][name] = {
                "label": label,
                "median_ms": round(median_ms, 1),
                "raw_bound_ms": round(raw_ms, 1),
                "goodput_bound_ms": round(goodput_ms, 1),
                "of_raw": round(raw_ms / median_ms, 3),
                "of_goodput": round(goodput_ms / median_ms, 3),
                "cable_over_bound": round(
                    statistics.median(sent[name]) / (needed_bytes * FRAME_BYTES / FRAME_DATA_BYTES),
                    4,
                ),
                "cores": round(statistics.median(cores[name]), 2),
                "drops": drops[name],
            }
        return found


COLUMNS = {
    "median_ms": ("ms", "{:.0f}"),
    "raw_bound_ms": ("raw", "{:.0f}"),
    "of_raw": ("%", "{:.0%}"),
    "goodput_bound_ms": ("good", "{:.0f}"),
    "of_goodput": ("%", "{:.0%}"),
    "cable_over_bound": ("bytes", "{:.3f}"),
    "cores": ("cores", "{:.1f}"),
    "drops": ("drops", "{}"),
}


def why_not() -> str | None:
    """Why this machine can't do it."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "tc", "sysctl"):
        if shutil.which(program) is None:
            return f"there is no {program}; on Debian and Ubuntu: apt-get install iproute2 procps"
    try:
        with Network(1, 1000, ""):
            return None
    except (RuntimeError, OSError) as error:
        return f"no namespaces with links of a known rate here: {error}"


def stop(number: int, frame: object) -> None:
    """On signals: so that everything is cleaned up."""
    raise SystemExit(f"stopped by {signal.Signals(number).name}; what was made is removed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--chunk-kib", type=int, default=1024, help="of the parameter server")
    parser.add_argument("--congestion", default="cubic", help='of TCP; "": this machine\'s')
    parser.add_argument("--limit-s", type=int, default=300, help="stops itself after so long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(args.limit_s)
    reason = why_not()
    if reason is not None:
        console.print(f"skipped: {reason}", soft_wrap=True)
        return
    results = {}
    for count in args.hosts:
        found = results[count] = measure(args, count)
        table = Table(
            title=f"{count} hosts, {args.mbit} Mbit/s, {args.megabytes} MB of float32, "
            f"{args.steps} steps; {found['congestion_control']}; {os.cpu_count()} cores in all",
            title_justify="left",
            box=box.SIMPLE,
        )
        table.add_column("", no_wrap=True)
        for title, _ in COLUMNS.values():
            table.add_column(title, justify="right", no_wrap=True)
        for figures in found["rows"].values():
            cells = (form.format(figures[name]) for name, (_, form) in COLUMNS.items())
            table.add_row(figures["label"], *cells)
        console.print(table)
    console.print(
        "ms: median; raw, good: raw and goodput bound in ms, and how much of it was reached; "
        "bytes: of the fullest cable / goodput bound's; "
        "cores: busy, of this whole machine; drops: of full queues"
    )
    result = {
        "mbit": args.mbit,
        "megabytes": args.megabytes,
        "chunk_kib": args.chunk_kib,
        "hosts": results,
    }
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

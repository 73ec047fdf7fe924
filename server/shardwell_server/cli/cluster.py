"""`shardwell cluster`: all shards on this machine."""

from __future__ import annotations

import contextlib
import math
import random
import shlex
import signal
import socket
import tempfile
import time
from pathlib import Path

import click

from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls
from shardwell.errors import ShardwellError
from shardwell.specs.names import parse_target
from shardwell_server import signals
from shardwell_server.access.access import Access
from shardwell_server.cli.certs import LOCAL_HOSTS
from shardwell_server.cli.options import GivenPath, usage_errors
from shardwell_server.config import LOCAL_SHARD_COUNT_MAX, Durability
from shardwell_server.local_cluster import LocalCluster
from shardwell_server.shard_process import NOT_READY, START_TIMEOUT_S, not_started
from shardwell_server.store.files.data_dir import (
    DataDirError,
    kept_shard_count,
    read_record,
    write_record,
)

_LOCALHOST = "127.0.0.1"
_PORTS = range(20_000, 32_768)
_SHARD_COUNT = 2
_RECORD_NAME = "cluster.json"
"""In the data directory: where the shards listened last."""
_LOOK_INTERVAL_S = 0.1
_CERTIFICATE_DAYS = 365
"""Each start makes new ones."""
_DEATH_COUNT_MAX = 1000
"""Deaths of one shard after which something else must be wrong."""
_FAILED_START_COUNT_MAX = 3
"""Starts, one after another, that a shard ended by itself: its files are damaged, say."""
_CODES_OF_OTHERS = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Codes of a shard that ended by itself in order, or by a signal from outside."""


@click.command()
@click.option(
    "--shard-count",
    type=click.IntRange(1, LOCAL_SHARD_COUNT_MAX),
    envvar="SHARDWELL_SHARD_COUNT",
    help=f"Number of shards, each a process; default: that of DATA_DIR, or {_SHARD_COUNT}.",
)
@click.option(
    "--data-dir",
    type=GivenPath(file_okay=False),
    envvar="SHARDWELL_DATA_DIR",
    help="Each shard gets a directory shard-I in it, goes on from it, and is started again when it "
    "dies.",
)
@click.option(
    "--durability",
    default="process",
    show_default=True,
    envvar="SHARDWELL_DURABILITY",
    metavar="process|step|SECONDS",
    help="What acknowledged gradients survive: kill -9; loss of power; that, but the last SECONDS.",
)
@click.option(
    "--tls",
    "with_tls",
    is_flag=True,
    help="TLS on both sides, with certificates that are made for it, in DATA_DIR/certs if there is "
    "a data directory.",
)
@click.option(
    "--tokens",
    type=GivenPath(),
    envvar="SHARDWELL_TOKENS",
    help="File of tokens, made by `shardwell token`: each call needs one with a right to it.",
)
@click.option(
    "--contribution-dir",
    type=GivenPath(file_okay=False),
    envvar="SHARDWELL_CONTRIBUTION_DIR",
    help="Each shard writes shard-I.jsonl in it: the contributors of each chunk's steps, where "
    "steps may close without a worker.",
)
@click.option(
    "--admin-listen",
    default="",
    envvar="SHARDWELL_ADMIN_LISTEN",
    metavar="HOST:PORT",
    help="Probes, metrics and a status page, of shard 0; the others' are on the ports after it. "
    "Port 0 takes free ones. Without: none.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    envvar="SHARDWELL_LOG_LEVEL",
    help="The least that the shards log.",
)
def cluster(
    *,
    shard_count: int | None,
    data_dir: Path | None,
    durability: str,
    with_tls: bool,
    tokens: Path | None,
    contribution_dir: Path | None,
    admin_listen: str,
    log_level: str,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C.

    Prints the line that workers need in their environment.
    """
    signals.hold()
    if shard_count is None:
        shard_count = (data_dir and kept_shard_count(data_dir)) or _SHARD_COUNT
    with usage_errors():
        Durability(durability).check_files(data_dir is not None)
        Access(tokens=tokens)
    with contextlib.ExitStack() as stack:
        tls: Tls | None = None
        variables = ""
        if with_tls:
            tls, variables = _own_certificates(stack, data_dir)
        with signals.breaking_off():
            running = stack.enter_context(
                LocalCluster(
                    shard_count,
                    data_dir,
                    processes=True,
                    addresses=_addresses(data_dir, shard_count),
                    durability=durability,
                    tls=tls,
                    tokens=tokens,
                    contribution_dir=contribution_dir,
                    admin_listen=admin_listen,
                    log_level=log_level,
                )
            )
        if data_dir is not None:
            _note_addresses(data_dir / _RECORD_NAME, running.target)
        click.echo(f"export SHARDWELL_SHARDS={running.target}{variables}")
        click.echo(
            f"# cluster {running.cluster_id}: {shard_count} shards are serving; Ctrl-C stops them",
            err=True,
        )
        if running.admin_urls:
            click.echo(f"# status page: {running.admin_urls[0]}", err=True)
        watched = [_WatchedShard(running, index, data_dir) for index in range(shard_count)]
        while not signals.is_asked_to_stop():
            for shard in watched:
                shard.look()
            time.sleep(_LOOK_INTERVAL_S)
        if data_dir is not None:
            click.echo("# the same command goes on from these files, on these ports", err=True)


def _addresses(data_dir: Path | None, shard_count: int) -> list[str] | None:
    """Where the shards are to listen; None: on any free ports.

    Raises:
        ClickException: the record of their ports can't be used.
    """
    if data_dir is None:
        return None
    path = data_dir / _RECORD_NAME
    try:
        found = parse_target(read_record(path)[0]["shards"])
        if not all(each.startswith(f"{_LOCALHOST}:") for each in found):
            raise ValueError(f"expected addresses on {_LOCALHOST}, found {found}")
    except FileNotFoundError:
        return _lasting_addresses(shard_count)
    except (OSError, ValueError, LookupError, ShardwellError) as error:
        raise click.ClickException(
            f"{path}, which has the ports of the shards, can't be read ({error}); remove it, and "
            "they take free ones"
        ) from None
    return found if len(found) == shard_count else None  # another number is refused


def _note_addresses(path: Path, target: str) -> None:
    """Keeps where the shards listen, if it has changed; they serve all the same where it can't."""
    try:
        with contextlib.suppress(OSError, ValueError, LookupError, ShardwellError):
            if read_record(path)[0]["shards"] == target:
                return
        write_record(path, {"shards": target})
    except DataDirError as error:
        click.echo(f"# other ports the next time: {error.message}", err=True)


def _lasting_addresses(count: int) -> list[str]:
    """Free ones, on ports that no system gives to connections while the shards are down."""
    found: list[str] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_LOCALHOST, port))
            found.append(f"{_LOCALHOST}:{port}")
        if len(found) == count:
            break
    return found


def _own_certificates(stack: contextlib.ExitStack, data_dir: Path | None) -> tuple[Tls, str]:
    """What the shards have, and what follows in the line that workers need."""
    from shardwell_server.certificates import make_certificates  # a tenth of a second

    directory = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwell-certs-")))
        if data_dir is None
        else data_dir / "certs"
    )
    files = make_certificates(directory, LOCAL_HOSTS, _CERTIFICATE_DAYS)
    workers = {
        CA_VARIABLE: files.ca,
        CERT_VARIABLE: files.client,
        KEY_VARIABLE: files.client_key,
    }
    variables = "".join(f" {name}={shlex.quote(str(path))}" for name, path in workers.items())
    return Tls(ca=files.ca, cert=files.server, key=files.server_key), variables


class _WatchedShard:
    """A shard that is started again when it has died. Nothing here waits, so all are watched."""

    def __init__(self, running: LocalCluster, index: int, data_dir: Path | None) -> None:
        self._running = running
        self._index = index
        self._data_dir = data_dir
        self._death_count = 0
        self._failed_start_count = 0
        self._last_code: int | None = None
        """What it ended with, while it is being started again."""
        self._start_deadline_s = math.inf

    def look(self) -> None:
        """Starts it again if it has ended.

        Raises:
            ClickException: that would be of no use.
            ShardUnavailableError: it was of none.
        """
        if self._last_code is not None:
            self._look_at_start()
        code = self._running.children[self._index].poll()
        if code is not None:
            self._died(code)

    def _look_at_start(self) -> None:
        if self._running.begins_to_serve(self._index):
            assert self._data_dir is not None
            self._tell(
                f"had ended with exit code {self._last_code}, and goes on from "
                f"{self._data_dir / f'shard-{self._index}'}"
            )
            self._last_code = None
            self._failed_start_count = 0
        elif time.monotonic() > self._start_deadline_s:
            raise not_started(self._index, NOT_READY)

    def _died(self, code: int) -> None:
        self._death_count += 1
        if self._data_dir is None or self._death_count > _DEATH_COUNT_MAX:
            cause = ""
            if self._data_dir is None:
                cause = (
                    ", and its part of the weights is lost: with --data-dir it is started again on "
                    "its files"
                )
            raise click.ClickException(
                f"shard {self._index} has ended with exit code {code}; the others are "
                f"stopped{cause}"
            )
        if self._last_code is not None:
            self._failed_start_count += code not in _CODES_OF_OTHERS
            if self._failed_start_count >= _FAILED_START_COUNT_MAX:
                raise not_started(self._index, f"exit code {code}")
            self._tell(f"ended with exit code {code} before it served, and is started once more")
        self._last_code = code
        self._running.begin_start(self._index)
        self._start_deadline_s = time.monotonic() + START_TIMEOUT_S

    def _tell(self, what: str) -> None:
        click.echo(f"# shard {self._index} {what}", err=True)

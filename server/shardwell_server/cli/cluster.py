"""`shardwell cluster`: all shards on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from shardwell.connection.tls import Tls
from shardwell.errors import ShardwellError
from shardwell.specs.names import parse_target
from shardwell_server.access.access import Access
from shardwell_server.cli.credentials import LOCAL_HOSTS, exported
from shardwell_server.cli.options import (
    GivenPath,
    durability_option,
    log_level_option,
    option,
    setting,
    shard_count_option,
    tokens_option,
    usage_errors,
)
from shardwell_server.config import Durability
from shardwell_server.local_cluster import LocalCluster
from shardwell_server.processes import signals
from shardwell_server.processes.shard import (
    NOT_READY,
    START_TIMEOUT_S,
    ShardProcess,
    not_started,
)
from shardwell_server.processes.supervise import Change, Restarts, State
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
_LOOK_INTERVAL_S = 0.1
_CERTIFICATE_DAYS = 365
"""Each start makes new ones."""
_RESTART_COUNT_MAX = 1000
_UNREADY_COUNT_MAX = 3
"""Starts, one after another, that a shard ended by itself: its files are damaged, say."""


@click.command()
@shard_count_option(
    f"Number of shards, each a process; default: that of DATA_DIR, or {_SHARD_COUNT}.", None
)
@setting(
    "--data-dir",
    "Each shard gets a directory shard-I in it, goes on from it, and is started again when it "
    "dies.",
    GivenPath(file_okay=False),
)
@durability_option
@option(
    "--tls",
    "TLS on both sides, with certificates that are made for it, in DATA_DIR/certs if there is "
    "a data directory.",
    name="with_tls",
    is_flag=True,
)
@tokens_option
@setting(
    "--contribution-dir",
    "Each shard writes shard-I.jsonl in it: the contributors of each chunk's steps, where "
    "steps may close without a worker.",
    GivenPath(file_okay=False),
)
@setting(
    "--admin-listen",
    "Probes, metrics and a status page, of shard 0; the others' are on the ports after it. "
    "Port 0 takes free ones. Without: none.",
    default="",
    show_default=False,
    metavar="HOST:PORT",
)
@log_level_option("warning", "The least that the shards log.")
def cluster(
    *, shard_count: int | None, data_dir: Path | None, with_tls: bool, **settings: Any
) -> None:
    """Run a whole cluster on this machine until Ctrl-C.

    Prints the line that workers need in their environment.
    """
    signals.hold()
    if shard_count is None:
        shard_count = (data_dir and kept_shard_count(data_dir)) or _SHARD_COUNT
    with usage_errors():
        Durability(settings["durability"]).check_files(data_dir is not None)
        Access(tokens=settings["tokens"])
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
                    tls=tls,
                    **settings,
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
        places = running.supervisor.places
        for place in places:
            place.rule = Restarts(
                count_max=0 if data_dir is None else _RESTART_COUNT_MAX,
                done_codes=(),
                unready_count_max=_UNREADY_COUNT_MAX,
                ready_s=START_TIMEOUT_S,
            )
        while not signals.is_asked_to_stop():
            for change in running.supervisor.look():
                _say(places.index(change.place), change, data_dir)
            time.sleep(_LOOK_INTERVAL_S)
        if data_dir is not None:
            click.echo("# the same command goes on from these files, on these ports", err=True)


def _addresses(data_dir: Path | None, shard_count: int) -> list[str] | None:
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
    """Notes changed addresses; the shards serve without the note, too."""
    try:
        with contextlib.suppress(OSError, ValueError, LookupError, ShardwellError):
            if read_record(path)[0]["shards"] == target:
                return
        write_record(path, {"shards": target})
    except DataDirError as error:
        click.echo(f"# other ports the next time: {error.message}", err=True)


def _lasting_addresses(count: int) -> list[str]:
    """Returns free addresses, whose ports no system gives to connections meanwhile."""
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
    from shardwell_server.operations.certificates import make_certificates  # a tenth of a second

    directory = (
        Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwell-certs-")))
        if data_dir is None
        else data_dir / "certs"
    )
    files = make_certificates(directory, LOCAL_HOSTS, _CERTIFICATE_DAYS)
    variables = exported(ca=files.ca, cert=files.client, key=files.client_key)
    return Tls(ca=files.ca, cert=files.server, key=files.server_key), f" {variables}"


def _say(index: int, change: Change[ShardProcess], data_dir: Path | None) -> None:
    """Raises an error where the shard has ended, and another start would be of no use."""
    place, was = change.place, change.was
    code = f"exit code {place.code}"
    words = ""
    if place.state is State.FAILED and was is State.STARTING:
        raise not_started(index, code if change.words else NOT_READY)
    if place.state is State.FAILED:
        words = (
            ""
            if data_dir
            else ", and its part of the weights is lost: with --data-dir it is started again on "
            "its files"
        )
        ended = change.words if was is State.PAUSING else f"has ended with {code}"
        raise click.ClickException(f"shard {index} {ended}; the others are stopped{words}")
    if place.state is State.PAUSING and was is State.STARTING:
        words = f"ended with {code} before it served, and is started once more"
    elif place.state is was is State.PAUSING:
        words = f"{change.words}; it is tried again"
    elif place.state is State.RUNNING and place.restart_count:
        assert data_dir is not None
        words = f"had ended with {code}, and goes on from {data_dir / f'shard-{index}'}"
    if words:
        click.echo(f"# shard {index} {words}", err=True)

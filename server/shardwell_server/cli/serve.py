"""`shardwell serve`: one shard."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from shardwell.client import TARGET_VARIABLE
from shardwell.connection.tls import Tls, TlsFiles
from shardwell.errors import ArgumentError
from shardwell.specs.names import parse_target
from shardwell_server.access.access import Access
from shardwell_server.cli.options import (
    GivenPath,
    durability_option,
    log_level_option,
    setting,
    tokens_option,
    usage_errors,
)
from shardwell_server.cli.quantities import ByteCount, Duration
from shardwell_server.config import Durability, Limits, ShardConfig
from shardwell_server.logs import LogFormat, configure_logs
from shardwell_server.processes import signals
from shardwell_server.processes.own import become_shard, stop_when_parent_ends
from shardwell_server.processes.shard import SERVING_LINE
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir

_LIMITS = {
    "parameter_count_max": "Parameters on this shard.",
    "table_count_max": "Tables on this shard.",
    "table_row_count_max": "Rows of one table on this shard; a table keeps what it was made with.",
    "stored_bytes_max": "Bytes of weights, sums, optimizer state and images of what is stored.",
    "worker_count_max": "Workers that have a seat in one parameter or table.",
    "session_count_max": "Clients connected at once.",
    "stream_count_max": "Streams open at once, one for each call of a worker. Idle ones give way.",
    "answer_bytes_max": "Bytes of answers that wait for clients to read them.",
    "arena_bytes_max": "Bytes of memory that clients on this machine share with the shard.",
    "encoded_chunk_count_max": "Encoded chunks of weights kept a parameter for workers in step.",
    "wait_max_s": "Longest wait of a call for other workers, whatever timeout it asks for.",
    "init_claim_s": "Seconds to send first weights, before another client may take over.",
    "abandoned_after_s": "How long no worker may be connected before a job counts as abandoned.",
    "snapshot_count_max": "Snapshots of one parameter, for checkpoints, under way at once.",
    "learning_rate_change_count_max": "Changes of a learning rate scheduled for steps to come.",
}
_LOG = logging.getLogger("shardwell_server")


def _limit_type(name: str) -> Duration | ByteCount | type[int]:
    if name.endswith("_s"):
        return Duration()
    return ByteCount() if name.endswith("_bytes_max") else int


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, what in reversed(_LIMITS.items()):
        flag = f"--{name.replace('_', '-')}"
        command = setting(flag, what, _limit_type(name), default=getattr(Limits, name))(command)
    return command


@click.command()
@setting("--shard-index", "0-based place in the cluster's order.", int, required=True)
@setting("--shard-count", "Shards of the cluster.", int, required=True)
@setting(
    "--listen",
    "Port 0 takes a free one. Other machines reach it with 0.0.0.0 or its own address.",
    default="127.0.0.1:7070",
    metavar="HOST:PORT",
)
@setting(
    "--data-dir",
    "Directory of this shard alone, which it goes on from. Without: all is in memory.",
    GivenPath(file_okay=False),
)
@durability_option
@setting("--cluster-id", "The same on all shards of a cluster.", default=ShardConfig.cluster_id)
@setting(
    "--chunk-size-bytes",
    "Encoded bytes of a chunk, a multiple of 64, at most 1048576.",
    ByteCount(),
    default=ShardConfig.chunk_size_bytes,
)
@setting(
    "--threads",
    "Threads that work on a stream's chunks at once; the bits do not depend on it.",
    int,
    show_default="half as many as cores, up to 8",
)
@setting(
    "--grace-s",
    "Seconds that open streams get after SIGTERM.",
    Duration(0.0),
    default=ShardConfig.grace_s,
)
@setting(
    "--session-lease-s",
    "Seconds until a client whose machine vanished counts as gone.",
    Duration(1.0, 86400.0),
    default=ShardConfig.session_lease_s,
)
@setting(
    "--same-host",
    "Share memory with clients of this machine; DIRECTORY: one that containers share.",
    default=ShardConfig.same_host,
    metavar="auto|off|DIRECTORY",
)
@setting(
    "--tls-cert",
    "The shard's certificate, PEM, made by `shardwell certs`, say; with it all speak TLS.",
    GivenPath(),
)
@setting("--tls-key", "The certificate's key, PEM.", GivenPath())
@setting(
    "--tls-client-ca",
    "Whose clients are let in, PEM. Without: clients need no certificate.",
    GivenPath(),
    envvar=["SHARDWELL_TLS_CLIENT_CA", "SHARDWELL_TLS_CA"],
)
@setting(
    "--connection-age-s",
    "Seconds after which a connection over TLS is replaced, and old certificates with it.",
    Duration(1.0, 86400.0),
    default=ShardConfig.connection_age_s,
)
@tokens_option
@setting(
    "--jwt-keys",
    "File of keys, a JSON Web Key Set: whose JWTs are taken as tokens.",
    GivenPath(),
)
@click.option("--same-token", type=GivenPath(), hidden=True)
@setting(
    "--insecure", "Let other machines in without TLS or tokens; else that is refused.", is_flag=True
)
@setting(
    "--audit-log",
    "File for who opened, made, restored or removed what, and who was refused; JSON lines.",
    GivenPath(),
)
@setting(
    "--contribution-log",
    "File for the contributors of each chunk's steps, where steps may close without a worker; "
    "JSON lines.",
    GivenPath(),
)
@setting(
    "--admin-listen",
    "Probes, metrics and a status page over HTTP. Without: none.",
    default=ShardConfig.admin_listen,
    show_default=False,
    metavar="HOST:PORT",
)
@setting(
    "--cluster",
    "All shards, in order, for the status page. Without: it shows this shard alone.",
    default="",
    show_default=False,
    envvar=TARGET_VARIABLE,
    metavar="HOST:PORT,...",
)
@setting(
    "--worker-metrics/--no-worker-metrics",
    "Metrics of each worker by its name: each is a time series.",
    default=ShardConfig.worker_metrics,
)
@setting(
    "--reflection/--no-reflection",
    "Answer gRPC reflection, for grpcurl and the like.",
    default=ShardConfig.reflection,
    show_default=False,
)
@click.option("--exit-with-parent", is_flag=True, hidden=True)
@_limit_options
@log_level_option("info", "The least that is logged.")
@setting(
    "--log-format",
    "auto: for people on a terminal, else JSON lines.",
    click.Choice(get_args(LogFormat)),
    default="auto",
)
def serve(
    *,
    data_dir: Path | None,
    exit_with_parent: bool,
    log_level: str,
    log_format: LogFormat,
    cluster: str,
    **settings: Any,
) -> None:
    """Serve one shard until SIGTERM or Ctrl-C; exit code 0.

    Prints "serving on HOST:PORT" when it is ready; logs go to stderr.
    """
    signals.hold()
    configure_logs(log_level, log_format, shard_index=settings["shard_index"])
    for name in ("SHARDWELL_TOKENS", "SHARDWELL_JWT_KEYS"):
        if os.environ.get(name) == "":  # of a variable that was not set, say
            raise click.UsageError(
                f"${name} is empty; give a path, or unset it to ask for no token"
            )
    with usage_errors():
        config = ShardConfig(
            tls=_tls(*(settings.pop(f"tls_{part}") for part in ("cert", "key", "client_ca"))),
            cluster=tuple(parse_target(cluster)) if settings["admin_listen"] and cluster else (),
            durability=Durability(settings.pop("durability")),
            limits=Limits(**{name: settings.pop(name) for name in _LIMITS}),
            **settings,
        )
        config.durability.check_files(data_dir is not None)
        Access.of(config)
    become_shard()
    if exit_with_parent:
        stop_when_parent_ends(signals.ask_to_stop)
    with contextlib.ExitStack() as stack:
        claimed = None if data_dir is None else stack.enter_context(DataDir(data_dir, config))
        if claimed is None:
            _LOG.info(
                "no data directory was given: weights are in memory and end with this process"
            )
        server = stack.enter_context(ShardServer(config, claimed))
        click.echo(f"{SERVING_LINE}{server.address}")
        if server.admin is not None:
            click.echo(f"status page: {server.admin.url}")
        signals.wait()


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> Tls | None:
    if cert is None and key is None:
        if client_ca is None:
            return None
        raise ArgumentError("--tls-client-ca needs --tls-cert and --tls-key: no TLS without them")
    tls = Tls(ca=client_ca, cert=cert, key=key)
    TlsFiles(tls)
    return tls

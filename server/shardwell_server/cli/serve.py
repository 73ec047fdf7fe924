"""`shardwell serve`: one shard."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardwell.connection.credentials import INSECURE_VARIABLE
from shardwell.connection.tls import Tls, TlsFiles
from shardwell.errors import ArgumentError
from shardwell.specs.names import parse_target
from shardwell_server.access.access import Access
from shardwell_server.cli.options import GivenPath, usage_errors
from shardwell_server.cli.quantities import ByteCount, Duration
from shardwell_server.config import Durability, Limits, ShardConfig
from shardwell_server.logs import configure_logs
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


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds one option for each limit, named as it is."""
    defaults = Limits()
    for field in reversed(dataclasses.fields(Limits)):
        default = getattr(defaults, field.name)
        command = click.option(
            f"--{field.name.replace('_', '-')}",
            type=_limit_type(field.name),
            default=default,
            show_default=True,
            envvar=f"SHARDWELL_{field.name.upper()}",
            help=_LIMITS[field.name],
        )(command)
    return command


def log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options for the logs on stderr."""
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        envvar="SHARDWELL_LOG_LEVEL",
        help="The least that is logged.",
    )
    form = click.option(
        "--log-format",
        type=click.Choice(["auto", "console", "json"]),
        default="auto",
        show_default=True,
        envvar="SHARDWELL_LOG_FORMAT",
        help="auto: for people on a terminal, else JSON lines.",
    )
    return level(form(command))


@click.command()
@click.option(
    "--shard-index",
    type=int,
    required=True,
    envvar="SHARDWELL_SHARD_INDEX",
    help="0-based place in the cluster's order.",
)
@click.option(
    "--shard-count",
    type=int,
    required=True,
    envvar="SHARDWELL_SHARD_COUNT",
    help="Shards of the cluster.",
)
@click.option(
    "--listen",
    default="127.0.0.1:7070",
    show_default=True,
    envvar="SHARDWELL_LISTEN",
    metavar="HOST:PORT",
    help="Port 0 takes a free one. Other machines reach it with 0.0.0.0 or its own address.",
)
@click.option(
    "--data-dir",
    type=GivenPath(file_okay=False),
    envvar="SHARDWELL_DATA_DIR",
    help="Directory of this shard alone, which it goes on from. Without: all is in memory.",
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
    "--cluster-id",
    default="shardwell",
    show_default=True,
    envvar="SHARDWELL_CLUSTER_ID",
    help="The same on all shards of a cluster.",
)
@click.option(
    "--chunk-size-bytes",
    type=ByteCount(),
    default=2**20,
    show_default=True,
    envvar="SHARDWELL_CHUNK_SIZE_BYTES",
    help="Encoded bytes of a chunk, a multiple of 64, at most 1048576.",
)
@click.option(
    "--threads",
    type=int,
    envvar="SHARDWELL_THREADS",
    show_default="half as many as cores, up to 8",
    help="Threads that work on a stream's chunks at once; the bits do not depend on it.",
)
@click.option(
    "--grace-s",
    type=Duration(0.0),
    default=5.0,
    show_default=True,
    envvar="SHARDWELL_GRACE_S",
    help="Seconds that open streams get after SIGTERM.",
)
@click.option(
    "--session-lease-s",
    type=Duration(1.0, 86400.0),
    default=30.0,
    show_default=True,
    envvar="SHARDWELL_SESSION_LEASE_S",
    help="Seconds until a client whose machine vanished counts as gone.",
)
@click.option(
    "--same-host",
    default="auto",
    show_default=True,
    envvar="SHARDWELL_SAME_HOST",
    metavar="auto|off|DIRECTORY",
    help="Share memory with clients of this machine; DIRECTORY: one that containers share.",
)
@click.option(
    "--tls-cert",
    type=GivenPath(),
    envvar="SHARDWELL_TLS_CERT",
    help="The shard's certificate, PEM, made by `shardwell certs`, say; with it all speak TLS.",
)
@click.option(
    "--tls-key", type=GivenPath(), envvar="SHARDWELL_TLS_KEY", help="The certificate's key, PEM."
)
@click.option(
    "--tls-client-ca",
    type=GivenPath(),
    envvar=["SHARDWELL_TLS_CLIENT_CA", "SHARDWELL_TLS_CA"],
    help="Whose clients are let in, PEM. Without: clients need no certificate.",
)
@click.option(
    "--connection-age-s",
    type=Duration(1.0, 86400.0),
    default=3600.0,
    show_default=True,
    envvar="SHARDWELL_CONNECTION_AGE_S",
    help="Seconds after which a connection over TLS is replaced, and old certificates with it.",
)
@click.option(
    "--tokens",
    type=GivenPath(),
    envvar="SHARDWELL_TOKENS",
    help="File of tokens, made by `shardwell token`: each call needs one with a right to it.",
)
@click.option(
    "--jwt-keys",
    type=GivenPath(),
    envvar="SHARDWELL_JWT_KEYS",
    help="File of keys, a JSON Web Key Set: whose JWTs are taken as tokens.",
)
@click.option("--same-token", type=GivenPath(), hidden=True)
@click.option(
    "--insecure",
    is_flag=True,
    envvar=INSECURE_VARIABLE,
    help="Let other machines in without TLS or tokens; else that is refused.",
)
@click.option(
    "--audit-log",
    type=GivenPath(),
    envvar="SHARDWELL_AUDIT_LOG",
    help="File for who opened, made, restored or removed what, and who was refused; JSON lines.",
)
@click.option(
    "--contribution-log",
    type=GivenPath(),
    envvar="SHARDWELL_CONTRIBUTION_LOG",
    help="File for the contributors of each chunk's steps, where steps may close without a worker; "
    "JSON lines.",
)
@click.option(
    "--admin-listen",
    default="",
    envvar="SHARDWELL_ADMIN_LISTEN",
    metavar="HOST:PORT",
    help="Probes, metrics and a status page over HTTP. Without: none.",
)
@click.option(
    "--cluster",
    default="",
    envvar="SHARDWELL_SHARDS",
    metavar="HOST:PORT,...",
    help="All shards, in order, for the status page. Without: it shows this shard alone.",
)
@click.option(
    "--worker-metrics/--no-worker-metrics",
    default=True,
    show_default=True,
    envvar="SHARDWELL_WORKER_METRICS",
    help="Metrics of each worker by its name: each is a time series.",
)
@click.option(
    "--reflection/--no-reflection",
    default=False,
    envvar="SHARDWELL_REFLECTION",
    help="Answer gRPC reflection, for grpcurl and the like.",
)
@click.option("--exit-with-parent", is_flag=True, hidden=True)
@limit_options
@log_options
def serve(
    *,
    data_dir: Path | None,
    durability: str,
    exit_with_parent: bool,
    log_level: str,
    log_format: Any,
    shard_index: int,
    shard_count: int,
    listen: str,
    cluster_id: str,
    chunk_size_bytes: int,
    threads: int | None,
    grace_s: float,
    session_lease_s: float,
    same_host: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    connection_age_s: float,
    tokens: Path | None,
    jwt_keys: Path | None,
    same_token: Path | None,
    insecure: bool,
    audit_log: Path | None,
    contribution_log: Path | None,
    admin_listen: str,
    cluster: str,
    worker_metrics: bool,
    reflection: bool,
    **limits: Any,
) -> None:
    """Serve one shard until SIGTERM or Ctrl-C; exit code 0.

    Prints "serving on HOST:PORT" when it is ready; logs go to stderr.
    """
    signals.hold()
    configure_logs(log_level, log_format, shard_index=shard_index)
    for name in ("SHARDWELL_TOKENS", "SHARDWELL_JWT_KEYS"):
        if os.environ.get(name) == "":  # of a variable that was not set, say
            raise click.UsageError(
                f"${name} is empty; give a path, or unset it to ask for no token"
            )
    with usage_errors():
        config = ShardConfig(
            shard_index=shard_index,
            shard_count=shard_count,
            cluster_id=cluster_id,
            listen=listen,
            chunk_size_bytes=chunk_size_bytes,
            threads=threads,
            grace_s=grace_s,
            session_lease_s=session_lease_s,
            same_host=same_host,
            tls=_tls(tls_cert, tls_key, tls_client_ca),
            connection_age_s=connection_age_s,
            tokens=tokens,
            jwt_keys=jwt_keys,
            same_token=same_token,
            insecure=insecure,
            audit_log=audit_log,
            contribution_log=contribution_log,
            admin_listen=admin_listen,
            cluster=tuple(parse_target(cluster)) if admin_listen and cluster else (),
            worker_metrics=worker_metrics,
            reflection=reflection,
            durability=Durability(durability),
            limits=Limits(**limits),
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

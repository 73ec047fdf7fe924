"""`shardwell run`: any program as N workers on this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from concurrent import futures

import click
import grpc

from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import TOKEN_FILE_VARIABLE, Credentials, SameToken
from shardwell.connection.options import listen_on
from shardwell.connection.tls import Tls
from shardwell.errors import ShardwellError
from shardwell.group.launch import (
    GROUP_VARIABLE,
    LAUNCHER_VARIABLE,
    RENDEZVOUS_VARIABLE,
    SHARDWELL_RUN,
)
from shardwell.group.rendezvous.service import GroupService, admit_anybody, admit_same
from shardwell.specs.names import check_name, parse_target
from shardwell.threads.spread import core_count
from shardwell_server import signals
from shardwell_server.cli.options import usage_errors
from shardwell_server.cli.quantities import Duration
from shardwell_server.config import LOCAL_SHARD_COUNT_MAX
from shardwell_server.launch.run import LocalRun, guarded, say
from shardwell_server.processes import ChildProcess

_WORKER_COUNT_MAX = 256
"""Each has two pipes; 1024 open files are a usual limit."""
_RESTART_COUNT_MAX = 1000
_DEFAULT_RESTART_COUNT = 3
_RENDEZVOUS_THREAD_COUNT = 4
_LOCALHOST = "127.0.0.1"
_CODES = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}
"""Exit codes of shells for commands that can't be started."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    "worker_count",
    type=click.IntRange(1, _WORKER_COUNT_MAX),
    required=True,
    help="Workers to start, each a process.",
)
@click.option(
    "--group",
    "group_name",
    envvar=GROUP_VARIABLE,
    help="Name of the group that they join; default: a new one.",
)
@click.option(
    "--rendezvous",
    envvar=RENDEZVOUS_VARIABLE,
    metavar="HOST:PORT",
    help="Where they meet, such as a shard; default: here, served by this command.",
)
@click.option(
    "--with-shards",
    is_flag=True,
    help="A shard beside each worker, in memory, over which weights and optimizer state are split; "
    "sets $SHARDWELL_SHARDS.",
)
@click.option(
    "--grace-s",
    type=Duration(0.0, 3600.0),
    help="How long workers that are asked to stop may take before they are killed; default: 120 s "
    "after SIGTERM, in which they end the step under way, and 5 s after Ctrl-C or a failure.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="A worker that fails or is killed is started again, and the others go on.",
)
@click.option(
    "--restarts",
    "restart_count_max",
    type=click.IntRange(0, _RESTART_COUNT_MAX),
    help="With --elastic: how often each rank is started again in all; 0: never; default: "
    f"{_DEFAULT_RESTART_COUNT}.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    worker_count: int,
    group_name: str | None,
    rendezvous: str | None,
    with_shards: bool,
    grace_s: float | None,
    elastic: bool,
    restart_count_max: int | None,
    command: tuple[str, ...],
) -> None:
    """Start a program as N workers on this machine.

    shardwell run -n 4 -- python train.py --epochs 3

    Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as with
    torchrun, and where its group meets, so that join_group() needs no arguments. OMP_NUM_THREADS is
    set to the cores divided by N, unless it is set: N workers with as many threads as cores each
    would fight for the cores. Their standard input is empty.

    Every line of output has the rank in front. When a worker fails, the others get SIGTERM, and
    SIGKILL after the grace; exit code: that of the worker, 128 and the number of the signal that
    ended it, or 0 if none failed. Ctrl-C and SIGTERM are passed on; a second one kills at once.
    SIGTERM goes to each worker, and to what it has started once the worker has ended. SIGUSR1 and
    SIGUSR2, as of Slurm's --signal, go to each worker, whose handlers they are for.
    What workers have started ends with them, also when this command is killed, except what has
    made itself a session of its own.

    With --elastic, for workers that come and go (members=), one that fails is started again after a
    pause of 1 s, which doubles up to 10 s; $SHARDWELL_RESTART counts. One that ends with 0, or
    after SIGTERM to it alone (143), is done. Exit code: 0 if each rank's last process did so, else
    that of the first rank that was given up. After Ctrl-C, or SIGTERM to this command, nothing is
    started again.

    With --with-shards each worker has a shard, in a process of its own: connect() needs no target.
    They start before the workers and end after them; one that dies ends the run, also with
    --elastic.
    """
    program = _find_program(command[0])
    if elastic and restart_count_max is None:
        restart_count_max = _DEFAULT_RESTART_COUNT
    elif not elastic and restart_count_max is not None:
        raise click.UsageError(
            f"--restarts {restart_count_max} needs --elastic: without it the first failure ends all"
        )
    if with_shards and worker_count > LOCAL_SHARD_COUNT_MAX:
        raise click.UsageError(
            f"--with-shards: a machine has at most {LOCAL_SHARD_COUNT_MAX} shards; got "
            f"-n {worker_count}; start fewer workers, or `shardwell cluster` with fewer shards"
        )
    try:
        group_name = check_name("--group", group_name or f"run-{uuid.uuid4().hex[:12]}")
        if rendezvous:
            parse_target(rendezvous)
    except ShardwellError as error:
        raise click.UsageError(error.message) from None
    try:
        passing_fd = guarded(grace_s)
    except OSError as error:
        raise click.ClickException(f"can't start a process to run the workers: {error}") from error
    with contextlib.ExitStack() as stack:
        shared = {GROUP_VARIABLE: group_name}
        shards: Sequence[ChildProcess] = ()
        if with_shards:
            from shardwell_server.local_cluster import LocalCluster  # a third of a second

            with signals.breaking_off():
                cluster = stack.enter_context(
                    LocalCluster(
                        worker_count,
                        processes=True,
                        tls=Tls.from_environment(),
                        same_token=os.environ.get(TOKEN_FILE_VARIABLE) or None,
                        log_level="warning",
                    )
                )
            shards = cluster.children
            shared[TARGET_VARIABLE] = cluster.target
        shared[RENDEZVOUS_VARIABLE] = rendezvous or stack.enter_context(_served_rendezvous())
        environments = _environments(worker_count, shared)
        try:
            code = LocalRun(
                program,
                command,
                environments,
                shards,
                passing_fd=passing_fd,
                grace_s=grace_s,
                restart_count_max=restart_count_max,
            ).run()
        except OSError as error:
            say(f"can't start {worker_count} workers: {error}")
            code = _CODES.get(error.errno or 0, 1)
    raise click.exceptions.Exit(code)


@contextlib.contextmanager
def _served_rendezvous() -> Iterator[str]:
    """Serves the place where the workers meet; its address."""
    server = grpc.server(
        futures.ThreadPoolExecutor(_RENDEZVOUS_THREAD_COUNT, "shardwell-rendezvous")
    )
    with usage_errors():
        credentials = Credentials.of()
    token = credentials.token
    admit = admit_anybody if token is None else admit_same(SameToken(token))
    server.add_generic_rpc_handlers([GroupService(admit=admit).handler()])
    port = listen_on(server, f"{_LOCALHOST}:0", credentials.tls)
    server.start()
    try:
        yield f"{_LOCALHOST}:{port}"
    finally:
        server.stop(None).wait()


def _environments(worker_count: int, given: dict[str, str]) -> list[dict[str, str]]:
    with socket.create_server((_LOCALHOST, 0)) as listener:
        free_port = listener.getsockname()[1]
    shared = {
        "OMP_NUM_THREADS": str(max(1, core_count() // worker_count)),
        **{name: value for name, value in os.environ.items() if value or name != "OMP_NUM_THREADS"},
        "WORLD_SIZE": str(worker_count),
        "LOCAL_WORLD_SIZE": str(worker_count),
        "MASTER_ADDR": _LOCALHOST,
        "MASTER_PORT": str(free_port),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_VARIABLE: SHARDWELL_RUN,
        **given,
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(worker_count)]


def _find_program(name: str) -> str:
    """Its path. Exits as a shell does if there is none."""
    program = shutil.which(name)
    if program is not None:
        return program
    if os.path.exists(name) and (os.sep in name or name.endswith(".py")):
        what = "is a directory" if os.path.isdir(name) else "is not executable"
        code = _CODES[errno.EACCES]
    else:
        what, code = "was not found", _CODES[errno.ENOENT]
    hint = f"; to run a Python program: -- python {name}" if name.endswith(".py") else ""
    say(f"{name} {what}{hint}")
    raise click.exceptions.Exit(code)

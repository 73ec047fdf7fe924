"""Options that several commands have, and how commands connect to a cluster within their time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click

import shardwell
from shardwell.checkpoint.stores import StorePath, place_of
from shardwell.client import TARGET_VARIABLE
from shardwell.connection.credentials import Credentials
from shardwell.errors import ArgumentError
from shardwell.process.local_paths import local_path
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.specs.names import parse_target
from shardwell_server.cli.quantities import Duration
from shardwell_server.config import LOCAL_SHARD_COUNT_MAX, Durability

_CONNECT_TIMEOUT_S = 30.0
"""The wait for shards that are starting, if the command has more time than that."""
_REST_S_MIN = 0.05
_ASKING_THREAD_COUNT_MAX = 16
AnswerT = TypeVar("AnswerT")
Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns refusals in the block into wrong usage, exit code 2."""
    try:
        yield
    except ArgumentError as error:
        raise click.UsageError(error.message) from None


class GivenPath(click.Path):
    """The type of all paths, see `local_path`. An empty one, of an unset variable, is refused.

    `may_be_url`: also that of an object store, as text.
    """

    def __init__(self, *, file_okay: bool = True, may_be_url: bool = False) -> None:
        super().__init__(path_type=Path, file_okay=file_okay)
        self._may_be_url = may_be_url

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path; see click."""
        if not os.fspath(value):
            self.fail("it is empty; give a path", param, ctx)
        try:
            if self._may_be_url and isinstance(place := place_of(value), StorePath):
                return str(place)
            return super().convert(local_path(value), param, ctx)
        except ArgumentError as error:
            self.fail(error.message, param, ctx)


def _checked_shards(context: click.Context, flag: click.Parameter, target: str | None) -> str:
    if not target:
        raise click.UsageError(
            f"no shards were given: add --shards HOST:PORT[,HOST:PORT...], or set "
            f"${TARGET_VARIABLE}, which `shardwell cluster` prints"
        )
    return _addresses(context, flag, target) or ""


def _addresses(context: click.Context, flag: click.Parameter, target: str | None) -> str | None:
    if target is not None:
        with usage_errors():
            parse_target(target)
    return target


def option(
    flag: str, what: str, kind: Any = None, *, name: str | None = None, **more: Any
) -> Decorator:
    """Makes an option, as click does, whose help has its default, if one is given."""
    names = (flag,) if name is None else (flag, name)
    return click.option(*names, type=kind, help=what, **{"show_default": "default" in more, **more})


def setting(flag: str, what: str, kind: Any = None, **more: Any) -> Decorator:
    """Makes an option that a variable may give, too: $SHARDWELL_ and the flag's name."""
    variable = f"SHARDWELL_{flag.partition('/')[0].strip('-').upper().replace('-', '_')}"
    return option(flag, what, kind, **{"envvar": variable, **more})


def timeout_option(seconds: float, what: str = "For all of it.") -> Decorator:
    """Makes an option for the bound of a command."""
    return option("--timeout-s", what, Duration(), default=seconds)


def shard_count_option(what: str, default: int | None = 2) -> Decorator:
    """Makes an option for the number of shards to start."""
    return setting("--shard-count", what, click.IntRange(1, LOCAL_SHARD_COUNT_MAX), default=default)


def log_level_option(default: str, what: str) -> Decorator:
    """Makes an option for the logs on stderr."""
    levels = click.Choice(["debug", "info", "warning", "error"])
    return setting("--log-level", what, levels, default=default)


shards_option = option(
    "--shards",
    f"The cluster's shards, in their order; default: ${TARGET_VARIABLE}.",
    name="target",
    envvar=TARGET_VARIABLE,
    callback=_checked_shards,
    metavar="HOST:PORT[,...]",
)
running_shards_option = option(
    "--shards",
    "Train on a cluster that runs already instead of starting one.",
    name="target",
    callback=_addresses,
    metavar="HOST:PORT[,...]",
)
json_option = option("--json", "One JSON object; times in seconds.", name="as_json", is_flag=True)
durability_option = setting(
    "--durability",
    "What acknowledged gradients survive: kill -9; loss of power; that, but the last SECONDS.",
    default=Durability.setting,
    metavar="process|step|SECONDS",
)
tokens_option = setting(
    "--tokens",
    "File of tokens, made by `shardwell token`: each call needs one with a right to it.",
    GivenPath(),
)


@contextlib.contextmanager
def connected(
    command: str, target: str, timeout_s: float, worker_id: str | None = None
) -> Iterator[tuple[shardwell.Client, float]]:
    """Connects, and yields the client and the rest of `timeout_s`.

    The worker's name is `command` and the process id, which differs on one machine only: commands
    that contribute gradients give a `worker_id`.
    """
    began_s = time.monotonic()
    with shardwell.connect(
        target,
        worker_id=worker_id or f"{command}-{os.getpid()}",
        connect_timeout_s=min(timeout_s, _CONNECT_TIMEOUT_S),
    ) as client:
        yield client, max(timeout_s - (time.monotonic() - began_s), _REST_S_MIN)


def as_fields(record: Any, *names: str) -> dict[str, Any]:
    """Returns a dataclass's fields for `--json`, and properties of it by their names."""
    return dataclasses.asdict(record) | {name: getattr(record, name) for name in names}


@contextlib.contextmanager
def asking(
    target: str, question: Callable[[ShardChannel], AnswerT]
) -> Iterator[Callable[[], list[AnswerT]]]:
    """Yields a function that asks all shards at once, and returns their answers in order."""
    with usage_errors():
        credentials = Credentials.of()
        addresses = parse_target(target)
        credentials.check_private(addresses)
    # Channels are closed first, so that after Ctrl-C no thread waits for its answer.
    with (
        ThreadPoolExecutor(min(len(addresses), _ASKING_THREAD_COUNT_MAX)) as threads,
        contextlib.ExitStack() as opened,
    ):
        channels = [
            opened.enter_context(
                contextlib.closing(ShardChannel(index, address, credentials=credentials))
            )
            for index, address in enumerate(addresses)
        ]
        yield lambda: list(threads.map(question, channels))

"""`shardwell token`: the file of tokens that shards let in, and the files that workers have."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.errors import ArgumentError
from shardwell.specs.names import check_name
from shardwell_server.cli import SuggestingGroup
from shardwell_server.cli.options import GivenPath, option, setting, usage_errors
from shardwell_server.cli.quantities import ByteCount

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIFE_S_MAX = 36500 * 86400
_LIFE = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_QUOTAS = {
    "stored_bytes": "Bytes that it may store on a shard.",
    "parameters": "Parameters that it may make.",
    "tables": "Tables that it may make.",
    "members": "Workers that may be connected with it at once.",
    "streams": "Streams that it may have open.",
    "calls": "Calls of any kind that it may have open, streams among them.",
    "bytes_per_s": "Bytes a second that its calls move; what comes faster is delayed.",
}


def _quota_type(name: str) -> click.ParamType[int]:
    if "bytes" in name:
        return ByteCount(0, per_second=name.endswith("_s"))
    return click.IntRange(0, 2**63 - 1)


class _Life(click.ParamType[float]):
    """Parses a duration of validity: a number and a unit."""

    name = "life"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the seconds."""
        found = _LIFE.fullmatch(value)
        seconds = 0 if found is None else int(found[1]) * _UNITS_S[found[2]]
        if not 0 < seconds <= _LIFE_S_MAX:
            self.fail(
                f"{value!r} is no number of s, m, h or d, such as 30d or 12h, up to 36500d",
                param,
                ctx,
            )
        return float(seconds)


_tokens_option = setting(
    "--tokens",
    "The file of tokens, which shards are given.",
    GivenPath(),
    name="path",
    default="tokens.json",
)
_out_option = option(
    "--out", "Where the token goes. Default: NAME.token beside the file of tokens.", GivenPath()
)
_expires_option = option(
    "--expires-in",
    "How long the token is good, such as 30d. Default: until it is revoked.",
    _Life(),
    name="life",
    metavar="NUMBER[s|m|h|d]",
)


def _quota_options(command: Any) -> Any:
    for name, what in reversed(_QUOTAS.items()):
        command = option(f"--{name.replace('_', '-')}", what, _quota_type(name))(command)
    return command


@click.group(cls=SuggestingGroup)
def token() -> None:
    """Make, renew and revoke tokens, and show those that there are.

    A token says who calls a shard, and what it may do there. The file of tokens, for the shards,
    has no secrets; each secret is in a file of its own, for its user. Shards take up what
    changes without being started again.
    """


@token.command()
@click.argument("name")
@option(
    "--right",
    "read, contribute, create or admin, each with those before it; on parameters, tables and "
    "groups whose names begin with PREFIX, or on all. Repeat it for more.",
    name="rights",
    multiple=True,
    required=True,
    metavar="RIGHT[:PREFIX]",
)
@_tokens_option
@_out_option
@_expires_option
@_quota_options
def create(
    *,
    name: str,
    rights: tuple[str, ...],
    path: Path,
    out: Path | None,
    life: float | None,
    **quota: int | None,
) -> None:
    """Make the token NAME, and write it to a file that you alone can read."""
    from shardwell_server.access.access import wall_clock_s
    from shardwell_server.access.rights import Grant
    from shardwell_server.access.tokens import Token, digest_of, new_secret
    from shardwell_server.shard.quotas import Quota

    with usage_errors():
        check_name("the name of a token", name)
        grants = tuple(Grant.parse(right) for right in rights)
        given = Quota(**quota)
        out = out or path.parent / f"{name}.token"
        _check_free(out)
    secret = new_secret()
    made = Token(
        name=name,
        digests=(digest_of(secret).hex(),),
        grants=grants,
        expires_s=math.inf if life is None else wall_clock_s() + life,
        quota=given,
    )
    with _written_secret(out, secret), _changing(path) as tokens:
        if name in tokens:
            raise click.ClickException(
                f"{path} has a token {name!r} already: `shardwell token renew {name}` makes it a "
                f"new secret, `shardwell token revoke {name}` ends it"
            )
        tokens[name] = made
    _tell(made, path, out)


@token.command()
@click.argument("name")
@_tokens_option
@_out_option
@_expires_option
@option(
    "--drop-old",
    "End the secrets that it has had so far, at once. Default: the last ones stay good.",
    is_flag=True,
)
def renew(*, name: str, path: Path, out: Path | None, life: float | None, drop_old: bool) -> None:
    """Give the token NAME a new secret, with the same rights.

    The one before stays good until --drop-old, so that the new one can be handed out first:
    whatever reads the old file goes on, and takes up the new contents by itself.
    """
    from shardwell_server.access.access import wall_clock_s
    from shardwell_server.access.tokens import digest_of, new_secret

    if out is not None:
        with usage_errors():
            _check_free(out)
    out = out or path.parent / f"{name}.token"
    secret = new_secret()
    with _written_secret(out, secret, keeps_owner=True), _changing(path) as tokens:
        old = _found(tokens, name, path)
        kept = dataclasses.replace(old, digests=()) if drop_old else old
        made = kept.with_secret(digest_of(secret).hex())
        if life is not None:
            made = dataclasses.replace(made, expires_s=wall_clock_s() + life)
        tokens[name] = made
    _tell(made, path, out)


@token.command()
@click.argument("name")
@_tokens_option
def revoke(*, name: str, path: Path) -> None:
    """End the token NAME, and all that is done with it, within seconds."""
    with _changing(path) as tokens:
        _found(tokens, name, path)
        del tokens[name]
    click.echo(f"# {name} is no token of {path} any more", err=True)


@token.command(name="list")
@_tokens_option
def list_tokens(*, path: Path) -> None:
    """Show the tokens of a file: rights, end and quota, no secrets."""
    from shardwell_server.access.access import wall_clock_s
    from shardwell_server.access.rights import time_of
    from shardwell_server.access.tokens import read_tokens
    from shardwell_server.terminal import console, table

    with _cli_errors():
        found = read_tokens(path)
    now_s = wall_clock_s()
    shown = table("", "token", "rights", "expires", "quota", "secrets")
    for each in found:
        end = "" if each.expires_s == math.inf else time_of(each.expires_s)
        if each.expires_s <= now_s:
            end += " (expired)"
        quota = {name: most for name, most in vars(each.quota).items() if most is not None}
        shown.add_row(
            each.name,
            " ".join(map(str, each.grants)),
            end,
            " ".join(f"{name}={most}" for name, most in quota.items()),
            str(len(each.digests)),
        )
    console().print(shown)


@contextlib.contextmanager
def _cli_errors() -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise click.ClickException(error.message) from None


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[dict[str, Any]]:
    from shardwell_server.access.tokens import changing_tokens

    with _cli_errors(), changing_tokens(path) as tokens:
        yield tokens


def _found(tokens: dict[str, Any], name: str, path: Path) -> Any:
    if name not in tokens:
        raise click.ClickException(
            f"{path} has no token {name!r}; `shardwell token list` shows all"
        )
    return tokens[name]


def _check_free(out: Path) -> None:
    if os.path.lexists(out):
        raise ArgumentError(f"{out} exists: remove it, or give another place with --out")


@contextlib.contextmanager
def _written_secret(out: Path, secret: str, *, keeps_owner: bool = False) -> Iterator[None]:
    """Writes the secret before the block, and puts it in its place once shards can know it."""
    from shardwell_server.access.tokens import is_secret_file, private_file

    def is_ours(path: Path) -> bool:
        return keeps_owner and is_secret_file(path)

    with _cli_errors(), private_file(out, f"{secret}\n", keeps_owner=keeps_owner, is_ours=is_ours):
        yield


def _tell(made: Any, path: Path, out: Path) -> None:
    click.echo(f"# for shards: {path}, which has no secrets")
    click.echo(f"export SHARDWELL_TOKENS={shlex.quote(str(path.absolute()))}")
    click.echo(f"# for {made.name}: {out}, which is its secret")
    click.echo(f"export {TOKEN_FILE_VARIABLE}={shlex.quote(str(out.absolute()))}")

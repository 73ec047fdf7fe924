"""`shardwell certs` and `token`: certificates, the file of tokens, and files with a secret each."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from shardwell.connection.credentials import TOKEN_FILE_VARIABLE
from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell.errors import ArgumentError
from shardwell.specs.names import check_name
from shardwell_server.access.access import wall_clock_s
from shardwell_server.access.rights import Grant, time_of
from shardwell_server.access.tokens import (
    Token,
    changing_tokens,
    digest_of,
    is_secret_file,
    new_secret,
    private_file,
    read_tokens,
)
from shardwell_server.cli import SuggestingGroup
from shardwell_server.cli.options import GivenPath, option, setting, usage_errors
from shardwell_server.cli.quantities import ByteCount, Quantity
from shardwell_server.shard.quotas import Quota
from shardwell_server.terminal import console, table

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_VARIABLES = {
    "ca": CA_VARIABLE,
    "cert": CERT_VARIABLE,
    "key": KEY_VARIABLE,
    "tokens": "SHARDWELL_TOKENS",
    "token_file": TOKEN_FILE_VARIABLE,
}
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


class _Life(Quantity[float]):
    """Parses a duration of validity: a number and a unit."""

    name = "life"
    expected = "number of s, m, h or d, such as 30d or 12h, up to 36500d"

    def parse(self, text: str) -> float | None:
        found = _LIFE.fullmatch(text)
        seconds = 0.0 if found is None else float(found[1]) * _UNITS_S[found[2]]
        return seconds if 0 < seconds <= _LIFE_S_MAX else None


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


@click.command()
@click.argument("directory", type=GivenPath(file_okay=False))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME|ADDRESS",
    help="Of a shard or a member of a group, as others reach it; repeat it for more. Default: "
    "those of the certificate that is replaced, else this machine's name.",
)
@option(
    "--days",
    "How long the certificates are good; their authority is for 10 years.",
    click.IntRange(1, 3650),
    default=365,
)
def certs(*, directory: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make certificates in DIRECTORY, and an authority where there is none yet.

    ca.pem, server.pem, server.key, client.pem, client.key, and ca.key, which is to stay where it
    is. Called again, it replaces the certificates by new ones of the same authority: copy them over
    the old ones, and what runs takes them up.

    localhost and 127.0.0.1 are always among the hosts that are given.
    """
    from shardwell_server.operations.certificates import (  # a tenth of a second
        Certificates,
        make_certificates,
    )

    if not hosts and not Certificates.of(directory).server.exists():
        hosts = (socket.gethostname() or "localhost",)
    if hosts:
        hosts = tuple(dict.fromkeys((*hosts, *LOCAL_HOSTS)))
    with usage_errors():
        files = make_certificates(directory, hosts, days)
    click.echo("# for shards and members of groups: ca.pem, server.pem and server.key")
    click.echo(f"export {exported(ca=files.ca, cert=files.server, key=files.server_key)}")
    click.echo("# for workers and commands: ca.pem, client.pem and client.key")
    click.echo(f"export {exported(ca=files.ca, cert=files.client, key=files.client_key)}")
    click.echo(
        f"# {files.ca_key} makes certificates that all of them believe: keep it secret", err=True
    )


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
    with _written_secret(out, secret), changing_tokens(path) as tokens:
        if name in tokens:
            raise ArgumentError(
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
    if out is not None:
        with usage_errors():
            _check_free(out)
    out = out or path.parent / f"{name}.token"
    secret = new_secret()
    with _written_secret(out, secret, keeps_owner=True), changing_tokens(path) as tokens:
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
    with changing_tokens(path) as tokens:
        _found(tokens, name, path)
        del tokens[name]
    click.echo(f"# {name} is no token of {path} any more", err=True)


@token.command(name="list")
@_tokens_option
def list_tokens(*, path: Path) -> None:
    """Show the tokens of a file: rights, end and quota, no secrets."""
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


def _found(tokens: dict[str, Token], name: str, path: Path) -> Token:
    if name not in tokens:
        raise ArgumentError(f"{path} has no token {name!r}; `shardwell token list` shows all")
    return tokens[name]


def _check_free(out: Path) -> None:
    if os.path.lexists(out):
        raise ArgumentError(f"{out} exists: remove it, or give another place with --out")


def _written_secret(
    out: Path, secret: str, *, keeps_owner: bool = False
) -> AbstractContextManager[None]:
    """Writes the secret before the block, and puts it in its place once shards can know it."""
    return private_file(
        out,
        f"{secret}\n",
        keeps_owner=keeps_owner,
        is_ours=lambda path: keeps_owner and is_secret_file(path),
    )


def _tell(made: Token, path: Path, out: Path) -> None:
    click.echo(f"# for shards: {path}, which has no secrets")
    click.echo(f"export {exported(tokens=path)}")
    click.echo(f"# for {made.name}: {out}, which is its secret")
    click.echo(f"export {exported(token_file=out)}")


def exported(**files: Path) -> str:
    """Formats, for a shell, the variables of files of credentials, each of one kind."""
    paths = {_VARIABLES[kind]: str(path.absolute()) for kind, path in files.items()}
    return " ".join(f"{name}={shlex.quote(path)}" for name, path in paths.items())

"""`shardwell certs`: certificates for a cluster, by an authority of its own."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import click

from shardwell.connection.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from shardwell_server.cli.options import GivenPath, option, usage_errors

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


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
    click.echo(_export(files.ca, files.server, files.server_key))
    click.echo("# for workers and commands: ca.pem, client.pem and client.key")
    click.echo(_export(files.ca, files.client, files.client_key))
    click.echo(
        f"# {files.ca_key} makes certificates that all of them believe: keep it secret", err=True
    )


def _export(ca: Path, cert: Path, key: Path) -> str:
    named = {CA_VARIABLE: ca, CERT_VARIABLE: cert, KEY_VARIABLE: key}
    return "export " + " ".join(
        f"{name}={shlex.quote(str(path.absolute()))}" for name, path in named.items()
    )

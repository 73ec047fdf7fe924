"""`shardwell health`: is a shard ready? For container health checks and scripts."""

from __future__ import annotations

import os

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardwell_server.cli.quantities import Duration


@click.command()
@click.argument("address", required=False, envvar="SHARDWELL_LISTEN", metavar="[HOST:PORT]")
@click.option(
    "--timeout-s", type=Duration(), default=3.0, show_default=True, help="For the answer."
)
def health(*, address: str | None, timeout_s: float) -> None:
    """Ask a shard's grpc.health.v1 service; exit code 0 if it is SERVING, else 1.

    Without HOST:PORT: $SHARDWELL_LISTEN. With $SHARDWELL_TLS_CA, over TLS.
    """
    if not address:
        raise click.UsageError("no address was given: add HOST:PORT, or set $SHARDWELL_LISTEN")
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) >= 2**16:  # which gRPC takes modulo 2**16
        raise _no_address(address)
    with _channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            # Not above: a shard that is well is asked often, and this needs all of the SDK.
            from shardwell.connection.absence import why_absent
            from shardwell.specs.names import is_address

            if not is_address(address):
                raise _no_address(address) from None
            reason = why_absent(address, speaks_tls=_is_secure())
            raise click.ClickException(
                f"{address} does not answer ({error.code().name}): {reason}; if it "
                "should listen there, check whether one of the two sides alone uses TLS"
            ) from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    click.echo(f"{address} is {name}")
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise click.exceptions.Exit(1)


def _no_address(address: str) -> click.UsageError:
    return click.UsageError(f"a shard's address is HOST:PORT; got {address!r}")


def _is_secure() -> bool:
    return bool(os.environ.get("SHARDWELL_TLS_CA") or os.environ.get("SHARDWELL_TLS_CERT"))


def _channel(address: str) -> grpc.Channel:
    if not _is_secure():
        # As all channels; see shardwell/connection/options.py, which takes long to import.
        return grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
    # Not above: see below.
    from shardwell.connection.channel import Channel
    from shardwell.connection.credentials import Credentials
    from shardwell_server.cli.options import usage_errors

    host, colon, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):  # which no certificate names
        address = f"localhost{colon}{port}"
    with usage_errors():
        channel: grpc.Channel = Channel(address, Credentials.of(token=False)).current
    return channel

"""`shardwell health`: is a shard ready? For container health checks and scripts."""

from __future__ import annotations

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@click.command()
@click.argument("address", envvar="SHARDWELL_LISTEN", metavar="HOST:PORT")
@click.option("--timeout-s", type=float, default=3.0, show_default=True, help="For the answer.")
def health(*, address: str, timeout_s: float) -> None:
    """Ask a shard's grpc.health.v1 service; exit code 0 if it is SERVING, else 1."""
    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise click.ClickException(f"{address} does not answer: {error.code().name}") from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    click.echo(f"{address} is {name}")
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise click.exceptions.Exit(1)

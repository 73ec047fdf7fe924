"""`shardwell members`: who takes part in parameters and tables, and who is to leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click
from rich.table import Table

from shardwell.rpc.cluster_status import all_rows
from shardwell.rpc.shard_status import MemberStatus, ShardStatus
from shardwell_server.cli.options import connected, option, shards_option, timeout_option
from shardwell_server.operations.cluster_status import as_json, duration
from shardwell_server.terminal import console, legend, table

_COLORS = {"lost": "red", "draining": "yellow", "seated": "yellow", "over": "dim"}
_LEGEND = (
    "over: it left, or ended with its job; joined at: the first step that awaits it; "
    "next step: the one it contributes to next; counted, "
    "late: its chunks since then, where steps may close without it; lag: how long after the first "
    "worker it came in its last step; idle: since its last gradient"
)
_timeout_option = timeout_option(60.0)


class _ListByDefault(click.Group):
    """Takes an argument that is no subcommand for a name to list."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *context.help_option_names):
            args = ["list", *args]
        return super().parse_args(context, args)


@click.group(cls=_ListByDefault)
def members() -> None:
    """List members of parameters and tables, and send them away.

    `shardwell members NAME` is short for `shardwell members list NAME`.
    """


@members.command("list")
@click.argument("name", required=False)
@option("--json", "One JSON object a member and line.", name="prints_json", is_flag=True)
@shards_option
@_timeout_option
def list_members(*, name: str | None, prints_json: bool, target: str, timeout_s: float) -> None:
    """List the members of NAME, or of all parameters, tables and families.

    Counts of chunks are sums over the shards, since the member joined and the shard began.

    Exit code 1 if there is no such name, or a shard does not answer.
    """
    with connected("members", target, timeout_s) as (client, rest_s):
        if name is None:
            found = _of_all(client.status(timeout_s=rest_s))
        else:
            found = {name: client.members(name, timeout_s=rest_s)}
    if prints_json:
        for name, present in sorted(found.items()):
            for member in present:
                click.echo(json.dumps({"name": name, **as_json(member)}))
        return
    screen = console()
    screen.print(_table(found))
    screen.print(legend(_LEGEND))


@members.command()
@click.argument("worker_id", metavar="WORKER")
@click.argument("name", required=False)
@shards_option
@_timeout_option
def drain(*, worker_id: str, name: str | None, target: str, timeout_s: float) -> None:
    """Ask WORKER to leave NAME, or all that it takes part in, after its step.

    It leaves by itself where its loop looks: ServerOptimizer ends as after SIGTERM, others look at
    `Parameter.is_draining`. `shardwell members` shows when it is over.
    """
    with connected("drain", target, timeout_s) as (client, rest_s):
        names = client.drain(worker_id, name, timeout_s=rest_s)
    click.echo(f"asked {worker_id} to leave {', '.join(names)}")


@members.command()
@click.argument("worker_id", metavar="WORKER")
@click.argument("name", required=False)
@shards_option
@_timeout_option
def remove(*, worker_id: str, name: str | None, target: str, timeout_s: float) -> None:
    """Take WORKER out of NAME, or of all that it takes part in, now: no step awaits it.

    A worker that lives takes part again with its next gradient: end its process, or drain it.
    """
    with connected("remove", target, timeout_s) as (client, rest_s):
        names = client.remove_member(worker_id, name, timeout_s=rest_s)
    click.echo(f"removed {worker_id} from {', '.join(names)}")


def _of_all(statuses: Sequence[ShardStatus]) -> dict[str, Sequence[MemberStatus]]:
    found: dict[str, Sequence[MemberStatus]] = {}
    for row in all_rows(statuses):  # older versions allowed a parameter and a table of one name
        found[row.name] = (*found.get(row.name, ()), *row.members)
    return found


def _table(found: Mapping[str, Sequence[MemberStatus]]) -> Table:
    rows = table(
        "members", "name", "worker", "state", ">joined at", ">next step", ">counted", ">late",
        ">lag", ">idle",
    )  # fmt: skip
    for name, present in sorted(found.items()):
        for member in present:
            rows.add_row(name, member.worker_id, *_cells(member))
        if not present:
            rows.add_row(name, "none")
    if not found:
        rows.add_row("none")
    return rows


def _cells(member: MemberStatus) -> list[str]:
    color = _COLORS.get(member.state)
    state = f"[{color}]{member.state}[/{color}]" if color else member.state
    return [
        state,
        "" if member.joined_at is None else str(member.joined_at),
        str(member.next_step),
        f"{member.counted_chunk_count:,}",
        f"{member.late_chunk_count:,}",
        "" if member.lag_s is None else f"{1000 * member.lag_s:.0f} ms",
        "" if member.idle_s is None else duration(member.idle_s),
    ]

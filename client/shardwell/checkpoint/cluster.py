"""The cluster that a checkpoint is taken of, or put into, as one call of one client sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from shardwell.errors import OtherIncarnationError
from shardwell.process.spans import Traffic
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_parameters, ask_tables
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.threads.asking import ask_all
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1.table_pb2 import TableStatus

Spec: TypeAlias = ParameterSpec | TableSpec


class Contents(NamedTuple):
    """The parameters and tables of one shard, by name."""

    shard_index: int
    software_version: str
    parameters: dict[str, pb.ParameterStatus]
    tables: dict[str, TableStatus]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All shards, in order, and the attempts of the call."""

    channels: list[ShardChannel]
    worker_id: str
    traffic: Traffic
    attempts: Attempts

    def contents(self) -> list[Contents]:
        """The contents of each shard, in order."""

        def ask(channel: ShardChannel) -> Contents:
            attempts = self.attempts.beside()
            status = attempts.run(lambda: ask_parameters(channel, attempts.rest_s))
            tables = attempts.run(lambda: ask_tables(channel, attempts.rest_s))
            return Contents(
                channel.shard_index,
                status.software_version,
                {each.spec.name: each for each in status.parameters},
                {each.spec.name: each for each in tables},
            )

        return ask_all(self.channels, ask)

    def parameter(self, name: str) -> list[pb.ParameterStatus]:
        """The status of a parameter on each shard that has it."""
        found = ask_all(self.channels, partial(ask_parameters, timeout_s=self.rest_s, name=name))
        return [each for status in found for each in status.parameters]

    def table(self, name: str) -> list[TableStatus]:
        """The status of a table on each shard that has it."""
        found = ask_all(self.channels, partial(ask_tables, timeout_s=self.rest_s, name=name))
        return [each for tables in found for each in tables]

    def newest_version(self, spec: Spec) -> int:
        """The newest version of any of a parameter or table, asked now."""
        if isinstance(spec, TableSpec):
            return newest_of_table(spec.name, self.table(spec.name))
        return newest_of_parameter(self.parameter(spec.name))

    @property
    def rest_s(self) -> float:
        """The seconds that are left of the call."""
        return self.attempts.rest_s


def newest_of_parameter(found: Iterable[pb.ParameterStatus]) -> int:
    """The newest version of any chunk on any shard."""
    return max((each.version_max for each in found), default=0)


def newest_of_table(name: str, found: Sequence[TableStatus]) -> int:
    """The newest version on any shard; OtherIncarnationError: a shard lost its memory."""
    if len({each.incarnation for each in found} - {0}) > 1:
        raise OtherIncarnationError(
            f"table {name!r} was made anew on some shards, which lost their memory; there is "
            "nothing whole to save: restore a checkpoint into an empty cluster",
            table=name,
        )
    return max(each.version for each in found)

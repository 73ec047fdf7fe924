"""The cluster that a checkpoint is taken of, or put into, as one call of one client sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

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

    def parts_of(self, spec: Spec) -> list[Any]:
        """The status of a parameter or table, if the shard has it."""
        held: dict[str, Any] = self.tables if isinstance(spec, TableSpec) else self.parameters
        return [held[spec.name]] if spec.name in held else []


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

    def parts_of(self, spec: Spec) -> list[Any]:
        """The status of a parameter or table on each shard that has it, asked now."""
        named: dict[str, Any] = {"timeout_s": self.rest_s, "name": spec.name}
        if isinstance(spec, TableSpec):
            return list(chain(*ask_all(self.channels, partial(ask_tables, **named))))
        found = ask_all(self.channels, partial(ask_parameters, **named))
        return [each for status in found for each in status.parameters]

    def newest_version(self, spec: Spec) -> int:
        """The newest version of any of a parameter or table, asked now."""
        return newest_version(spec, self.parts_of(spec))

    @property
    def rest_s(self) -> float:
        """The seconds that are left of the call."""
        return self.attempts.rest_s


def newest_version(spec: Spec, parts: Sequence[Any]) -> int:
    """The newest version on any shard; OtherIncarnationError: a shard lost a table's memory."""
    if isinstance(spec, TableSpec) and len({each.incarnation for each in parts} - {0}) > 1:
        raise OtherIncarnationError(
            f"table {spec.name!r} was made anew on some shards, which lost their memory; there is "
            "nothing whole to save: restore a checkpoint into an empty cluster",
            table=spec.name,
        )
    of_part = attrgetter("version" if isinstance(spec, TableSpec) else "version_max")
    return max(map(of_part, parts), default=0)

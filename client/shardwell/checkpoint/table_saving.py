"""Which tables a checkpoint is made of, and what a cluster must be like to take them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from shardwell.checkpoint.capture import TableCapture
from shardwell.checkpoint.consistent_version import known_first
from shardwell.checkpoint.directory import working_directory
from shardwell.checkpoint.export import TableExport, check_target, write_export
from shardwell.checkpoint.format import CheckpointTable, load_id_of
from shardwell.checkpoint.table_restore import TableRestore
from shardwell.errors import (
    ArgumentError,
    OtherIncarnationError,
    SpecMismatchError,
    UnknownTableError,
)
from shardwell.process.spans import Traffic
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import ask_tables
from shardwell.specs.table import TableSpec
from shardwell.threads.asking import ask_all, batches
from shardwell.v1 import table_pb2 as pb


class TableCheckpointing:
    """The tables' part of one call. See Checkpointing."""

    def __init__(
        self,
        channels: Sequence[ShardChannel],
        *,
        worker_id: str,
        traffic: Traffic,
        attempts: Attempts,
    ) -> None:
        self._channels = channels
        self._worker_id = worker_id
        self._traffic = traffic
        self._attempts = attempts

    def save(
        self, directory: Path, names: Sequence[str] | None, *, first_number: int
    ) -> list[CheckpointTable]:
        """Writes tables; by default all that shard 0 has, by name.

        Raises:
            UnknownTableError: there is none of that name.
            ShardwellError: see `TableCapture.take`.
        """
        shards = ask_all(self._channels, self._statuses)
        chosen = list(dict.fromkeys(shards[0] if names is None else names))
        for name in chosen:
            if name not in shards[0]:
                raise UnknownTableError(
                    f"shard 0 has no table {name!r:.140}; it has {sorted(shards[0])}",
                    shard_index=0,
                    table=str(name)[:140],
                )
        snapshots = []
        for number, name in enumerate(chosen, first_number):
            (directory / f"{number:06d}-{name}").mkdir()
            here = [tables[name] for tables in shards if name in tables]
            snapshots.append(
                TableCapture(
                    TableSpec.from_proto(shards[0][name].spec),
                    self._channels,
                    known_first(_newest(name, here), partial(self._newest_version, name)),
                    directory,
                    number=number,
                    row_count=sum(table.row_count for table in here),
                    traffic=self._traffic,
                    attempts=self._attempts.beside(),
                )
            )
        entries = []
        for batch in batches(snapshots, lambda snapshot: snapshot.size_bytes):
            entries += ask_all(batch, TableCapture.take_repeatedly)
        return entries

    def export(self, name: str, path: Path) -> TableExport:
        """Exports a table, as `Client.export_table` says."""
        check_target(path)
        with working_directory(path) as partial:
            (entry,) = self.save(partial, [name], first_number=1)
            write_export(entry, partial, path)
        return TableExport(path, entry.row_count, entry.version)

    def unfinished(self, entries: Sequence[CheckpointTable]) -> list[CheckpointTable]:
        """The tables still to restore: all but those that this restore, cut off, left whole.

        Raises:
            ArgumentError, SpecMismatchError: a shard has one with another spec, or all have one
                with other rows; names it.
        """
        if not entries:
            return []
        left = []
        shards = ask_all(self._channels, self._statuses)
        for entry in entries:
            here = [tables[entry.name] for tables in shards if entry.name in tables]
            for table in here:
                differences = TableSpec.from_proto(table.spec).differences(entry.spec)
                if differences:
                    raise SpecMismatchError(
                        f"table {entry.name!r} exists with another spec than the checkpoint's: "
                        f"{'; '.join(differences)}; restore into a cluster without it",
                        table=entry.name,
                    )
            # Where some stand and others do not, a restore was cut off; it is done again.
            is_committed = len(here) == len(shards) and not any(table.loading for table in here)
            if is_committed and _is_restored(entry, here):
                continue
            if is_committed and any(table.version or table.row_count for table in here):
                raise ArgumentError(
                    f"table {entry.name!r} has rows already; restore into a cluster without it, "
                    "before workers start",
                    table=entry.name,
                )
            left.append(entry)
        return left

    def restore(self, path: Path, entries: Sequence[CheckpointTable]) -> None:
        """Makes tables stand on all shards.

        Raises:
            ShardwellError: see `TableRestore.restore`.
        """
        for batch in batches(entries, lambda entry: sum(file.size_bytes for file in entry.files)):
            ask_all(batch, partial(self._restore, path))

    def _restore(self, path: Path, entry: CheckpointTable) -> None:
        attempts = self._attempts.beside()
        made = ask_all(self._channels, partial(self._create, entry.spec))
        restore = TableRestore(
            path,
            entry,
            self._channels,
            worker_id=self._worker_id,
            incarnation=made[0].incarnation,
            status=lambda channel: self._ask(channel, entry.name)[0],
            traffic=self._traffic,
            attempts=attempts,
        )
        attempts.run(restore.restore)

    def _newest_version(self, name: str) -> int:
        asked = ask_all(self._channels, partial(self._ask, name=name))
        return _newest(name, [table for tables in asked for table in tables])

    def _statuses(self, channel: ShardChannel) -> dict[str, pb.TableStatus]:
        """What a shard says of its tables, by name."""
        found = self._attempts.beside().run(partial(self._ask, channel))
        return {table.spec.name: table for table in found}

    def _ask(self, channel: ShardChannel, name: str = "") -> Sequence[pb.TableStatus]:
        return ask_tables(channel, self._attempts.rest_s, name)

    def _create(self, spec: TableSpec, channel: ShardChannel) -> pb.OpenTableResponse:
        """Makes a table on a shard."""

        def create() -> pb.OpenTableResponse:
            return channel.call(
                "OpenTable",
                pb.OpenTableRequest(shard=channel.identity, spec=spec.to_proto()),
                pb.OpenTableResponse,
                timeout_s=self._attempts.rest_s,
                table=spec.name,
            )

        return self._attempts.beside().run(create)


def _newest(name: str, found: Sequence[pb.TableStatus]) -> int:
    """The newest version of a table on any shard.

    Raises:
        OtherIncarnationError: a shard lost its memory.
    """
    if len({table.incarnation for table in found} - {0}) > 1:
        raise OtherIncarnationError(
            f"table {name!r} was made anew on some shards, which lost their memory; there is "
            "nothing whole to save: restore a checkpoint into an empty cluster",
            table=name,
        )
    return max(table.version for table in found)


def _is_restored(entry: CheckpointTable, here: Sequence[pb.TableStatus]) -> bool:
    """Whether a table that is committed on all shards is as a restore of `entry` left it."""
    rows_move_at_once = entry.spec.worker_count < 2
    return sum(table.row_count for table in here) == entry.row_count and all(
        table.load_id == load_id_of(entry)
        and table.version == entry.version
        and entry.learning_rate in (None, table.learning_rate)
        and not (rows_move_at_once and table.counted_row_count)
        for table in here
    )

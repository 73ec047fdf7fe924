"""Which tables a checkpoint is made of, and what a cluster must be like to take them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from shardwell.channel import ShardChannel
from shardwell.checkpoint import CheckpointTable
from shardwell.errors import (
    ArgumentError,
    ShardwellError,
    SpecMismatchError,
    StepOrderError,
    UnknownTableError,
)
from shardwell.retry import Attempts
from shardwell.slice_file import file_error
from shardwell.table_export import TableExport, check_target, write_export
from shardwell.table_restoring import TableRestore
from shardwell.table_snapshots import TableSnapshot
from shardwell.table_spec import TableSpec
from shardwell.traffic import Traffic
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
            ShardwellError: see `TableSnapshot.take`.
        """
        found = {table.spec.name: table.spec for table in self._statuses(self._channels[0])}
        entries = []
        for number, name in enumerate(dict.fromkeys(found if names is None else names)):
            if name not in found:
                raise UnknownTableError(
                    f"shard 0 has no table {name!r:.140}; it has {sorted(found)}",
                    shard_index=0,
                    table=str(name)[:140],
                )
            spec = TableSpec.from_proto(found[name])
            (directory / f"{first_number + number:06d}-{name}").mkdir()
            snapshot = TableSnapshot(
                spec,
                self._channels,
                partial(self._newest_version, name),
                directory,
                number=first_number + number,
                traffic=self._traffic,
                attempts=self._attempts,
            )
            entries.append(self._attempts.run(snapshot.take))
        return entries

    def export(self, name: str, path: Path) -> TableExport:
        """See `Client.export_table`."""
        check_target(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as made:
                (entry,) = self.save(Path(made), [name], first_number=1)
                write_export(entry, Path(made), path)
        except OSError as error:
            if isinstance(error, ShardwellError):
                raise
            raise file_error(path, error, "making it") from None
        return TableExport(path, entry.row_count, entry.version)

    def check_free(self, entries: Sequence[CheckpointTable]) -> None:
        """Refuses tables that a shard has with another spec, or that stand on all with rows.

        Raises:
            ArgumentError, SpecMismatchError: names it.
        """
        if not entries:
            return
        shards = [
            {table.spec.name: table for table in self._statuses(channel)}
            for channel in self._channels
        ]
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
            stands = len(here) == len(shards) and not any(table.loading for table in here)
            if stands and any(table.version or table.row_count for table in here):
                raise ArgumentError(
                    f"table {entry.name!r} has rows already; restore into a cluster without it, "
                    "before workers start",
                    table=entry.name,
                )

    def restore(self, path: Path, entry: CheckpointTable) -> None:
        """Makes a table stand on all shards.

        Raises:
            ShardwellError: see `TableRestore.restore`.
        """
        made = [
            self._attempts.run(partial(self._create, channel, entry.spec))
            for channel in self._channels
        ]
        restore = TableRestore(
            path,
            entry,
            self._channels,
            worker_id=self._worker_id,
            incarnation=made[0].incarnation,
            status=lambda channel: self._ask(channel, entry.name)[0],
            traffic=self._traffic,
            attempts=self._attempts,
        )
        self._attempts.run(restore.restore)

    def _newest_version(self, name: str) -> int:
        found = [table for channel in self._channels for table in self._ask(channel, name)]
        if len({table.incarnation for table in found} - {0}) > 1:
            raise StepOrderError(
                f"table {name!r} was made anew on some shards, which lost their memory; there is "
                "nothing whole to save: restore a checkpoint into an empty cluster",
                table=name,
            )
        return max(table.version for table in found)

    def _statuses(self, channel: ShardChannel) -> list[pb.TableStatus]:
        return self._attempts.run(partial(self._ask, channel))

    def _ask(self, channel: ShardChannel, name: str = "") -> list[pb.TableStatus]:
        answer = channel.call(
            "GetTableStatus",
            pb.GetTableStatusRequest(shard=channel.identity, table=name),
            pb.GetTableStatusResponse,
            timeout_s=self._attempts.rest_s,
            table=name,
        )
        return list(answer.tables)

    def _create(self, channel: ShardChannel, spec: TableSpec) -> pb.OpenTableResponse:
        return channel.call(
            "OpenTable",
            pb.OpenTableRequest(shard=channel.identity, spec=spec.to_proto()),
            pb.OpenTableResponse,
            timeout_s=self._attempts.rest_s,
            table=spec.name,
        )

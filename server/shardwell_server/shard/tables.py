"""The tables of a shard, by name, and the limits over them."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from shardwell.errors import (
    LimitError,
    ShardwellError,
    SpecMismatchError,
    StorageError,
    UnknownTableError,
)
from shardwell.placement.rows import RowPlacement
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2
from shardwell.wire.rows import rows_per_message_max
from shardwell_server.config import ShardConfig
from shardwell_server.shard.byte_budget import ByteBudget
from shardwell_server.shard.members import Liveness
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store import Store, TableLayout, TableStorage


class Tables:
    """Any thread may call it. Goes on with what the store kept.

    Args:
        config: The shard's.
        store: Where they are kept.
        lock: Guards the store.
        stored_bytes: Of the shard.
        sessions: Which are alive.
        spool_dir: See Shard.

    Raises:
        StorageError: what it kept can't be believed.
    """

    def __init__(
        self,
        config: ShardConfig,
        store: Store,
        lock: threading.Lock,
        stored_bytes: ByteBudget,
        *,
        sessions: Liveness,
        spool_dir: Path | None = None,
    ) -> None:
        self._sessions = sessions
        self._spool_dir = spool_dir
        self._config = config
        self._store = store
        self._lock = lock
        self._stored_bytes = stored_bytes
        self._tables: dict[str, TableSlice] = {}
        for layout, storage in store.recover_tables():
            self._recover(layout, storage)

    def go_on(self) -> None:
        for table in self.all():
            table.go_on()

    def open(self, spec: TableSpec) -> tuple[TableSlice, bool]:
        """The table, made now if it is new; and whether it was.

        Raises:
            SpecMismatchError: it exists with another spec.
            LimitError: a limit would be exceeded.
            StorageError: there is no room on the disk, or it can't be written to.
        """
        with self._lock:
            known = self._tables.get(spec.name)
            if known is None:
                return self._make(spec), True
        differences = known.spec.differences(spec)
        if differences:
            raise SpecMismatchError(
                f"table {spec.name!r} exists with another spec: {'; '.join(differences)}; open it "
                "with the same, or choose another name",
                table=spec.name,
            )
        return known, False

    def table(self, name: str) -> TableSlice:
        """One that was opened.

        Raises:
            UnknownTableError: there is none of that name.
        """
        found = self._tables.get(name)
        if found is None:
            raise UnknownTableError(
                f"shard {self._config.shard_index} has no table {name!r:.140}; open it first (a "
                "shard that lost its memory has none)",
                table=name[:140],
            )
        return found

    def has(self, name: str) -> bool:
        """Whether one of that name was opened."""
        return name in self._tables

    def all(self) -> list[TableSlice]:
        """By name."""
        with self._lock:
            return [self._tables[name] for name in sorted(self._tables)]

    def _make(self, spec: TableSpec) -> TableSlice:
        limits = self._config.limits
        if len(self._tables) >= limits.table_count_max:
            raise LimitError(
                f"limit table_count_max={limits.table_count_max} is reached; table {spec.name!r} "
                "does not fit",
                table=spec.name,
            )
        layout = self._layout(spec)

        def begin(storage: TableStorage) -> None:
            stored, needed = self._stored_bytes, storage.undo_bytes
            if not stored.take(needed):
                raise LimitError(
                    f"limit stored_bytes_max={stored.limit_bytes}: table {spec.name!r} needs "
                    f"{needed} bytes here for its undo file beside the {stored.count} in use; add "
                    "shards, or raise it",
                    table=spec.name,
                )
            try:
                self._tables[spec.name] = self._slice(spec, layout, storage)
            except BaseException:
                stored.add(-needed)
                raise

        self._store.create_table(layout, begin)  # both are made, or neither is
        return self._tables[spec.name]

    def _layout(self, spec: TableSpec) -> TableLayout:
        """What a table that is made now gets."""
        config, limits = self._config, self._config.limits
        layout = TableLayout(
            name=spec.name,
            dim=spec.dim,
            slot_widths=spec.slot_widths,
            row_capacity=1,
            rows_per_change_max=rows_per_message_max(spec),
            with_sum=spec.worker_count > 1,
            description={
                "spec": MessageToDict(spec.to_proto()),
                "shard_index": config.shard_index,
                "shard_count": config.shard_count,
            },
        )
        capacity = min(limits.table_row_count_max, limits.stored_bytes_max // layout.row_size_bytes)
        batch = layout.rows_per_change_max
        if spec.row_count is not None:  # no message has more distinct ids than there are
            here = self._placement(spec).local_row_count()
            capacity, batch = min(capacity, here), min(batch, here)
        return dataclasses.replace(layout, row_capacity=max(capacity, 1), rows_per_change_max=batch)

    def _placement(self, spec: TableSpec) -> RowPlacement:
        return RowPlacement(spec.row_count, self._config.shard_count)

    def _slice(self, spec: TableSpec, layout: TableLayout, storage: TableStorage) -> TableSlice:
        return TableSlice(
            spec,
            layout,
            storage,
            self._placement(spec),
            shard_index=self._config.shard_index,
            limits=self._config.limits,
            stored_bytes=self._stored_bytes,
            sessions=self._sessions,
            spool_dir=self._spool_dir,
        )

    def _recover(self, layout: TableLayout, storage: TableStorage) -> None:
        """Goes on with a table that an earlier process left."""
        description: dict[str, Any] = layout.description
        try:
            spec = TableSpec.from_proto(
                ParseDict(description.get("spec", {}), table_pb2.TableSpec())
            )
        except (ParseError, ShardwellError) as error:
            raise StorageError(
                f"table {layout.name!r} has a spec that this version can't read: {error}; run the "
                "version that wrote it",
                table=layout.name,
            ) from None
        # Limits may have changed since; the files have the sizes that they were made with.
        expected = self._layout(spec)
        has_room = layout.rows_per_change_max >= expected.rows_per_change_max
        sizes = {name: getattr(layout, name) for name in ("row_capacity", "rows_per_change_max")}
        if layout != dataclasses.replace(expected, **sizes) or not has_room:
            raise StorageError(
                f"table {layout.name!r}: its files hold {layout}; this shard needs {expected}; run "
                "the version that wrote it",
                table=layout.name,
            )
        self._stored_bytes.add(storage.undo_bytes)
        self._tables[layout.name] = self._slice(spec, layout, storage)

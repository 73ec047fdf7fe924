"""The parameters and the tables of a shard: each by name, made once, under the limits over all.

Made is one when its storage is, and the shard has taken that over; until then, and if either fails,
there is none of that name, on disk or here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from shardwell.errors import (
    LimitError,
    ShardwellError,
    SpecMismatchError,
    StorageError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.numerics.codec import CODECS
from shardwell.numerics.update_rules import UpdateRule
from shardwell.placement.rows import RowPlacement
from shardwell.placement.slices import slice_of
from shardwell.process.spans import Spans
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2, types_pb2
from shardwell.wire.chunks import HEAD_SIZE_MAX_BYTES
from shardwell.wire.rows import rows_per_message_max
from shardwell_server.config import ShardConfig
from shardwell_server.shard.byte_budget import ByteBudget, OwnedBytes
from shardwell_server.shard.members import Liveness
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.quotas import Counted, Usages
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store import Layout, ParameterStorage, Store, TableLayout, TableStorage
from shardwell_server.store.contract import Begin


class Owned(Protocol):
    """A shard's part of a parameter or table."""

    @property
    def spec(self) -> Any:
        """What was declared."""


SpecT = TypeVar("SpecT", ParameterSpec, TableSpec)
LayoutT = TypeVar("LayoutT", Layout, TableLayout)
StorageT = TypeVar("StorageT", ParameterStorage, TableStorage)
OwnedT = TypeVar("OwnedT", bound=Owned)


class Registry(ABC, Generic[SpecT, LayoutT, StorageT, OwnedT]):
    """Base of both. Any thread may call it.

    Args:
        config: The shard's.
        store: Where they are kept.
        lock: Guards the store.
        stored_bytes: Of the shard.
        sessions: Which are alive.
        usages: What the owners of tokens use.
        spans: What the shard did last.
        spool_dir: See Shard.
    """

    _kind: ClassVar[str]
    """"parameter" or "table"."""
    _counted: ClassVar[Counted]
    """How a quota names them."""

    def __init__(
        self,
        config: ShardConfig,
        store: Store,
        lock: threading.Lock,
        stored_bytes: ByteBudget,
        sessions: Liveness,
        usages: Usages,
        spans: Spans,
        spool_dir: Path | None = None,
    ) -> None:
        self._usages = usages
        self._config = config
        self._store = store
        self._lock = lock
        self._stored_bytes = stored_bytes
        self._sessions = sessions
        self._spans = spans
        self._spool_dir = spool_dir
        self._by_name: dict[str, OwnedT] = {}

    def open(self, spec: SpecT, owner: str = "") -> tuple[OwnedT, bool]:
        """The one of that name, made now if it is new; and whether it was.

        Args:
            spec: What is declared.
            owner: Name of the token by which it is made; empty: of none.

        Raises:
            SpecMismatchError: it exists with another spec.
            LimitError: a limit would be exceeded.
            StorageError: there is no room on the disk, or it can't be written to.
        """
        with self._lock:
            known = self._by_name.get(spec.name)
            if known is None:
                return self._make(spec, owner), True
        differences = known.spec.differences(spec)
        if differences:
            raise SpecMismatchError(
                f"{self._kind} {spec.name!r} exists with another spec: {'; '.join(differences)}; "
                "open it with the same, or choose another name",
                **self._where(spec.name),
            )
        return known, False

    def get(self, name: str) -> OwnedT:
        """One that was opened.

        Raises:
            UnknownParameterError, UnknownTableError: there is none of that name.
        """
        found = self._by_name.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def has(self, name: str) -> bool:
        """Whether one of that name was opened."""
        return name in self._by_name

    def all(self) -> list[OwnedT]:
        """By name."""
        with self._lock:
            return [self._by_name[name] for name in sorted(self._by_name)]

    def recover(self, found: Iterable[tuple[LayoutT, StorageT]]) -> None:
        """Goes on with what an earlier process left; to be called once, first.

        Raises:
            StorageError: it can't be believed.
        """
        for layout, storage in found:
            name = layout.name
            try:
                spec = self._spec_of(layout.description.get("spec", {}))
            except (ParseError, ShardwellError) as error:
                raise StorageError(
                    f"{self._kind} {name!r} has a spec that this version can't read: {error}; run "
                    "the version that wrote it",
                    **self._where(name),
                ) from None
            owner = str(layout.description.get("owner", ""))
            expected = self._layout_of(spec, owner, layout)
            if layout != expected:
                raise StorageError(
                    f"{self._kind} {name!r}: its files hold {layout}; this shard needs {expected}; "
                    "run the version that wrote it",
                    **self._where(name),
                )
            stored = self._bytes_of(owner)
            stored.add(self._size_beforehand(layout) + self._size_of(storage))
            self._usages.of(owner).add(self._counted, 1)
            self._by_name[name] = self._made(spec, layout, storage, stored)

    def _make(self, spec: SpecT, owner: str) -> OwnedT:
        if len(self._by_name) >= self._count_max:
            raise LimitError(
                f"limit {self._kind}_count_max={self._count_max} is reached; {self._kind} "
                f"{spec.name!r} does not fit",
                **self._where(spec.name),
            )
        layout, stored = self._layout_of(spec, owner), self._bytes_of(owner)

        def begin(storage: StorageT) -> None:
            with self._taken(stored, spec.name, self._size_of(storage), " for its undo file"):
                self._by_name[spec.name] = self._made(spec, layout, storage, stored)

        usage = self._usages.of(owner)
        usage.take(self._counted, **self._where(spec.name))
        try:
            with self._taken(stored, spec.name, self._size_beforehand(layout)):
                self._create(layout, begin)  # both are made, or neither is
        except BaseException:
            usage.add(self._counted, -1)
            raise
        return self._by_name[spec.name]

    def _bytes_of(self, owner: str) -> OwnedBytes:
        return OwnedBytes(self._stored_bytes, self._usages.of(owner))

    @contextlib.contextmanager
    def _taken(
        self, stored: OwnedBytes, name: str, size_bytes: int, why: str = ""
    ) -> Iterator[None]:
        """Counts bytes as stored, unless the block fails."""
        needs = f"{self._kind} {name!r} needs {{}} bytes here{why}"
        stored.take(size_bytes, needs, "add shards, or raise it", **self._where(name))
        try:
            yield
        except BaseException:
            stored.add(-size_bytes)
            raise

    def _where(self, name: str) -> dict[str, Any]:
        """The parameter or table as errors carry it."""
        return {self._kind: name}

    def _description(self, spec: Message, owner: str) -> dict[str, Any]:
        """What is needed to make it again."""
        return {
            "spec": MessageToDict(spec),
            "shard_index": self._config.shard_index,
            "shard_count": self._config.shard_count,
            **({"owner": owner} if owner else {}),
        }

    @property
    @abstractmethod
    def _count_max(self) -> int:
        """How many there may be."""

    @abstractmethod
    def _unknown(self, name: str) -> ShardwellError:
        """The error for a name that there is none of."""

    @abstractmethod
    def _spec_of(self, description: dict[str, Any]) -> SpecT:
        """The spec in a description.

        Raises:
            ParseError, ShardwellError: it can't be read.
        """

    @abstractmethod
    def _layout_of(self, spec: SpecT, owner: str, kept: LayoutT | None = None) -> LayoutT:
        """How one is stored that is made now; with the sizes of one that is kept, if it has them.

        Limits may have changed since that was made.
        """

    @abstractmethod
    def _size_beforehand(self, layout: LayoutT) -> int:
        """Bytes that it stores for as long as it exists."""

    @abstractmethod
    def _size_of(self, storage: StorageT) -> int:
        """The same of what is known when the storage is made."""

    @abstractmethod
    def _create(self, layout: LayoutT, begin: Begin[StorageT]) -> object:
        """Makes the storage, which `begin` takes over."""

    @abstractmethod
    def _made(self, spec: SpecT, layout: LayoutT, storage: StorageT, stored: OwnedBytes) -> OwnedT:
        """The shard's part of it."""


class Parameters(Registry[ParameterSpec, Layout, ParameterStorage, ParameterSlice]):
    """The parameters of a shard."""

    _kind, _counted = "parameter", "parameters"

    @property
    def _count_max(self) -> int:
        return self._config.limits.parameter_count_max

    def open(self, spec: ParameterSpec, owner: str = "") -> tuple[ParameterSlice, bool]:
        found = super().open(spec, owner)
        found[0].make_image()  # of what needs no first weights, before anybody hears of it
        return found

    def _unknown(self, name: str) -> ShardwellError:
        return UnknownParameterError(
            f"shard {self._config.shard_index} has no parameter {name!r:.140}; create it first "
            "(a shard that lost its memory has none)",
            parameter=name[:140],
        )

    def _spec_of(self, description: dict[str, Any]) -> ParameterSpec:
        return ParameterSpec.from_proto(ParseDict(description, types_pb2.ParameterSpec()))

    def _layout_of(self, spec: ParameterSpec, owner: str, kept: Layout | None = None) -> Layout:
        config = self._config
        item_size = CODECS[spec.codec_name].item_size
        size = slice_of(spec.size, config.shard_index, config.shard_count).size
        chunk_size, kept_size_bytes = config.chunk_size_bytes // item_size, 0
        if kept is not None:
            chunk_size, kept_size_bytes = kept.chunk_element_count, kept.kept_size_bytes
        elif spec.keeps_versions:
            kept_size_bytes = min(chunk_size, size) * item_size + HEAD_SIZE_MAX_BYTES
        return Layout(
            name=spec.name,
            slice_size=size,
            chunk_element_count=chunk_size,
            with_sum=spec.worker_count > 1,
            initial_slots=UpdateRule(spec.optimizer).initial_slots,
            kept_size_bytes=kept_size_bytes,
            description=self._description(spec.to_proto(), owner),
        )

    def _size_beforehand(self, layout: Layout) -> int:
        return layout.size_bytes

    def _size_of(self, storage: ParameterStorage) -> int:
        return 0

    def _create(self, layout: Layout, begin: Begin[ParameterStorage]) -> object:
        return self._store.create(layout, begin)

    def _made(
        self, spec: ParameterSpec, layout: Layout, storage: ParameterStorage, stored: OwnedBytes
    ) -> ParameterSlice:
        config = self._config
        return ParameterSlice(
            spec,
            slice_of(spec.size, config.shard_index, config.shard_count),
            storage,
            chunk_element_count=layout.chunk_element_count,
            is_first_shard=config.shard_index == 0,
            limits=config.limits,
            sessions=self._sessions,
            spans=self._spans,
            spool_dir=self._spool_dir,
        )


class Tables(Registry[TableSpec, TableLayout, TableStorage, TableSlice]):
    """The tables of a shard."""

    _kind, _counted = "table", "tables"

    @property
    def _count_max(self) -> int:
        return self._config.limits.table_count_max

    def _unknown(self, name: str) -> ShardwellError:
        return UnknownTableError(
            f"shard {self._config.shard_index} has no table {name!r:.140}; open it first (a "
            "shard that lost its memory has none)",
            table=name[:140],
        )

    def _spec_of(self, description: dict[str, Any]) -> TableSpec:
        return TableSpec.from_proto(ParseDict(description, table_pb2.TableSpec()))

    def _layout_of(
        self, spec: TableSpec, owner: str, kept: TableLayout | None = None
    ) -> TableLayout:
        limits = self._config.limits
        layout = TableLayout(
            name=spec.name,
            dim=spec.dim,
            slot_widths=spec.slot_widths,
            row_capacity=1,
            rows_per_change_max=rows_per_message_max(spec),
            with_sum=spec.worker_count > 1,
            description=self._description(spec.to_proto(), owner),
        )
        capacity = min(limits.table_row_count_max, limits.stored_bytes_max // layout.row_size_bytes)
        batch = layout.rows_per_change_max
        if spec.row_count is not None:  # no message has more distinct ids than there are
            here = self._placement(spec).local_row_count()
            capacity, batch = min(capacity, here), min(batch, here)
        if kept is not None:
            capacity, batch = kept.row_capacity, max(kept.rows_per_change_max, batch)
        return dataclasses.replace(layout, row_capacity=max(capacity, 1), rows_per_change_max=batch)

    def _placement(self, spec: TableSpec) -> RowPlacement:
        return RowPlacement(spec.row_count, self._config.shard_count)

    def _size_beforehand(self, layout: TableLayout) -> int:
        return 0  # rows count as room is made for them

    def _size_of(self, storage: TableStorage) -> int:
        return storage.undo_bytes

    def _create(self, layout: TableLayout, begin: Begin[TableStorage]) -> object:
        return self._store.create_table(layout, begin)

    def _made(
        self, spec: TableSpec, layout: TableLayout, storage: TableStorage, stored: OwnedBytes
    ) -> TableSlice:
        return TableSlice(
            spec,
            layout,
            storage,
            self._placement(spec),
            shard_index=self._config.shard_index,
            limits=self._config.limits,
            stored_bytes=stored,
            sessions=self._sessions,
            spans=self._spans,
            spool_dir=self._spool_dir,
        )

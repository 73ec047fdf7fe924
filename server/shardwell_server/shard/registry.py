"""The parameters and the tables of a shard: each by name, made once, under the limits over all.

Made is one when its storage is, and the shard has taken that over; until then, and if either fails,
there is none of that name, on disk or here. A name is deleted in two steps on shard 0, in one on
the others: see deletions.py. A parameter and a table never get the same name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from shardwell.errors import (
    LimitError,
    OtherIncarnationError,
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
from shardwell.specs.fragments import first_fragment
from shardwell.specs.parameter import ParameterSpec
from shardwell.specs.table import TableSpec
from shardwell.v1 import table_pb2, types_pb2
from shardwell.wire import images
from shardwell.wire.chunks import HEAD_SIZE_MAX_BYTES
from shardwell.wire.rows import rows_per_message_max
from shardwell_server.shard.deletions import Deletions, Gone, Mark
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.quotas import ByteBudget, Counted, OwnedBytes, Usages
from shardwell_server.shard.sessions import Attendance
from shardwell_server.shard.slice import ShardSlice, SharedParts
from shardwell_server.shard.table.slice import TableSlice
from shardwell_server.store.contract import (
    Layout,
    ParameterStorage,
    Store,
    TableLayout,
    TableStorage,
)


class _Booked(NamedTuple):
    owner: str
    """Name of the token by which it was made; empty: of none."""
    stored: OwnedBytes


SpecT = TypeVar("SpecT", ParameterSpec, TableSpec)
LayoutT = TypeVar("LayoutT", Layout, TableLayout)
StorageT = TypeVar("StorageT", ParameterStorage, TableStorage)
OwnedT = TypeVar("OwnedT", bound=ShardSlice[Any, Any, Any])


class Registry(ABC, Generic[SpecT, LayoutT, StorageT, OwnedT]):
    """The base of both kinds, which share the lock of all names. Any thread may call it."""

    _kind: ClassVar[Literal["parameter", "table"]]
    _counted: ClassVar[Counted]
    _unknown_error: ClassVar[type[ShardwellError]]
    _make_it: ClassVar[str]
    """The words of an error about a name that nothing has: "create it", "open it"."""
    _fewer: ClassVar[str] = ""

    def __init__(
        self,
        shared: SharedParts,
        store: Store,
        lock: threading.Lock,
        stored_bytes: ByteBudget,
        usages: Usages,
        deletions: Deletions,
    ) -> None:
        self.beside: Registry[Any, Any, Any, Any] | None = None
        """The registry of the other kind, whose names are taken, too."""
        self._shared = shared
        self._config = shared.config
        self._store = store
        self._lock = lock
        self._stored_bytes = stored_bytes
        self._usages = usages
        self._deletions = deletions
        self._by_name: dict[str, OwnedT] = {}
        self._booked: dict[str, _Booked] = {}
        self._leaving: dict[str, Gone] = {}
        """Names that no call finds any more, and whose deletion is not noted yet."""

    def open(self, spec: SpecT, owner: str = "") -> tuple[OwnedT, bool]:
        """Returns the one of that name, made now if it is new; and True if it is.

        Raises:
            SpecMismatchError: it exists with another spec, or the other kind has the name.
            UnknownParameterError, UnknownTableError: it is being deleted.
            LimitError: a limit would be exceeded.
            StorageError: there is no room on the disk, or it can't be written to.
        """
        with self._lock:
            known = self._by_name.get(spec.name)
            if self._deletions.mark_of(self._kind, spec.name) is not None:
                raise self._unknown(spec.name, self._words_of(spec.name))
            if known is None:
                self._check_free(spec.name)
                self._check_family_is_free(spec)
                return self._make(spec, owner), True
        differences = known.spec.differences(spec)
        if differences:
            raise SpecMismatchError(
                f"{self._kind} {spec.name!r} exists with another spec: {'; '.join(differences)}; "
                "open it with the spec that exists or by its name alone, choose another name, or "
                f"delete it first (shardwell delete {spec.name})",
                **self._where(spec.name),
            )
        return known, False

    def get(self, name: str) -> OwnedT:
        found = self._by_name.get(name)
        if found is None or self._deletions.mark_of(self._kind, name) is not None:
            raise self._unknown(name, self._words_of(name))
        return found

    def check_opened(self, name: str, incarnation: int) -> None:
        """Refuses a call for one that has lost the name to another; incarnation 0 means any.

        Raises:
            UnknownParameterError, UnknownTableError: it was deleted.
            OtherIncarnationError: another one has its name on shard 0, where each is made first.
        """
        found = self._by_name.get(name)
        own = 0 if found is None else found.incarnation
        if not incarnation or own == incarnation:
            return
        gone = self._deletions.gone(self._kind, name, incarnation) or self._leaving.get(name)
        if gone is not None:
            since = ", and another one was made since" if own else ""
            how = f"{gone.words}{since}; open it again to use what has the name now"
            raise self._unknown(name, how)
        if own and self._config.shard_index == 0:
            raise OtherIncarnationError(
                f"{self._kind} {name!r} was made anew on shard 0 since this worker opened it: "
                "shard 0 lost its memory; restore a checkpoint into an empty cluster, or start the "
                "training again under another name, and start this worker again",
                **self._where(name),
            )

    def opened(self, name: str, incarnation: int) -> OwnedT:
        self.check_opened(name, incarnation)
        return self.get(name)

    def _words_of(self, name: str) -> str:
        mark = self._deletions.mark_of(self._kind, name)
        if mark is not None:
            return (
                f"is being deleted by {mark.by!r}, and other shards may have it still: delete it "
                "again to finish that (shardwell delete NAME), then it can be made anew"
            )
        gone = self._leaving.get(name) or self._deletions.gone(self._kind, name)
        return "" if gone is None else f"{gone.words}; open it again to make it anew"

    def _check_free(self, name: str) -> None:
        """Refuses a name that the other kind or a family has; the lock is held."""
        if self.beside is not None and self.beside.has(name):
            raise SpecMismatchError(
                f"{name!r} is a {self.beside._kind} on this cluster, and a {self._kind} can't have "
                f"the same name; choose another one, or delete the {self.beside._kind} first",
                **self._where(name),
            )
        if self.has_family(name) or (self.beside is not None and self.beside.has_family(name)):
            raise SpecMismatchError(
                f"{name!r} is a family of fragments on this cluster, and a {self._kind} can't have "
                "the same name; choose another one, or delete the family first",
                **self._where(name),
            )

    def has_family(self, name: str) -> bool:
        return False

    def _check_family_is_free(self, spec: SpecT) -> None:
        """Refuses a fragment whose family collides; the lock is held."""

    def describe(
        self, part: OwnedT, name_count_max: int, attending: Mapping[str, Attendance]
    ) -> Any:
        status = part.describe(name_count_max, attending)
        status.marked = self.mark_of(part.spec.name) is not None
        return status

    # Deleting.

    def owner_of(self, name: str) -> str | None:
        """Returns the name of the token that made one; empty: of none. None: there is none."""
        booked = self._booked.get(name)
        return None if booked is None else booked.owner

    def mark_of(self, name: str) -> Mark | None:
        return self._deletions.mark_of(self._kind, name)

    def living_members(self, name: str, but: int) -> list[tuple[str, int, float]]:
        found = self._by_name.get(name)
        return [] if found is None else found.living_members(but)

    def find(self, name: str) -> OwnedT | None:
        """Returns one of that name, though its deletion is decided."""
        return self._by_name.get(name)

    def is_taken(self, name: str) -> bool:
        return self.has(name) or (self.beside is not None and self.beside.has(name))

    def mark(self, name: str, incarnation: int, by: str, *, force: bool, but: int) -> bool:
        """Decides the deletion of a name, unless it has members; False: it has. Safe to repeat.

        Session `but`, of the client `by` that deletes it, is no member. OtherIncarnationError:
        another one has the name.
        """
        with self._lock:
            found, mark = self._by_name.get(name), self.mark_of(name)
            if mark is not None and mark.incarnation == incarnation:
                return True
            if self._knows(name, {incarnation}):  # asked again, when another client had ended it
                return True
            if mark is not None or found is None or found.incarnation != incarnation:
                raise self._another(name)
            if not force and found.living_members(but):
                return False
            self._deletions.mark(self._kind, name, incarnation, by)
            return True

    def remove(
        self,
        name: str,
        incarnation: int,
        held: int,
        by: str,
        end_calls: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Removes one with its files; returns how many bytes it stored. Safe to repeat.

        None: it was removed before, or was never here; what has the name since stays. `incarnation`
        is that of shard 0, and `held` that of this shard, as it was asked before. `end_calls` ends
        what uses it, once no call finds it any more: an error about files that are gone is no
        answer for a client.

        Raises:
            OtherIncarnationError: there is another one; or this is shard 0, without such a mark.
            StorageError: it can't be removed, or that can't be noted.
        """
        with self._lock:
            found, mark = self._by_name.get(name), self.mark_of(name)
            gone, freed_bytes = {incarnation, held}, None
            if found is not None and found.incarnation not in gone and self._knows(name, gone):
                return None
            if found is not None:
                is_decided = self._config.shard_index > 0 or mark is not None
                if not is_decided or found.incarnation not in gone:
                    raise self._another(name)
                self._leaving[name] = Gone((self._kind, name), tuple(gone), by)
                del self._by_name[name]
                try:
                    end_calls()
                    with found.handing_over():  # the watch looks after its members no more
                        self._store.remove(found.storage.layout)
                except BaseException:
                    self._by_name[name] = found
                    del self._leaving[name]
                    raise
                booked = self._booked.pop(name)
                self._usages.of(booked.owner).add(self._counted, -1)
                freed_bytes = booked.stored.give_back()
            if found is not None or mark is not None or (any(gone) and not self._knows(name, gone)):
                self._deletions.finish(self._kind, name, gone, by)
            self._leaving.pop(name, None)
            return freed_bytes

    def finish_deletions(self) -> None:
        """Ends deletions that an earlier process cut off once the files were gone; at the start.

        A renaming that 0.2.0 has cut off is done, too, where the files have the new name. Else
        shard 0, which decides, goes back to the old one, and the others by `take_back`.
        """
        for kind, name in self._deletions.marked:
            mark = self._deletions.mark_of(kind, name)
            if kind != self._kind or mark is None:
                continue
            if name not in self._by_name:
                self._deletions.finish(kind, name, {mark.incarnation}, mark.by, mark.to)
            elif mark.to:
                self._deletions.unmark(kind, name)

    def take_back(self, name: str, incarnation: int) -> None:
        """Gives one its old name, where 0.2.0 has renamed it here, and not on shard 0.

        `incarnation` is that on shard 0, which the client has asked before; 0: none.
        """
        gone = self._deletions.gone(self._kind, name, incarnation) if incarnation else None
        if gone is None or not gone.to:
            return
        with self._lock:
            found = self._by_name.get(gone.to)
            if found is None or found.incarnation != incarnation or name in self._by_name:
                return
            spec = dataclasses.replace(found.spec, name=name)
            kept: LayoutT = found.storage.layout
            description = {**kept.description, "spec": MessageToDict(spec.to_proto())}
            layout = dataclasses.replace(kept, name=name, description=description)
            booked = self._booked[gone.to]
            with found.handing_over():
                storage = self._store.rename(gone.to, layout)
                self._by_name[name] = self._made(spec, storage, booked.stored)
            del self._by_name[gone.to], self._booked[gone.to]
            self._booked[name] = booked
            self._by_name[name].go_on_after_start()
            self._deletions.finish(self._kind, gone.to, {incarnation}, gone.by, name)

    def _knows(self, name: str, incarnations: set[int]) -> bool:
        known = incarnations - {0}
        return bool(known) and all(
            self._deletions.gone(self._kind, name, each) is not None for each in known
        )

    def _another(self, name: str) -> OtherIncarnationError:
        return OtherIncarnationError(
            f"{self._kind} {name!r} is another one on shard {self._config.shard_index} than was "
            "asked about, or its deletion is not decided; nothing has changed; delete it again",
            **self._where(name),
        )

    def has(self, name: str) -> bool:
        return name in self._by_name

    @property
    def count(self) -> int:
        """The number of `all`, at no cost of listing them."""
        return len(self._by_name)

    def all(self) -> list[OwnedT]:
        with self._lock:
            return [self._by_name[name] for name in sorted(self._by_name)]

    def recover(self, found: Iterable[tuple[LayoutT, StorageT]]) -> None:
        """Goes on with what an earlier process left; to be called once, first."""
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
            self._by_name[name] = self._made(spec, storage, stored)
            self._booked[name] = _Booked(owner, stored)

    def _make(self, spec: SpecT, owner: str) -> OwnedT:
        count_max = getattr(self._config.limits, f"{self._kind}_count_max")
        if len(self._by_name) >= count_max:
            raise LimitError(
                f"limit {self._kind}_count_max={count_max} is reached; {self._kind} "
                f"{spec.name!r} does not fit; {self._fewer}raise the limit on the shards",
                **self._where(spec.name),
            )
        layout, stored = self._layout_of(spec, owner), self._bytes_of(owner)

        def begin(storage: StorageT) -> None:
            with self._taken(stored, spec.name, self._size_of(storage), " for its undo file"):
                self._by_name[spec.name] = self._made(spec, storage, stored)

        usage = self._usages.of(owner)
        usage.take(self._counted, **self._where(spec.name))
        try:
            with self._taken(stored, spec.name, self._size_beforehand(layout)):
                self._store.create(layout, begin)  # both are made, or neither is
        except BaseException:
            usage.add(self._counted, -1)
            raise
        self._booked[spec.name] = _Booked(owner, stored)
        return self._by_name[spec.name]

    def _bytes_of(self, owner: str) -> OwnedBytes:
        return OwnedBytes(self._stored_bytes, self._usages.of(owner))

    @contextlib.contextmanager
    def _taken(
        self, stored: OwnedBytes, name: str, size_bytes: int, why: str = ""
    ) -> Iterator[None]:
        needs = f"{self._kind} {name!r} needs {{}} bytes here{why}"
        stored.take(size_bytes, needs, "add shards, or raise it", **self._where(name))
        try:
            yield
        except BaseException:
            stored.add(-size_bytes)
            raise

    def _where(self, name: str) -> dict[str, Any]:
        return {self._kind: name}

    def _description(self, spec: Message, owner: str) -> dict[str, Any]:
        return {
            "spec": MessageToDict(spec),
            "shard_index": self._config.shard_index,
            "shard_count": self._config.shard_count,
            **({"owner": owner} if owner else {}),
        }

    def _unknown(self, name: str, how: str) -> ShardwellError:
        """Returns the error for a name without one; `how` it was deleted, if it was."""
        words = f"{self._kind} {name!r:.140} {how}"
        if not how:
            words = (
                f"shard {self._config.shard_index} has no {self._kind} {name!r:.140}; "
                f"{self._make_it} first (a shard that lost its memory has none)"
            )
        return self._unknown_error(words, **self._where(name[:140]))

    @abstractmethod
    def _spec_of(self, description: dict[str, Any]) -> SpecT:
        """Reads the spec in a description; ParseError, ShardwellError: it can't be read."""

    @abstractmethod
    def _layout_of(self, spec: SpecT, owner: str, kept: LayoutT | None = None) -> LayoutT:
        """Returns a new one's layout, with the sizes of one `kept`: limits may have changed."""

    @abstractmethod
    def _size_beforehand(self, layout: LayoutT) -> int:
        """Returns the bytes that it stores for as long as it exists."""

    @abstractmethod
    def _size_of(self, storage: StorageT) -> int:
        """Returns the bytes that are known only when the storage is made."""

    @abstractmethod
    def _made(self, spec: SpecT, storage: StorageT, stored: OwnedBytes) -> OwnedT:
        """Returns the shard's part of it."""


class Parameters(Registry[ParameterSpec, Layout, ParameterStorage, ParameterSlice]):
    """The parameters of a shard."""

    _kind, _counted = "parameter", "parameters"
    _unknown_error, _make_it = UnknownParameterError, "create it"
    _fewer = "put many small tensors into one parameter (tensors=), or "

    def open(self, spec: ParameterSpec, owner: str = "") -> tuple[ParameterSlice, bool]:
        found = super().open(spec, owner)
        found[0].make_image()  # of one that needs no first weights, before any client hears of it
        return found

    def has_family(self, name: str) -> bool:
        first = self._by_name.get(first_fragment(name))
        return first is not None and first.spec.fragment is not None

    def _check_family_is_free(self, spec: ParameterSpec) -> None:
        own = spec.fragment
        if own is None:
            return
        if self.is_taken(own.family):
            raise SpecMismatchError(
                f"{own.family!r} is a parameter or table on this cluster, and a family of "
                "fragments can't have the same name; choose another one, or delete that first",
                **self._where(spec.name),
            )
        first = self._by_name.get(first_fragment(own.family))
        there = own if first is None else first.spec.fragment
        if there is not None and (there.count, there.assignment) != (own.count, own.assignment):
            raise SpecMismatchError(
                f"family {own.family!r} is dealt {there.assignment!r} into {there.count} fragments "
                f"on this cluster; {spec.name!r} is of a deal {own.assignment!r} into {own.count}; "
                "deal it in the same way, or choose another name",
                **self._where(spec.name),
            )

    def _spec_of(self, description: dict[str, Any]) -> ParameterSpec:
        return ParameterSpec.from_proto(ParseDict(description, types_pb2.ParameterSpec()))

    def _layout_of(self, spec: ParameterSpec, owner: str, kept: Layout | None = None) -> Layout:
        config = self._config
        # An image may be sent whole.
        codec = CODECS["fp32" if spec.has_image else spec.codec_name].in_blocks_of(spec.block_size)
        place = (config.shard_index, config.shard_count)
        size = slice_of(spec.size, *place, spec.slice_unit).size
        slots = UpdateRule(spec.optimizer).initial_slots
        if spec.has_image:
            slots = (*slots, 0.0)
        chunk_size, kept_size_bytes = config.chunk_size_bytes // codec.item_size, 0
        chunk_size = max(chunk_size // spec.slice_unit, 1) * spec.slice_unit
        if kept is not None:
            chunk_size, kept_size_bytes = kept.chunk_element_count, kept.kept_size_bytes
        elif spec.has_open_sets:
            kept_size_bytes = 2 * spec.step_size_max
        elif spec.keeps_versions:
            kept_size_bytes = codec.encoded_bytes(min(chunk_size, size)) + HEAD_SIZE_MAX_BYTES
        return Layout(
            name=spec.name,
            slice_size=size,
            chunk_element_count=chunk_size,
            with_sum=spec.worker_count > 1,
            initial_slots=slots,
            kept_size_bytes=kept_size_bytes,
            description=self._description(spec.to_proto(), owner),
        )

    def _size_beforehand(self, layout: Layout) -> int:
        spec = self._spec_of(layout.description["spec"])
        return layout.size_bytes + images.kept_bytes(spec.codec_name, layout.slice_size)

    def _size_of(self, storage: ParameterStorage) -> int:
        return 0

    def _made(
        self, spec: ParameterSpec, storage: ParameterStorage, stored: OwnedBytes
    ) -> ParameterSlice:
        return ParameterSlice(spec, storage, stored, self._shared)


class Tables(Registry[TableSpec, TableLayout, TableStorage, TableSlice]):
    """The tables of a shard."""

    _kind, _counted = "table", "tables"
    _unknown_error, _make_it = UnknownTableError, "open it"

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
            with_sum=spec.sums_gradients,
            description=self._description(spec.to_proto(), owner),
        )
        capacity = min(limits.table_row_count_max, limits.stored_bytes_max // layout.row_size_bytes)
        batch = layout.rows_per_change_max
        if spec.row_count is not None:  # no message has more distinct ids than there are
            here = RowPlacement(spec.row_count, self._config.shard_count).local_row_count()
            capacity, batch = min(capacity, here), min(batch, here)
        if kept is not None:
            capacity, batch = kept.row_capacity, max(kept.rows_per_change_max, batch)
        return dataclasses.replace(layout, row_capacity=max(capacity, 1), rows_per_change_max=batch)

    def _size_beforehand(self, layout: TableLayout) -> int:
        return 0  # rows count as room is made for them

    def _size_of(self, storage: TableStorage) -> int:
        return storage.undo_bytes

    def _made(self, spec: TableSpec, storage: TableStorage, stored: OwnedBytes) -> TableSlice:
        return TableSlice(spec, storage, stored, self._shared)

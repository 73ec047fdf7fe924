"""The states of a training's workers beside its weights: opaque bytes, each of one step.

A worker gives its state of step t before its gradient of t leaves, and the log has it before the
call returns. So a worker of a fixed crew whose next step is t finds, when it is started again, its
state of t, or that of t - 1 if it was killed before it gave t's: it makes t - 1 again then.

    state of a worker's entry   event                                  next
    none                        given, of step t                       newest t
    newest t                    given, of a later step u               newest u, before t
    newest t                    given again, of t                      newest t, with other bytes
    newest t, before s          power was lost, and steps from s on    asked for step s: s
    any                         others are newer, and there are many   none; seated workers last

A learner of outer training gives that of t + 1 before its offer of t leaves, of fragment 0. It is
its state of t + 1 once that offer has counted, and as long as it has not, that of t is.

The rest of a state behind its beginning is in pages, by their digests, in places of the storage:

    state of a place            event                                  next
    free                        a worker brings a page                 loose: no log names it
    loose                       a state that has it is given           kept, with that state's entry
    loose                       many are, or states are 2 steps on     free
    kept                        no entry, nor a snapshot, has it       free

So a place that a log names is not written, and a kill leaves whole pages of all that is kept. Pages
that several workers have alike are there once, and one of these brings each of them.

Snapshots of version V have of each worker the newest that is at most of V, while they are held.
Invariants: an entry of t is in the log before any gradient of its worker counts in t. There are as
many entries as `_count_max`, whatever ids clients give, and the bytes of all are in the quota. A
state is kept when all its pages are there.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.names import check_name
from shardwell.specs.parameter import (
    STATE_DIGEST_BYTES,
    STATE_PAGE_COUNT_MAX,
    STATE_PAGE_MAX_BYTES,
    STATE_SIZE_MAX_BYTES,
    STEP_MAX,
    ParameterSpec,
)
from shardwell.wire.state_tree import digest_of
from shardwell_server.shard.deadline import Changes, RequestDeadline
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.store.contract import Event, ParameterStorage

_LOG = logging.getLogger("shardwell_server")
_OTHERS_COUNT = 16
"""Workers besides those of a fixed crew whose states are kept."""
_ASKED_COUNT = 8
"""Pages that a worker is asked for at a time, so that others bring some meanwhile."""
_ASKED_COUNT_MAX = 4096
_BRING_S = 2.0
"""How long other workers wait for these; then they bring them."""
_PLACE_MAX = 2**24


class Given(NamedTuple):
    """A state, and the step whose gradient follows it."""

    worker_id: str
    step: int
    state: bytes
    """Its beginning."""
    pages: tuple[bytes, ...] = ()
    """Digests of what follows."""


class Missing(NamedTuple):
    """The pages that a state lacks, so that it is not kept yet; nothing: it is kept."""

    own: Sequence[int] = ()
    """Places in its `pages` of those that its worker is to bring."""
    are_others_awaited: bool = False
    """True if other workers are bringing the rest."""


class Page(NamedTuple):
    """The place of a page on the storage."""

    place: int
    size_bytes: int


class Held:
    """The states of a snapshot under way."""

    def __init__(self, version: int, found: Collection[Given]) -> None:
        self.version = version
        self.by_worker = {each.worker_id: each for each in found}


class Pages:
    """The pages of a parameter's states. The lock of these is held."""

    def __init__(
        self, storage: ParameterStorage, loose_max_bytes: int, now_s: Callable[[], float]
    ) -> None:
        self._storage = storage
        self._loose_max_bytes = loose_max_bytes
        self._now_s = now_s
        self._found: dict[bytes, Page] = {}
        """By digest."""
        self._loose: dict[bytes, int] = {}
        """Those that no state has so far, and for which step they came, in order."""
        self._asked: dict[bytes, tuple[str, float]] = {}
        """Who is to bring a page, and until when."""

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._found.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def size_of(self, digests: Iterable[bytes]) -> int:
        return sum(self._found[each].size_bytes for each in digests)

    def share_out(self, given: Given) -> Missing:
        """Returns what a state lacks, and who brings it: so workers share what they have alike."""
        lacking = {each: i for i, each in enumerate(given.pages) if each not in self._found}
        now_s, own = self._now_s(), list[int]()
        self._asked = {
            k: v for k, v in self._asked.items() if v[1] > now_s and k not in self._found
        }
        for digest, index in lacking.items():
            worker_id, _ = self._asked.get(digest, (given.worker_id, 0.0))
            if worker_id == given.worker_id and len(own) < _ASKED_COUNT:
                own.append(index)
                if len(self._asked) < _ASKED_COUNT_MAX:
                    self._asked[digest] = given.worker_id, now_s + _BRING_S
        return Missing(own, len(own) < len(lacking))

    def put(self, digest: bytes, page: bytes, step: int) -> None:
        taken = {each.place for each in self._found.values()}
        place = next(each for each in itertools.count() if each not in taken)
        self._storage.put_page(place, page)
        self._found[digest], self._loose[digest] = Page(place, len(page)), step
        while self.size_of(self._loose) > self._loose_max_bytes:
            oldest = next(iter(self._loose))
            del self._loose[oldest], self._found[oldest]

    def get(self, digest: bytes) -> bytes | None:
        """Returns a page; None: there is none. StorageError: it was damaged."""
        page = self._found.get(digest)
        if page is None:
            return None
        data = self._storage.page(*page)
        if digest_of(data) != digest:
            raise StorageError("a page of a state was damaged; restore the directory from a copy")
        return data

    def keep(self, used: Collection[bytes], step: int) -> None:
        """Frees all but those that are used, and what has come for a state of late."""
        self._loose = {k: v for k, v in self._loose.items() if k not in used and v >= step - 1}
        self._found = {k: v for k, v in self._found.items() if k in used or k in self._loose}

    # In the log.

    def entries(self, digests: Iterable[bytes]) -> list[list[Any]]:
        return [[each.hex(), *self._found[each]] for each in digests]

    def note(self, entries: Any) -> tuple[bytes, ...]:
        """Takes places from a log; returns the digests."""
        found = {bytes.fromhex(digest): Page(place, size) for digest, place, size in entries}
        for page in found.values():
            check_integer("place", page.place, 0, _PLACE_MAX)
            check_integer("size", page.size_bytes, 1, STATE_PAGE_MAX_BYTES)
        self._found |= found
        return tuple(bytes.fromhex(digest) for digest, _, _ in entries)

    def are_whole(self, digests: Iterable[bytes]) -> bool:
        try:
            return all(self.get(each) is not None for each in digests)
        except StorageError:
            return False


class TrainingStates:
    """The states of one parameter. Any thread may call it."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        stored_bytes: OwnedBytes,
        seated_worker_ids: Callable[[], Collection[str]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._stored_bytes = stored_bytes
        self._counted_bytes = 0
        """The part of them that is in `stored_bytes`."""
        self._seated_worker_ids = seated_worker_ids
        self._changes = Changes()
        self._newest: dict[str, Given] = {}
        self._before: dict[str, Given] = {}
        self._held: list[Held] = []
        is_fixed = spec.members is None
        self._count_max = _OTHERS_COUNT + (spec.worker_count if is_fixed else 0)
        self._pages = Pages(storage, self._count_max * STATE_SIZE_MAX_BYTES, now_s)

    def put(self, given: Given, most: int = STEP_MAX) -> Missing:
        """Keeps a state in place of the worker's older ones; `most`: the latest step there can be.

        An older one than the worker's newest is a call that comes late, unless power was lost.

        Returns:
            What it lacks; it is not kept then.

        Raises:
            ArgumentError: it can't be one.
            LimitError: the shard, or the owner of the parameter, has no room for so many bytes.
            StorageError: it can't be written.
        """
        check_name("worker_id", given.worker_id)
        check_integer("step", given.step, 0, STEP_MAX)
        self._check_size("the beginning of a state", len(given.state), STATE_PAGE_MAX_BYTES)
        self._check_size("a state", 1 + len(given.pages), 2 + STATE_PAGE_COUNT_MAX, "parts")
        if any(len(each) != STATE_DIGEST_BYTES for each in given.pages):
            raise ArgumentError(
                f"a digest of a page has {STATE_DIGEST_BYTES} bytes", parameter=self._spec.name
            )
        with self._changes.lock:
            newest = self._newest.get(given.worker_id)
            if newest == given or (newest and given.step < newest.step <= most):
                return Missing()
            if any(each not in self._pages for each in given.pages):
                return self._pages.share_out(given)
            size_bytes = len(given.state) + self._pages.size_of(given.pages)
            self._check_size("a state", size_bytes, STATE_SIZE_MAX_BYTES)
            with self._room(len(given.state)):
                self._storage.note("states", self._event(given))
            for held in self._held:
                if given.step <= held.version:
                    held.by_worker[given.worker_id] = given
            self._take(given)
            self._free(given.step)
            self._storage.compact_notes("states", self._events)
            self._changes.notify_all()
            return Missing()

    def put_page(self, page: bytes, step: int) -> None:
        """Keeps a page for a state of `step` that is to come.

        Raises:
            ArgumentError: it can't be one.
            LimitError: as `put`.
            StorageError: it can't be written.
        """
        self._check_size("a page of a state", len(page), STATE_PAGE_MAX_BYTES)
        digest = digest_of(page)
        with self._changes.lock:
            if digest not in self._pages:
                with self._room(len(page)):
                    self._pages.put(digest, page, step)
                self._count_bytes()

    def page(self, digest: bytes) -> bytes:
        """Returns a page; empty: no state has it any more. StorageError: it was damaged."""
        with self._changes.lock:
            return self._pages.get(digest) or b""

    def _check_size(self, what: str, size: int, most: int, unit: str = "bytes") -> None:
        if not 0 < size <= most:
            raise ArgumentError(
                f"{what} of a training has {size} {unit}; expected 1 to {most}",
                parameter=self._spec.name,
            )

    def _free(self, step: int) -> None:
        states = (*self._newest.values(), *self._before.values())
        held = (each for held in self._held for each in held.by_worker.values())
        used = {digest for each in (*states, *held) for digest in each.pages}
        self._pages.keep(used, step)
        self._count_bytes()

    @contextlib.contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        self._stored_bytes.take(
            size_bytes,
            f"a state of the training of parameter {self._spec.name!r} needs {{}} bytes here",
            "keep less with keep_state(), or raise it",
            parameter=self._spec.name,
        )
        try:
            yield
        except BaseException:
            self._stored_bytes.add(-size_bytes)
            raise
        self._counted_bytes += size_bytes

    def _count_bytes(self) -> None:
        kept = (*self._newest.values(), *self._before.values())
        size_bytes = sum(len(each.state) for each in kept) + self._pages.size_bytes
        self._stored_bytes.add(size_bytes - self._counted_bytes)
        self._counted_bytes = size_bytes

    def _take(self, given: Given) -> None:
        newest = self._newest.pop(given.worker_id, None)
        if newest is not None and newest.step != given.step:
            self._before[given.worker_id] = newest
        self._newest[given.worker_id] = given
        if len(self._newest) > self._count_max:
            seated = self._seated_worker_ids()
            in_turn = reversed(self._newest.values())  # of one step the last: ranks come in order
            first = min(in_turn, key=lambda each: (each.worker_id in seated, each.step))
            del self._newest[first.worker_id]
            self._before.pop(first.worker_id, None)

    def get(self, worker_id: str, step: int) -> Given | None:
        """Returns the state that a worker at `step` goes on with; None: there is none at all."""
        with self._changes.lock:
            own = self._at_most(worker_id, step)
            if own is not None and (own.step >= step or not self._spec.has_open_sets):
                return own
            known: list[Given] = list(self._newest.values())
            if self._spec.fragment is not None:  # whose learners give that of the next step ahead
                found = (self._at_most(each, step) for each in self._newest)
                known = [each for each in found if each is not None]
            newest = max((each.step for each in known), default=0)
            of_step = [each for each in known if each.step == newest]
            return min(of_step, key=lambda each: each.worker_id, default=own)

    def _at_most(self, worker_id: str, step: int) -> Given | None:
        newest, before = self._newest.get(worker_id), self._before.get(worker_id)
        return before if newest is not None and newest.step > step and before else newest

    # Snapshots.

    @contextlib.contextmanager
    def held(self, version: int) -> Iterator[Held]:
        """Holds the states that belong to a version, as they are and as they come."""
        with self._changes.lock:
            found = [self._at_most(worker_id, version) for worker_id in self._newest]
            held = Held(version, [each for each in found if each and each.step <= version])
            self._held.append(held)
        try:
            yield held
        finally:
            with self._changes.lock:
                self._held.remove(held)
                self._free(0)

    def whole(self, held: Held, awaited: Collection[str], deadline: RequestDeadline) -> list[Given]:
        """Returns held states by worker, once those of `awaited` are of the version.

        Raises:
            NotYet: the request is to be made again; see `RequestDeadline.wait`.
        """
        with self._changes.lock:
            missing = [
                each
                for each in held.by_worker.values()
                if each.worker_id in awaited and each.step < held.version
            ]
            if missing:
                deadline.wait(self._changes)
            return sorted(held.by_worker.values())

    # Keeping.

    def _events(self) -> list[Event]:
        kept = (self._before, self._newest)
        return [self._event(each) for of in kept for each in of.values()]

    def _event(self, given: Given) -> Event:
        text = base64.b64encode(given.state).decode()
        event = {"worker_id": given.worker_id, "step": given.step, "state": text}
        pages = self._pages.entries(given.pages)
        return {**event, "pages": pages} if pages else event

    def restore(self) -> None:
        """Goes on from the log, without states whose pages a loss of power has damaged."""
        for event in self._storage.noted("states"):
            try:
                self._take(self._read(event))
            except (ArgumentError, KeyError, TypeError, ValueError) as error:
                raise StorageError(
                    f"parameter {self._spec.name!r}: its log of states holds {event!r:.200}, which "
                    f"this version can't read ({error!r}); run the version that wrote it, or "
                    "restore a copy",
                    parameter=self._spec.name,
                ) from None
        for worker_id in list(self._newest):
            kept = [self._newest.pop(worker_id), self._before.pop(worker_id, None)]
            whole = [each for each in kept if each and self._pages.are_whole(each.pages)]
            for entries, each in zip((self._newest, self._before), whole, strict=False):
                entries[worker_id] = each
            if kept[0] not in whole:
                _LOG.warning(
                    "parameter %r: pages of the state of worker %r are damaged, which is left out",
                    self._spec.name,
                    worker_id,
                )
        self._free(STEP_MAX)

    def _read(self, event: dict[str, Any]) -> Given:
        return Given(
            check_name("worker_id", event["worker_id"]),
            check_integer("step", event["step"], 0, STEP_MAX),
            base64.b64decode(event["state"], validate=True),
            self._pages.note(event.get("pages", ())),
        )

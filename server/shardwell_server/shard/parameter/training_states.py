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

Snapshots of version V have of each worker the newest that is at most of V, while they are held.
Invariants: an entry of t is in the log before any gradient of its worker counts in t. There are as
many entries as `_count_max`, whatever ids clients give, and the bytes of all are in the quota.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from shardwell.errors import ArgumentError, StorageError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.names import check_name
from shardwell.specs.parameter import STATE_SIZE_MAX_BYTES, STEP_MAX, ParameterSpec
from shardwell_server.shard.deadline import Changes, RequestDeadline
from shardwell_server.shard.quotas import OwnedBytes
from shardwell_server.store.contract import Event, ParameterStorage

_OTHERS_COUNT = 16
"""Workers besides those of a fixed crew whose states are kept."""


class Given(NamedTuple):
    """A state, and the step whose gradient follows it."""

    worker_id: str
    step: int
    state: bytes


class Held:
    """The states of a snapshot under way."""

    def __init__(self, version: int, found: Collection[Given]) -> None:
        self.version = version
        self.by_worker = {each.worker_id: each for each in found}


class TrainingStates:
    """The states of one parameter. Any thread may call it."""

    def __init__(
        self,
        spec: ParameterSpec,
        storage: ParameterStorage,
        stored_bytes: OwnedBytes,
        seated_worker_ids: Callable[[], Collection[str]],
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

    def put(self, given: Given, most: int = STEP_MAX) -> None:
        """Keeps a state in place of the worker's older ones; `most`: the latest step there can be.

        An older one than the worker's newest is a call that comes late, unless power was lost.

        Raises:
            ArgumentError: it can't be one.
            LimitError: the shard, or the owner of the parameter, has no room for so many bytes.
            StorageError: it can't be written.
        """
        check_name("worker_id", given.worker_id)
        check_integer("step", given.step, 0, STEP_MAX)
        if not 0 < len(given.state) <= STATE_SIZE_MAX_BYTES:
            raise ArgumentError(
                f"the state of a training has {len(given.state)} bytes; expected 1 to "
                f"{STATE_SIZE_MAX_BYTES}",
                parameter=self._spec.name,
            )
        with self._changes.lock:
            newest = self._newest.get(given.worker_id)
            if newest == given or (newest and given.step < newest.step <= most):
                return
            text = base64.b64encode(given.state).decode()
            with self._room(len(given.state)):
                self._storage.note("states", {**given._asdict(), "state": text})
            self._take(given)
            self._count_bytes()
            self._storage.compact_notes("states", self._events)
            for held in self._held:
                if given.step <= held.version:
                    held.by_worker[given.worker_id] = given
            self._changes.notify_all()

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
        size_bytes = sum(len(each.state) for each in kept)
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
        return [
            {**each._asdict(), "state": base64.b64encode(each.state).decode()}
            for of in (self._before, self._newest)
            for each in of.values()
        ]

    def restore(self) -> None:
        """Goes on from the log."""
        for event in self._storage.noted("states"):
            try:
                self._take(_read(event))
            except (ArgumentError, KeyError, TypeError, binascii.Error) as error:
                raise StorageError(
                    f"parameter {self._spec.name!r}: its log of states holds {event!r:.200}, which "
                    f"this version can't read ({error!r}); run the version that wrote it, or "
                    "restore a copy",
                    parameter=self._spec.name,
                ) from None
        self._count_bytes()


def _read(event: dict[str, Any]) -> Given:
    return Given(
        check_name("worker_id", event["worker_id"]),
        check_integer("step", event["step"], 0, STEP_MAX),
        base64.b64decode(event["state"], validate=True),
    )

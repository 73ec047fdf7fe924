"""Deletes a name on all shards: the client carries the decision from shard 0 to the others.

The order makes it safe to end anywhere: shard 0 refuses the name before any other shard removes it,
and removes it last. Every request is repeated while its shard is away; a deletion that another
client began is gone on with. `shardwell_server/shard/deletions.py` has the table of states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwell.errors import (
    ArgumentError,
    MembersAliveError,
    OtherIncarnationError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.take_over import TAKE_OVER_S
from shardwell.specs.fragments import Family
from shardwell.specs.names import check_name
from shardwell.threads.asking import ask_all
from shardwell.v1 import names_pb2 as pb

KINDS = {"parameter": pb.NAME_KIND_PARAMETER, "table": pb.NAME_KIND_TABLE}
_STAGE = pb.DeleteRequest.Stage
_PAUSE_S = 0.1
"""Between two looks at members whose end may not be noticed yet."""


class _Member(NamedTuple):
    worker_id: str
    host: str
    pid: int
    is_connected: bool
    """False: a shard that was started again waits for it."""

    def __str__(self) -> str:
        place = f" (process {self.pid} on {self.host!r})" if self.pid else ""
        return f"{self.worker_id!r}{place}"


class Deletion:
    """The deletion of one parameter or table by one client; `force`: although workers use it."""

    def __init__(
        self,
        name: str,
        kind: str | None,
        channels: Sequence[ShardChannel],
        *,
        worker_id: str,
        force: bool,
        family: str = "",
    ) -> None:
        if kind not in (None, *KINDS):
            raise ArgumentError(f'kind must be "parameter" or "table"; got {kind!r:.80}')
        self._name = check_name("name", name)
        self._kind = pb.NAME_KIND_UNSPECIFIED if kind is None else KINDS[kind]
        self._channels = channels
        self._worker_id = worker_id
        self._force = force
        self._family = family
        self._has_connected = False
        """False: shards only wait for the members that were found last."""

    def run(self, attempts: Attempts) -> int:
        """Deletes it; returns how many bytes all shards have freed. Safe to repeat."""
        return self._repeated(self._attempt, attempts)

    def check_members(self, attempts: Attempts) -> None:
        """Raises MembersAliveError where `run` would; changes nothing."""

        def look(attempts: Attempts) -> int:
            kind, held = self._look(attempts)
            if not (self._force or (held[0] is not None and held[0].marked)):
                self._check_members(kind, held)
            return 0

        self._repeated(look, attempts)

    def _repeated(self, attempt: Callable[[Attempts], int], attempts: Attempts) -> int:
        began_with_s = attempts.remaining_s
        while True:
            try:
                return attempt(attempts)
            except OtherIncarnationError:  # another client deleted it, and made it anew
                if attempts.remaining_s <= 0:
                    raise
            except MembersAliveError:
                waited_s = began_with_s - attempts.remaining_s
                is_in_use = self._has_connected and waited_s > TAKE_OVER_S
                if attempts.remaining_s <= 0 or is_in_use:
                    raise
            attempts.pause(_PAUSE_S)

    def _attempt(self, attempts: Attempts) -> int:
        kind, held = self._look(attempts)
        at_first = held[0]
        incarnation = 0 if at_first is None else at_first.incarnation
        if at_first is not None and not at_first.marked:
            self._check_members(kind, held)
            self._mark(kind, incarnation, attempts)

        def remove(index: int, attempts: Attempts) -> int:
            found = held[index]
            request = self._request(_STAGE.STAGE_REMOVE, kind, incarnation)
            request.held_incarnation = 0 if found is None else found.incarnation
            return self._ask(self._channels[index], request, attempts).freed_bytes

        others = range(1, len(self._channels))
        freed_bytes = sum(ask_all(others, lambda index: remove(index, attempts.beside())))
        return freed_bytes + remove(0, attempts)

    def _look(self, attempts: Attempts) -> tuple[pb.NameKind, list[pb.HeldName | None]]:
        def look(channel: ShardChannel, attempts: Attempts) -> pb.DeleteResponse:
            return self._ask(channel, self._request(_STAGE.STAGE_LOOK, self._kind), attempts)

        first = look(self._channels[0], attempts)
        others = ask_all(self._channels[1:], lambda channel: look(channel, attempts.beside()))
        looks = [answer.held for answer in (first, *others)]
        kind = self._kind_of(looks)
        return kind, [next((e for e in found if e.kind == kind), None) for found in looks]

    def _mark(self, kind: pb.NameKind, incarnation: int, attempts: Attempts) -> None:
        request = self._request(_STAGE.STAGE_MARK, kind, incarnation)
        request.force = self._force
        response = self._ask(self._channels[0], request, attempts)
        if not response.done:
            raise self._alive(kind, [each for each in response.held if each.kind == kind])

    def _request(
        self, stage: pb.DeleteRequest.Stage, kind: pb.NameKind, incarnation: int = 0
    ) -> pb.DeleteRequest:
        return pb.DeleteRequest(
            name=self._name,
            kind=kind,
            stage=stage,
            incarnation=incarnation,
            session=self._channels[0].session.number,
            worker_id=self._worker_id,
        )

    @staticmethod
    def _ask(
        channel: ShardChannel, request: pb.DeleteRequest, attempts: Attempts
    ) -> pb.DeleteResponse:
        request.shard.CopyFrom(channel.identity)
        return attempts.run(
            lambda: channel.call("Delete", request, pb.DeleteResponse, timeout_s=attempts.rest_s)
        )

    def _kind_of(self, looks: Sequence[Sequence[pb.HeldName]]) -> pb.NameKind:
        kinds = {each.kind for look in looks for each in look}
        if len(kinds) > 1:
            raise ArgumentError(
                f"{self._name!r} is a parameter and a table, as older versions allowed; pass "
                'kind="parameter" or kind="table" (shardwell delete --kind)'
            )
        if kinds:
            return kinds.pop()
        message = (
            f"no shard has a {_word(self._kind)} {self._name!r}; nothing is left to delete "
            "(shardwell status lists what there is)"
        )
        if self._kind == pb.NAME_KIND_TABLE:
            raise UnknownTableError(message, table=self._name)
        raise UnknownParameterError(message, parameter=self._name)

    def _check_members(self, kind: pb.NameKind, held: Sequence[pb.HeldName | None]) -> None:
        found = [each for each in held if each is not None]
        if not self._force and any(each.members for each in found):
            raise self._alive(kind, found)

    def _alive(self, kind: pb.NameKind, held: Sequence[pb.HeldName]) -> MembersAliveError:
        members: dict[str, _Member] = {}
        for member in (member for each in held for member in each.members):
            is_connected = not member.HasField("free_in_ms")
            known = members.get(member.worker_id)
            if known is None or (is_connected and not known.is_connected):
                members[member.worker_id] = _Member(
                    member.worker_id, member.host, member.pid, is_connected
                )
        self._has_connected = any(member.is_connected for member in members.values())
        where: dict[str, Any] = {_word(kind): self._name}
        names = ", ".join(map(str, sorted(members.values())))
        what = f"family {self._family!r}" if self._family else f"{_word(kind)} {self._name!r}"
        return MembersAliveError(
            f"{what} is in use by {names}; end them, or delete it all the same with force=True "
            "(shardwell delete --force): they get an error that says so",
            member_worker_ids=tuple(sorted(members)),
            **where,
        )


def delete_family(
    family: Family[Any],
    channels: Sequence[ShardChannel],
    attempts: Attempts,
    *,
    worker_id: str,
    force: bool,
) -> int:
    """Deletes the fragments that exist, the first one last; returns how many bytes were freed.

    A client that opens the family meanwhile finds fragment 0 with the weights of before, and so
    begins no new family on the remaining fragments. Safe to repeat. Where workers use one of them,
    nothing is deleted.
    """
    deletions = [
        Deletion(name, "parameter", channels, worker_id=worker_id, force=force, family=family.name)
        for name in reversed(family.names)
    ]
    freed_bytes = 0
    for each in deletions:
        each.check_members(attempts)
    for each in deletions:
        # Another client may have deleted it meanwhile.
        with contextlib.suppress(UnknownParameterError):
            freed_bytes += each.run(attempts)
    return freed_bytes


def _word(kind: pb.NameKind) -> str:
    return next((word for word, each in KINDS.items() if each == kind), "parameter or table")

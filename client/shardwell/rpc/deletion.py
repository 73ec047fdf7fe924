"""Deletes a name on all shards: the client carries the decision from shard 0 to the others.

The order makes it safe to end anywhere: shard 0 refuses the name before any other shard removes it,
and removes it last. Every request is repeated while its shard is away; a deletion that another
client began is gone on with. docs/adr/0029-deletion.md has the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwell.errors import (
    ArgumentError,
    MembersAliveError,
    StepOrderError,
    UnknownParameterError,
    UnknownTableError,
)
from shardwell.rpc.asking import ask_all
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.take_over import TAKE_OVER_S
from shardwell.specs.names import check_name
from shardwell.v1 import names_pb2 as pb

KINDS = {"parameter": pb.NAME_KIND_PARAMETER, "table": pb.NAME_KIND_TABLE}
_STAGE = pb.DeleteRequest.Stage
_PAUSE_S = 0.1
"""Between two looks at members whose end may not be noticed yet."""


class _Member(NamedTuple):
    """A worker that keeps a name from being deleted."""

    worker_id: str
    host: str
    pid: int
    is_connected: bool
    """False: a shard that was started again waits for it."""

    def __str__(self) -> str:
        place = f" (process {self.pid} on {self.host!r})" if self.pid else ""
        return f"{self.worker_id!r}{place}"


class Deletion:
    """One deletion by one client.

    Args:
        name: What is deleted.
        kind: "parameter" or "table"; None: whichever has the name.
        channels: All shards, in order.
        worker_id: Who deletes it.
        force: Although workers use it.
    """

    def __init__(
        self,
        name: str,
        kind: str | None,
        channels: Sequence[ShardChannel],
        *,
        worker_id: str,
        force: bool,
    ) -> None:
        if kind not in (None, *KINDS):
            raise ArgumentError(f'kind must be "parameter" or "table"; got {kind!r:.80}')
        self._name = check_name("name", name)
        self._kind = pb.NAME_KIND_UNSPECIFIED if kind is None else KINDS[kind]
        self._channels = channels
        self._worker_id = worker_id
        self._force = force
        self._has_connected = False
        """Whether a member that was found last is connected; else shards only wait for it."""

    def run(self, attempts: Attempts) -> int:
        """Deletes it; returns how many bytes all shards stored of it. Safe to repeat.

        Raises:
            UnknownParameterError, UnknownTableError: no shard has it.
            MembersAliveError: workers use it.
            ArgumentError: a parameter and a table have the name, and no kind was given.
            ShardwellError: a shard refuses, or did not come back in time.
        """
        began_with_s = attempts.remaining_s
        while True:
            try:
                return self._attempt(attempts)
            except StepOrderError:  # somebody else deleted it, and made it anew
                if attempts.remaining_s <= 0:
                    raise
            except MembersAliveError:
                waited_s = began_with_s - attempts.remaining_s
                is_in_use = self._has_connected and waited_s > TAKE_OVER_S
                if attempts.remaining_s <= 0 or is_in_use:
                    raise
            attempts.pause(_PAUSE_S)

    def _attempt(self, attempts: Attempts) -> int:
        first = self._look(self._channels[0], attempts)
        others = ask_all(self._channels[1:], lambda channel: self._look(channel, attempts.beside()))
        looks = [first, *others]
        kind = self._kind_of(looks)
        held = [next((each for each in look if each.kind == kind), None) for look in looks]
        at_first = held[0]
        incarnation = 0 if at_first is None else at_first.incarnation
        if at_first is not None and not at_first.marked:
            if not self._force:
                self._check_members(kind, [each for each in held if each is not None])
            self._mark(kind, incarnation, attempts)
        freed_bytes = sum(
            ask_all(
                list(zip(self._channels, held, strict=True))[1:],
                lambda each: self._remove(kind, incarnation, *each, attempts.beside()),
            )
        )
        return freed_bytes + self._remove(kind, incarnation, self._channels[0], at_first, attempts)

    def _look(self, channel: ShardChannel, attempts: Attempts) -> list[pb.HeldName]:
        request = self._request(_STAGE.STAGE_LOOK, self._kind)
        return list(self._ask(channel, request, attempts).held)

    def _mark(self, kind: pb.NameKind, incarnation: int, attempts: Attempts) -> None:
        """Has shard 0 refuse the name from now on.

        Raises:
            MembersAliveError: a worker has come meanwhile.
        """
        request = self._request(_STAGE.STAGE_MARK, kind)
        request.incarnation, request.force = incarnation, self._force
        response = self._ask(self._channels[0], request, attempts)
        if not response.done:
            raise self._alive(kind, [each for each in response.held if each.kind == kind])

    def _remove(
        self,
        kind: pb.NameKind,
        incarnation: int,
        channel: ShardChannel,
        held: pb.HeldName | None,
        attempts: Attempts,
    ) -> int:
        request = self._request(_STAGE.STAGE_REMOVE, kind)
        request.incarnation = incarnation
        request.held_incarnation = 0 if held is None else held.incarnation
        return self._ask(channel, request, attempts).freed_bytes

    def _request(self, stage: pb.DeleteRequest.Stage, kind: pb.NameKind) -> pb.DeleteRequest:
        return pb.DeleteRequest(
            name=self._name,
            kind=kind,
            stage=stage,
            session=self._channels[0].session.number,
            worker_id=self._worker_id,
        )

    def _ask(
        self, channel: ShardChannel, request: pb.DeleteRequest, attempts: Attempts
    ) -> pb.DeleteResponse:
        return attempts.run(lambda: channel.delete(request, attempts.rest_s))

    def _kind_of(self, looks: Sequence[Sequence[pb.HeldName]]) -> pb.NameKind:
        """What the shards hold under the name.

        Raises:
            UnknownParameterError, UnknownTableError: nothing.
            ArgumentError: a parameter and a table.
        """
        kinds = {each.kind for look in looks for each in look}
        if len(kinds) > 1:
            raise ArgumentError(
                f"{self._name!r} is a parameter and a table, as older versions allowed; pass "
                'kind="parameter" or kind="table" (shardwell delete --kind)'
            )
        if kinds:
            return kinds.pop()
        what = next((word for word, kind in KINDS.items() if kind == self._kind), None)
        message = (
            f"no shard has a {what or 'parameter or table'} {self._name!r}; nothing is left to "
            "delete (shardwell status lists what there is)"
        )
        if what == "table":
            raise UnknownTableError(message, table=self._name)
        raise UnknownParameterError(message, parameter=self._name)

    def _check_members(self, kind: pb.NameKind, held: Sequence[pb.HeldName]) -> None:
        """Refuses to delete what workers use.

        Raises:
            MembersAliveError: they do.
        """
        if any(each.members for each in held):
            raise self._alive(kind, held)

    def _alive(self, kind: pb.NameKind, held: Sequence[pb.HeldName]) -> MembersAliveError:
        members: dict[str, _Member] = {}
        for member in (member for each in held for member in each.members):
            is_connected = not member.HasField("free_in_ms")
            known = members.get(member.worker_id)
            if known is None or (is_connected and not known.is_connected):
                members[member.worker_id] = _Member(
                    member.worker_id, member.host, member.pid, is_connected
                )
        where: dict[str, Any] = {word: self._name for word, each in KINDS.items() if each == kind}
        (word,) = where
        names = ", ".join(map(str, sorted(members.values())))
        error = MembersAliveError(
            f"{word} {self._name!r} is in use by {names}; end them, or delete it all the same "
            "with force=True (shardwell delete --force): they get an error that says so",
            member_worker_ids=tuple(sorted(members)),
            **where,
        )
        self._has_connected = any(member.is_connected for member in members.values())
        return error

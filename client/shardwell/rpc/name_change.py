"""Deletes or renames on all shards: the client carries the decision from shard 0 to the others.

The order makes it safe to end anywhere: shard 0 refuses the name before any other shard frees it,
and frees it last. Every request is repeated while its shard is away; a change that another client
began is gone on with. docs/adr/0029-names.md has the states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from shardwell.errors import (
    ArgumentError,
    MembersAliveError,
    OtherIncarnationError,
    ShardwellError,
    SpecMismatchError,
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
_Request: TypeAlias = pb.DeleteRequest | pb.RenameRequest
_Response: TypeAlias = pb.DeleteResponse | pb.RenameResponse
_LOOK, _MARK, _FREE = 1, 2, 3
"""Stages, which have the same numbers in both requests; _FREE is STAGE_REMOVE, or STAGE_MOVE."""
_PAUSE_S = 0.1
"""Between two looks at members whose end may not be noticed yet."""


class _Member(NamedTuple):
    """A worker that keeps a name from being changed."""

    worker_id: str
    host: str
    pid: int
    is_connected: bool
    """False: a shard that was started again waits for it."""

    def __str__(self) -> str:
        place = f" (process {self.pid} on {self.host!r})" if self.pid else ""
        return f"{self.worker_id!r}{place}"


class NameChange:
    """One deletion or renaming by one client.

    Args:
        name: The name.
        kind: "parameter" or "table"; None: that of what has the name.
        channels: All shards, in order.
        worker_id: The worker that changes it.
        force: Although workers use it.
        to: The name that it gets; None: it is deleted.
        family: What it is a fragment of, for messages.
    """

    def __init__(
        self,
        name: str,
        kind: str | None,
        channels: Sequence[ShardChannel],
        *,
        worker_id: str,
        force: bool,
        to: str | None = None,
        family: str = "",
    ) -> None:
        if kind not in (None, *KINDS):
            raise ArgumentError(f'kind must be "parameter" or "table"; got {kind!r:.80}')
        self._name = check_name("name", name)
        self._to = None if to is None else check_name("new_name", to)
        if self._to == self._name:
            raise ArgumentError(f"new_name must be another name; got {name!r} for both")
        self._kind = pb.NAME_KIND_UNSPECIFIED if kind is None else KINDS[kind]
        self._channels = channels
        self._worker_id = worker_id
        self._force = force
        self._family = family
        self._has_connected = False
        """Whether a member that was found last is connected; else shards only wait for it."""

    def run(self, attempts: Attempts) -> int:
        """Changes it; returns how many bytes all shards have freed. Safe to repeat.

        Raises:
            UnknownParameterError, UnknownTableError: no shard has it, or another change of the name
                was begun.
            MembersAliveError: workers use it.
            SpecMismatchError: the new name is taken.
            ArgumentError: a parameter and a table have the name, and no kind was given.
            ShardwellError: a shard refuses, or did not come back in time.
        """
        return self._repeated(self._attempt, attempts)

    def check_members(self, attempts: Attempts) -> None:
        """Changes nothing; refuses to where `run` would because of its members.

        Raises:
            MembersAliveError: workers use it.
            ShardwellError: a shard refuses, or did not come back in time.
        """

        def look(attempts: Attempts) -> int:
            _, kind, held = self._look_at_all(attempts)
            if not (self._force or (held[0] is not None and held[0].marked)):
                self._check_members(kind, [each for each in held if each is not None])
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

    def _look_at_all(
        self, attempts: Attempts
    ) -> tuple[list[_Response], pb.NameKind, list[pb.HeldName | None]]:
        """What all shards say of the name, what kind has it, and what each holds of that."""
        first = self._look(self._channels[0], attempts)
        others = ask_all(self._channels[1:], lambda channel: self._look(channel, attempts.beside()))
        looks = [first, *others]
        kind = self._kind_of([look.held for look in looks])
        return (
            looks,
            kind,
            [next((each for each in look.held if each.kind == kind), None) for look in looks],
        )

    def _attempt(self, attempts: Attempts) -> int:
        looks, kind, held = self._look_at_all(attempts)
        at_first = held[0]
        incarnation = 0 if at_first is None else at_first.incarnation
        if at_first is not None and at_first.marked:
            self._check_same(kind, at_first)
        elif at_first is not None:
            self._check_free(kind, looks)
            if not self._force:
                self._check_members(kind, [each for each in held if each is not None])
            self._mark(kind, incarnation, attempts)
        elif self._to is not None:
            raise self._unknown(
                kind,
                "shard 0 lost its memory, and does not have it; restore a checkpoint under the new "
                "name",
            )
        freed_bytes = sum(
            ask_all(
                list(zip(self._channels, held, strict=True))[1:],
                lambda each: self._free(kind, incarnation, *each, attempts.beside()),
            )
        )
        return freed_bytes + self._free(kind, incarnation, self._channels[0], at_first, attempts)

    def _look(self, channel: ShardChannel, attempts: Attempts) -> _Response:
        return self._ask(channel, self._request(_LOOK, self._kind), attempts)

    def _mark(self, kind: pb.NameKind, incarnation: int, attempts: Attempts) -> None:
        """Has shard 0 refuse the name from now on.

        Raises:
            MembersAliveError: a worker has come meanwhile.
        """
        request = self._request(_MARK, kind)
        request.incarnation, request.force = incarnation, self._force
        response = self._ask(self._channels[0], request, attempts)
        if not response.done:
            raise self._alive(kind, [each for each in response.held if each.kind == kind])

    def _free(
        self,
        kind: pb.NameKind,
        incarnation: int,
        channel: ShardChannel,
        held: pb.HeldName | None,
        attempts: Attempts,
    ) -> int:
        """Frees the name on one shard; returns bytes that it gave back."""
        request = self._request(_FREE, kind)
        request.incarnation = incarnation
        request.held_incarnation = 0 if held is None else held.incarnation
        response = self._ask(channel, request, attempts)
        return response.freed_bytes if isinstance(response, pb.DeleteResponse) else 0

    def _request(self, stage: Any, kind: pb.NameKind) -> _Request:
        request: _Request = pb.DeleteRequest()
        if self._to is not None:
            request = pb.RenameRequest(new_name=self._to)
        request.name, request.kind, request.stage = self._name, kind, stage
        request.session = self._channels[0].session.number
        request.worker_id = self._worker_id
        return request

    def _ask(self, channel: ShardChannel, request: _Request, attempts: Attempts) -> _Response:
        return attempts.run(lambda: channel.change_name(request, attempts.rest_s))

    def _check_same(self, kind: pb.NameKind, marked: pb.HeldName) -> None:
        """Refuses to change a name in another way than was begun.

        Raises:
            UnknownParameterError, UnknownTableError: that is asked for.
        """
        if marked.new_name == (self._to or ""):
            return
        doing, command = "being deleted", f"delete {self._name}"
        if marked.new_name:
            doing = f"being renamed to {marked.new_name!r}"
            command = f"rename {self._name} {marked.new_name}"
        raise self._unknown(kind, f"it is {doing}; finish that first (shardwell {command})")

    def _check_free(self, kind: pb.NameKind, looks: Sequence[_Response]) -> None:
        """Refuses a new name that is taken.

        Raises:
            SpecMismatchError: a shard has another one of that name.
        """
        for index, look in enumerate(looks):
            if isinstance(look, pb.RenameResponse) and look.new_name_taken:
                where: dict[str, Any] = {_word(kind): self._to}
                raise SpecMismatchError(
                    f"shard {index} has a parameter or table {self._to!r}; nothing was renamed; "
                    "choose another name, or delete that first",
                    **where,
                )

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
        message = (
            f"no shard has a {_word(self._kind)} {self._name!r}; nothing is left to "
            f"{self._verb} (shardwell status lists what there is)"
        )
        if self._kind == pb.NAME_KIND_TABLE:
            raise UnknownTableError(message, table=self._name)
        raise UnknownParameterError(message, parameter=self._name)

    @property
    def _verb(self) -> str:
        """The command that does it."""
        return "delete" if self._to is None else "rename"

    def _unknown(self, kind: pb.NameKind, why: str) -> ShardwellError:
        message = f"can't {self._verb} {_word(kind)} {self._name!r}: {why}"
        if kind == pb.NAME_KIND_TABLE:
            return UnknownTableError(message, table=self._name)
        return UnknownParameterError(message, parameter=self._name)

    def _check_members(self, kind: pb.NameKind, held: Sequence[pb.HeldName]) -> None:
        """Refuses to change what workers use.

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
        word, verb = _word(kind), self._verb
        where: dict[str, Any] = {word: self._name}
        names = ", ".join(map(str, sorted(members.values())))
        what = f"family {self._family!r}" if self._family else f"{word} {self._name!r}"
        error = MembersAliveError(
            f"{what} is in use by {names}; end them, or {verb} it all the same "
            f"with force=True (shardwell {verb} --force): they get an error that says so",
            member_worker_ids=tuple(sorted(members)),
            **where,
        )
        self._has_connected = any(member.is_connected for member in members.values())
        return error


def delete_family(
    family: Family[Any],
    channels: Sequence[ShardChannel],
    attempts: Attempts,
    *,
    worker_id: str,
    force: bool,
) -> int:
    """Deletes all fragments that there are, the first one last; returns how many bytes were freed.

    A client that opens the family meanwhile finds fragment 0 with the weights of before, and so
    begins no new family on the remaining fragments. Safe to repeat.

    Raises:
        MembersAliveError: workers use it; nothing was deleted.
        ShardwellError: as `NameChange.run`; call again.
    """
    changes = [
        NameChange(
            name, "parameter", channels, worker_id=worker_id, force=force, family=family.name
        )
        for name in reversed(family.names)
    ]
    freed_bytes = 0
    for change in changes:
        change.check_members(attempts)
    for change in changes:
        # Another client may have deleted it meanwhile.
        with contextlib.suppress(UnknownParameterError):
            freed_bytes += change.run(attempts)
    return freed_bytes


def _word(kind: pb.NameKind) -> str:
    """A kind in a word, for messages."""
    return next((word for word, each in KINDS.items() if each == kind), "parameter or table")

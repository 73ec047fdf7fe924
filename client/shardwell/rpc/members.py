"""Members of parameters and tables, as all shards together have them; and how they are sent away.

A member is asked to leave, or its tenure is ended, on each shard: shards never speak to one
another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwell.errors import ArgumentError, UnknownParameterError, UnknownTableError
from shardwell.rpc.cluster_status import GONE, Status, is_empty, merged_members, step_of
from shardwell.rpc.retry import Attempts
from shardwell.rpc.shard_channel import ShardChannel
from shardwell.rpc.shard_status import (
    MemberStatus,
    ParameterStatus,
    TableStatus,
    ask_parameters,
    ask_status,
    ask_tables,
)
from shardwell.rpc.take_over import CrewSteps
from shardwell.specs.fragments import Family, grouped
from shardwell.specs.names import check_name
from shardwell.threads.asking import ask_all
from shardwell.v1 import session_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Members:
    """The members of one parameter or table."""

    kind: str
    """"parameter" or "table"."""
    name: str
    crew: str
    is_elastic: bool
    members: tuple[MemberStatus, ...]
    """Members, by worker id; those whose tenure is not over come first."""

    def has(self, worker_id: str) -> bool:
        """Returns True if a worker takes part, so that steps may await it."""
        return any(m.worker_id == worker_id and m.state not in GONE for m in self.members)


def find_family(
    name: str, channels: Sequence[ShardChannel], attempts: Attempts
) -> Family[ParameterStatus] | None:
    """The family of that name on a cluster; None: no shard has a fragment of it."""
    statuses = ask_all(
        channels,
        lambda channel: attempts.beside().run(lambda: ask_parameters(channel, attempts.rest_s)),
    )
    found = [
        ParameterStatus.from_proto(each)
        for status in statuses
        for each in status.parameters
        if each.spec.HasField("fragment") and each.spec.fragment.family == name
    ]
    return grouped(found).families.get(name)


def ask_members(
    channels: Sequence[ShardChannel], name: str | None, attempts: Attempts
) -> list[Members]:
    """The members of one parameter or table, of each fragment of a family, or of all. Sorted."""
    if name is None:
        statuses = ask_all(
            channels,
            lambda channel: attempts.beside().run(lambda: ask_status(channel, attempts.rest_s)),
        )
        parts: list[Status] = []
        for each in statuses:
            parts += [*each.parameters, *each.tables]
    else:
        check_name("name", name)
        ask = partial(_ask_one, name, attempts)
        parts = list(itertools.chain(*ask_all(channels, ask)))
        family = None if parts else find_family(name, channels, attempts)
        if family is not None:
            parts = list(family.all)
        if not parts:
            raise UnknownParameterError(
                f"no shard has a parameter or table {name!r}; shardwell status lists what there is",
                parameter=name,
            )
    by_name: dict[tuple[str, str], list[Status]] = {}
    for part in parts:
        kind = "table" if isinstance(part, TableStatus) else "parameter"
        by_name.setdefault((kind, part.spec.name), []).append(part)
    return [
        Members(
            kind=kind,
            name=found[0].spec.name,
            crew=found[0].spec.crew,
            is_elastic=found[0].spec.members is not None,
            members=merged_members(found),
        )
        for (kind, _), found in sorted(by_name.items(), key=lambda each: each[0])
    ]


def ask_steps(channels: Sequence[ShardChannel], name: str, attempts: Attempts) -> CrewSteps:
    """The next steps of the workers of a parameter or table."""
    parts = list(itertools.chain(*ask_all(channels, partial(_ask_one, name, attempts))))
    members = merged_members(parts)
    return CrewSteps(
        next_steps={each.worker_id: each.next_step for each in members},
        version=min((step_of(each) for each in parts if not is_empty(each)), default=0),
        has_room=any(len(members) < each.spec.worker_count for each in parts),
        is_restored=any(each.load_id for each in parts),
    )


def _ask_one(name: str, attempts: Attempts, channel: ShardChannel) -> list[Status]:
    def ask() -> list[Status]:
        parameters = ask_parameters(channel, attempts.rest_s, name).parameters
        found: list[Status] = [ParameterStatus.from_proto(each) for each in parameters]
        if not found:
            try:
                tables = ask_tables(channel, attempts.rest_s, name)
            except UnknownTableError:
                return []
            found = [TableStatus.from_proto(each) for each in tables]
        return found

    return attempts.beside().run(ask)


def end_tenures(
    channels: Sequence[ShardChannel],
    worker_id: str,
    name: str | None,
    attempts: Attempts,
    *,
    drains: bool,
) -> list[Members]:
    """Asks a member to leave, or ends its tenure, on all shards. Safe to repeat."""
    check_name("worker_id", worker_id)
    found = ask_members(channels, name, attempts)
    kind = "family" if found and found[0].name != name else found[0].kind if found else ""
    if name is not None and not any(each.is_elastic for each in found):
        raise ArgumentError(
            f"{kind} {name!r} has {found[0].crew}, whom each step needs: none of them can "
            "be sent away; workers come and go where it is made with members=shardwell.Elastic(...)"
        )
    joined = [each for each in found if each.is_elastic and each.has(worker_id)]
    if not joined:
        what = "any parameter or table" if name is None else f"{kind} {name!r}"
        present = sorted(
            {
                member.worker_id
                for each in found
                if each.is_elastic
                for member in each.members
                if each.has(member.worker_id)
            }
        )
        rest = f"these are: {', '.join(map(repr, present[:20]))}" if present else "it has none"
        raise ArgumentError(f"{worker_id!r} is no member of {what}; {rest}")

    def end(channel: ShardChannel, **where: Any) -> pb.EndTenureResponse:
        request = pb.EndTenureRequest(
            shard=channel.identity, worker_id=worker_id, drain=drains, **where
        )
        return channel.call(
            "EndTenure", request, pb.EndTenureResponse, timeout_s=attempts.rest_s, **where
        )

    for each in joined:
        for channel in channels:
            attempts.run(partial(end, channel, **{each.kind: each.name}))
    return joined

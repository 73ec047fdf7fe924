"""The meeting place of workers: all groups of one server, by name. Pure.

Requests and the time in, answers out; the caller sees to it that one comes at a time. Served by
shard 0 of a cluster, or by a worker (see `service`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardwell.errors import LimitError
from shardwell.group.rendezvous.gathering import Gathering
from shardwell.group.rendezvous.members import GenerationNumbers, GroupState
from shardwell.group.rendezvous.validation import (
    MeetingLimits,
    check_join,
    check_leave,
    check_renew,
)
from shardwell.v1 import group_pb2 as pb

_SWEEP_INTERVAL_S = 1.0


class Owner(NamedTuple):
    """The owner of a worker's token."""

    name: str = ""
    """Empty: the caller brought no token."""
    member_count_max: int | None = None
    """The most members that may be in groups here with that token; None: as many as there are."""


NOBODY = Owner()


class Meetings:
    """The groups that are met for or live, in this life of the server, whose number is drawn."""

    def __init__(self, limits: MeetingLimits | None = None, *, incarnation: int = 0) -> None:
        self._limits = limits or MeetingLimits()
        self._numbers = GenerationNumbers(incarnation)
        self._gatherings: dict[str, Gathering] = {}
        self._owners: dict[tuple[str, str], str] = {}
        """Owners by the names of their groups and their member ids, also of some that are gone."""
        self._sweep_due_s = -math.inf

    @property
    def group_count(self) -> int:
        """The groups that are held."""
        return len(self._gatherings)

    def describe(self, now_s: float) -> list[GroupState]:
        """The states of all groups, by name."""
        return [self._gatherings[name].describe(now_s) for name in sorted(self._gatherings)]

    def join(
        self, request: pb.JoinGroupRequest, now_s: float, owner: Owner = NOBODY
    ) -> pb.JoinGroupResponse:
        """Answers a worker that wants to join; holds a new group from then on."""
        check_join(request, self._limits, self._numbers.largest)
        gathering = self._gathering(request.spec, now_s)
        try:
            if not gathering.seating.knows(request.member.member_id):
                self._check_room(request.spec.name)
                self._count(request.spec.name, request.member.member_id, owner, now_s)
            return gathering.join(request, now_s)
        finally:
            self._forget_if_over(request.spec.name)

    def renew(
        self, request: pb.RenewLeaseRequest, now_s: float, owner: Owner = NOBODY
    ) -> pb.RenewLeaseResponse:
        """Answers a member that says that it lives."""
        check_renew(request, self._limits, self._numbers.largest)
        gathering = self._gathering(request.spec, now_s)
        try:
            if not gathering.seating.knows(request.member.member_id):
                self._count(request.spec.name, request.member.member_id, owner, now_s)
            return gathering.renew(request, now_s)
        finally:
            self._forget_if_over(request.spec.name)

    def leave(self, request: pb.LeaveGroupRequest, now_s: float) -> pb.LeaveGroupResponse:
        """Takes out a member, and with the last one the group."""
        check_leave(request)
        gathering = self._gatherings.get(request.group)
        if gathering is not None:
            gathering.leave(request.member_id, now_s)
            self._forget_if_over(request.group)
        return pb.LeaveGroupResponse()

    def _gathering(self, spec: pb.GroupSpec, now_s: float) -> Gathering:
        gathering = self._gatherings.get(spec.name)
        if gathering is None:
            self._sweep(now_s)
            if len(self._gatherings) >= self._limits.group_count_max:
                raise LimitError(
                    f"group_count_max={self._limits.group_count_max} groups meet here already; "
                    f"there is no room for {spec.name!r}; end one, or meet elsewhere"
                )
            gathering = Gathering(spec, self._numbers, self._limits, now_s)
            self._gatherings[spec.name] = gathering
        return gathering

    def _sweep(self, now_s: float) -> None:
        if now_s >= self._sweep_due_s:
            self._sweep_due_s = now_s + _SWEEP_INTERVAL_S
            for name in [n for n, one in self._gatherings.items() if one.is_silent(now_s)]:
                del self._gatherings[name]

    def _check_room(self, name: str) -> None:
        count = sum(len(one.seating.applicants) for one in self._gatherings.values())
        if count >= self._limits.applicant_count_max:
            raise LimitError(
                f"applicant_count_max={self._limits.applicant_count_max} workers wait here "
                f"already; there is no room for another of group {name!r}; try again later"
            )

    def _count(self, name: str, member_id: str, owner: Owner, now_s: float) -> None:
        if owner.member_count_max is None:
            return
        there = {
            (group, one)
            for group, each in self._gatherings.items()
            for one in each.seating.member_ids(now_s)
        }
        self._owners = {one: of for one, of in self._owners.items() if one in there}
        if list(self._owners.values()).count(owner.name) >= owner.member_count_max:
            raise LimitError(
                f"token {owner.name!r} is at its limit members={owner.member_count_max}: as many "
                f"are in groups that meet here; there is no room in {name!r}"
            )
        self._owners[name, member_id] = owner.name

    def _forget_if_over(self, name: str) -> None:
        gathering = self._gatherings.get(name)
        if gathering is not None and gathering.is_over():
            del self._gatherings[name]

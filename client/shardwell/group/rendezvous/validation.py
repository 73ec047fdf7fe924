"""The checks of a request to the rendezvous before anything in it is believed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwell.errors import ArgumentError, LimitError
from shardwell.specs.names import check_name, is_address
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import types_pb2

LEASE_MS_MIN, LEASE_MS_MAX = 100, 600_000
REPLACEMENT_WAIT_MS_MAX = 24 * 3_600_000
MEMBER_ID_LENGTH_MAX = 64
DESCRIPTION_LENGTH_MAX = 200
STRATEGY_LENGTH_MAX = 64
REASON_LENGTH_MAX = 2_000
GENERATION_MAX = 2**62
"""The largest that others are believed, so that there always is a larger one: a count of 2^30, and
32 drawn bits."""
_STRATEGY = re.compile(r"[a-z][a-z0-9_]*(\([a-z0-9_=., -]*\))?")


@dataclass(frozen=True, kw_only=True)
class MeetingLimits:
    """The bounds of one rendezvous; going over one is a `LimitError` that names it."""

    group_count_max: int = 1024
    group_size_max: int = 256
    """Ranks of a group: every member gets the addresses of all others, and greets each."""
    applicant_count_max: int = 4096
    refusal_count_max: int = 16
    """Refusals that a group remembers, for those who wonder why it is not complete."""


def check_join(request: pb.JoinGroupRequest, limits: MeetingLimits, largest: int) -> None:
    """Checks a request's ranges; no generation here has a number above `largest`."""
    _check_spec(request.spec, limits)
    _check_member(request.member)
    size = request.spec.size
    previous_count = request.previous_member_count or size
    _check_range("previous_member_count", request.previous_member_count, 0, size)
    _check_range("rank", request.rank, 0, size - 1)
    _check_range("lease_ms", request.lease_ms, LEASE_MS_MIN, LEASE_MS_MAX)
    number_max = max(GENERATION_MAX, largest)
    _check_range("previous_generation", request.previous_generation, 0, number_max)
    _check_range("checked_generation", request.checked_generation, 0, number_max)
    _check_range("replacement_wait_ms", request.replacement_wait_ms, 0, REPLACEMENT_WAIT_MS_MAX)
    _check_range("number of lost_ranks", len(request.lost_ranks), 0, size)
    if request.previous_generation:
        _check_range("rank", request.rank, 0, previous_count - 1)
        for rank in request.lost_ranks:
            _check_range("lost_ranks", rank, 0, previous_count - 1)
    _check_range("number of unreachable members", len(request.unreachable), 0, size)
    for unreachable in request.unreachable:
        _check_range("unreachable.rank", unreachable.rank, 0, size - 1)
        _check_range("length of unreachable.reason", len(unreachable.reason), 0, REASON_LENGTH_MAX)


def check_renew(request: pb.RenewLeaseRequest, limits: MeetingLimits, largest: int) -> None:
    """Checks a renewal."""
    _check_spec(request.spec, limits)
    _check_member(request.member)
    _check_range("generation", request.generation, 1, max(GENERATION_MAX, largest))
    _check_range("member_count", request.member_count, 1, request.spec.size)
    _check_range("rank", request.rank, 0, request.member_count - 1)
    _check_range("lease_ms", request.lease_ms, LEASE_MS_MIN, LEASE_MS_MAX)


def check_leave(request: pb.LeaveGroupRequest) -> None:
    """Checks the request of a member that leaves."""
    check_name("a group's name", request.group)
    _check_member_id(request.member_id)


def clipped(text: str, size_max_bytes: int) -> str:
    """One line of text that takes at most so many bytes, for messages (gRPC cuts long ones off)."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    encoded = plain.encode(errors="replace")
    if len(encoded) <= size_max_bytes:
        return plain
    return encoded[: size_max_bytes - 3].decode(errors="ignore") + "..."


def _check_spec(spec: pb.GroupSpec, limits: MeetingLimits) -> None:
    name = check_name("a group's name", spec.name)
    if spec.size > limits.group_size_max:
        raise LimitError(
            f"group_size_max={limits.group_size_max}: group {name!r} asks for {spec.size} ranks; "
            "make several groups"
        )
    _check_range("a group's size", spec.size, 1, limits.group_size_max)
    _check_range("a group's min_size", spec.min_size, 0, spec.size)
    if len(spec.strategy) > STRATEGY_LENGTH_MAX or not _STRATEGY.fullmatch(spec.strategy):
        raise ArgumentError(
            f"a group's strategy is a name such as 'ring' or 'tree(arity=2)', of at most "
            f"{STRATEGY_LENGTH_MAX} characters; got {clipped(spec.strategy, 80)!r}"
        )
    if not spec.codec or spec.codec not in types_pb2.Codec.values():
        raise ArgumentError(f"a group's codec must be one of types.proto's; got {spec.codec}")


def _check_member(member: pb.Member) -> None:
    _check_member_id(member.member_id)
    if not is_address(member.address):
        raise ArgumentError(
            f"a member's address is HOST:PORT; got {clipped(member.address, 80)!r}; "
            "the others must be able to reach it there"
        )
    text = member.description
    if len(text) > DESCRIPTION_LENGTH_MAX or not text.isprintable():
        raise ArgumentError(
            f"a member's description is one line of at most {DESCRIPTION_LENGTH_MAX} characters; "
            f"got {clipped(text, 80)!r}"
        )


def _check_member_id(member_id: str) -> None:
    check_name("member_id", member_id)
    _check_range("length of member_id", len(member_id), 1, MEMBER_ID_LENGTH_MAX)


def _check_range(what: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise ArgumentError(f"{what} must be {smallest} to {largest}; got {value}")

"""The parts of a gathering: leases, applicants, and the members of a generation. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.group.rendezvous.validation import clipped
from shardwell.v1 import group_pb2 as pb

INCARNATION_BITS = 32
"""Bits of a generation's number, below its count."""
_DESCRIPTION_SIZE_MAX_BYTES = 200
WORD_COUNT_OF_THE_LIVING = 2
"""Words of a member after which it lives: it asks again when it has an answer, so that one question
at most is under way of a member that has died."""


class Lease:
    """The time that a member counts as alive without a renewal."""

    def __init__(self, duration_s: float, now_s: float, *, heard: bool = True) -> None:
        self.duration_s = duration_s
        self.end_s = now_s + duration_s
        self.heard_s = now_s if heard else None
        self._is_spared = False

    def renew(self, duration_s: float, now_s: float) -> None:
        """Notes that there was a word of it."""
        self.duration_s, self.end_s, self.heard_s = duration_s, now_s + duration_s, now_s
        self._is_spared = False

    def spare(self, silence_s: float, now_s: float) -> None:
        """Extends the lease when no member was heard of for a while: perhaps the network failed.

        Once for each renewal: else any occasional request would keep the dead alive.
        """
        if silence_s > self.duration_s / 2 and not self._is_spared:
            self.end_s = max(self.end_s, now_s + self.duration_s / 2)
            self._is_spared = True


class Applicant:
    """A worker that asks for a rank in the next generation."""

    def __init__(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        self.member = request.member
        self.spec = request.spec
        self.rank = request.rank
        """The wanted rank, or the former one; another where ranks have closed up since."""
        self.previous_generation = request.previous_generation
        self.replacement_wait_s = request.replacement_wait_ms / 1000
        self.without_newcomers = request.without_newcomers
        """True if the next generation is to have its former members alone."""
        self.asked_s = now_s
        self.lease = Lease(request.lease_ms / 1000, now_s)
        self._wish = _wish_of(request)

    def asks_the_same(self, request: pb.JoinGroupRequest) -> bool:
        """True if `request` is another of the calls that this applicant makes again and again."""
        return self._wish == _wish_of(request)

    @property
    def is_newcomer(self) -> bool:
        """True if it was in no generation before."""
        return not self.previous_generation


def _wish_of(request: pb.JoinGroupRequest) -> tuple[Any, ...]:
    previous = request.previous_generation, request.without_newcomers
    return request.member, request.spec, request.rank, *previous


@dataclass(slots=True, kw_only=True)
class Seat:
    """A rank of a generation."""

    rank: int
    member: pb.Member | None
    """The member that has it; None: this server was started anew, and has not heard of it yet."""
    lease: Lease
    lost_reason: str = ""
    """Empty while it lives."""
    has_left: bool = False
    is_expired: bool = False
    """True if it is gone because its lease ended."""


@dataclass(slots=True, kw_only=True)
class Roster:
    """The members that have reached one another, until all of them are gone."""

    number: int
    seats: list[Seat]
    is_adopted: bool = False
    """True if it was formed before this server was started."""

    @classmethod
    def adopted(cls, number: int, member_count: int, lease_s: float, now_s: float) -> Roster:
        """A generation that this server knows of from one of its members."""
        seats = [
            Seat(rank=rank, member=None, lease=Lease(lease_s, now_s, heard=False))
            for rank in range(member_count)
        ]
        return cls(number=number, seats=seats, is_adopted=True)

    def seat_of(self, member_id: str) -> Seat | None:
        """The place of a member, living or lost."""
        for seat in self.seats:
            if seat.member is not None and seat.member.member_id == member_id:
                return seat
        return None

    def answer(self, rank: int) -> pb.JoinGroupResponse:
        """The answer to a member that asks for the generation, by its rank."""
        unknown = [seat.rank for seat in self.seats if seat.member is None]
        if unknown:  # they will make themselves known to this server
            return pb.JoinGroupResponse(missing_ranks=unknown)
        return pb.JoinGroupResponse(
            generation=self.number,
            members=[seat.member for seat in self.seats if seat.member is not None],
            rank=rank,
            ready=True,
        )

    def is_followed(self) -> bool:
        """True if this server has heard of more than half of its members."""
        return 2 * sum(seat.member is not None for seat in self.seats) > len(self.seats)

    def living(self) -> list[Seat]:
        """The members that are not lost, by rank."""
        return [seat for seat in self.seats if not seat.lost_reason]

    def living_at(self, rank: int) -> Seat | None:
        """The one that has a rank, unless it is lost."""
        if rank < len(self.seats) and not self.seats[rank].lost_reason:
            return self.seats[rank]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An error that a worker gets when it asks the next time."""

    kind: type[ShardwellError]
    message: str
    rank: int

    def error(self) -> ShardwellError:
        """The error to raise."""
        return self.kind(self.message, rank=self.rank)


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """A member of a forming generation whom another can't reach: it may be dead."""

    verdict: Verdict
    """The verdict for all if it lives; in an elastic group, by a newcomer, for that one alone."""
    reporter: Applicant
    word_count: int = 0


@dataclass(slots=True, kw_only=True)
class Forming:
    """A generation whose members still try to reach one another."""

    number: int
    applicants: list[Applicant]
    checked_ids: set[str] = field(default_factory=set)
    suspicions: dict[int, Suspicion] = field(default_factory=dict)

    def rank_of(self, member_id: str) -> int | None:
        """The rank that a member will have."""
        for rank, applicant in enumerate(self.applicants):
            if applicant.member.member_id == member_id:
                return rank
        return None

    def answer(self, rank: int, refusals: Iterable[str]) -> pb.JoinGroupResponse:
        """The answer to the member of a rank."""
        return pb.JoinGroupResponse(
            generation=self.number,
            members=[applicant.member for applicant in self.applicants],
            rank=rank,
            missing_ranks=sorted(self.suspicions) or self.unchecked_ranks(),
            refusals=refusals,
        )

    def unchecked_ranks(self) -> list[int]:
        """The ranks that have not said that they reached all."""
        return [
            rank
            for rank, applicant in enumerate(self.applicants)
            if applicant.member.member_id not in self.checked_ids
        ]


class GenerationNumbers:
    """The numbers of all groups' generations: a count, and below it the server's incarnation."""

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._count = 0

    @property
    def largest(self) -> int:
        """The largest number that was given or noted."""
        return (self._count + 1 << INCARNATION_BITS) - 1

    def is_own(self, number: int) -> bool:
        """True if the generation was formed here: what is no longer known of it is over."""
        return incarnation_of(number) == self._incarnation

    def take(self) -> int:
        """Returns the next one."""
        self._count += 1
        return self._count << INCARNATION_BITS | self._incarnation

    def note(self, number: int) -> None:
        """Notes a number, so that later ones are larger."""
        self._count = max(self._count, number >> INCARNATION_BITS)


def incarnation_of(number: int) -> int:
    """The incarnation of the server that formed a generation."""
    return number & (1 << INCARNATION_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """The progress of a group, for status displays."""

    name: str
    size: int
    generation: int
    members: tuple[str, ...]
    """The members that live, or wait for the others, each with its rank and address."""
    missing_ranks: tuple[int, ...]
    waited_s: float
    notes: tuple[str, ...]


def described(rank: int, member: pb.Member | None) -> str:
    """A worker, for messages."""
    if member is None:
        return f"rank {rank}"
    text = clipped(member.description, _DESCRIPTION_SIZE_MAX_BYTES) or "no description"
    return f"rank {rank} ({text}, at {clipped(member.address, _DESCRIPTION_SIZE_MAX_BYTES)})"


def listed(ranks: Iterable[int]) -> str:
    """Ranks, for messages."""
    return ", ".join(str(rank) for rank in ranks) or "none"

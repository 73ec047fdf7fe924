"""What a gathering tells workers that it refuses, and why: errors kept until they ask. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardwell.errors import ArgumentError, ShardwellError, WorkerLostError
from shardwell.group.places import Applicant, Generation, Seat, described
from shardwell.group.requests import clipped
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import types_pb2

_VERDICT_COUNT_MAX = 1024
_KEPT_S_MAX = 60.0
_FAILED_S = 10.0
_REASON_SIZE_MAX_BYTES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An error that a worker is told when it asks the next time."""

    kind: type[ShardwellError]
    message: str
    rank: int
    """Which rank it is about."""

    def error(self) -> ShardwellError:
        """To raise."""
        return self.kind(self.message, rank=self.rank)


class Refusals:
    """Of one gathering.

    Args:
        count_max: How many texts are remembered for those who wait.
    """

    def __init__(self, count_max: int) -> None:
        self.texts: deque[str] = deque(maxlen=count_max)
        """The last ones, for a person who wonders why the group is not complete."""
        self._verdicts: dict[str, tuple[float, Verdict]] = {}
        self._failed: tuple[float, int, Verdict] | None = None

    @property
    def kept_until_s(self) -> float | None:
        """When the last verdict is forgotten; None: there is none."""
        ends = [until_s for until_s, _ in self._verdicts.values()]
        if self._failed is not None:
            ends.append(self._failed[0])
        return max(ends, default=None)

    def add(self, applicant: Applicant, verdict: Verdict, now_s: float) -> None:
        """Keeps a verdict until the applicant asks again, or its lease would have ended."""
        until_s = now_s + min(applicant.lease.duration_s, _KEPT_S_MAX)
        self._verdicts[applicant.member.member_id] = (until_s, verdict)
        while len(self._verdicts) > _VERDICT_COUNT_MAX:
            del self._verdicts[next(iter(self._verdicts))]
        self.note(verdict.message)

    def note(self, message: str) -> None:
        """Remembers a text."""
        if message not in self.texts:
            self.texts.append(message)

    def fail(self, generation_number: int, verdict: Verdict, now_s: float) -> None:
        """Whoever has checked this generation is told, again if need be, for a while."""
        self._failed = (now_s + _FAILED_S, generation_number, verdict)

    def raise_any(self, member_id: str, checked_generation: int = 0) -> None:
        """Raises what the caller has to be told, once."""
        _, verdict = self._verdicts.pop(member_id, (0.0, None))
        if verdict is None and self._failed is not None and checked_generation == self._failed[1]:
            verdict = self._failed[2]  # the answer with the verdict was lost on its way
        if verdict is not None:
            raise verdict.error()

    def drop(self, member_id: str) -> None:
        """Nobody will ask."""
        self._verdicts.pop(member_id, None)

    def expire(self, now_s: float) -> None:
        """Forgets verdicts that nobody came for."""
        for member_id, (until_s, _) in list(self._verdicts.items()):
            if until_s <= now_s:
                del self._verdicts[member_id]
        if self._failed is not None and self._failed[0] <= now_s:
            self._failed = None


def differences(kept: pb.GroupSpec, got: pb.GroupSpec) -> str:
    """What two specs of one name differ in, expected against got; empty where in nothing."""
    codec_name = types_pb2.Codec.Name
    pairs = (
        ("size", str(kept.size), str(got.size)),
        ("strategy", repr(kept.strategy), repr(got.strategy)),
        ("codec", codec_name(kept.codec), codec_name(got.codec)),
    )
    return ", ".join(f"{what} {one}, got {other}" for what, one, other in pairs if one != other)


def unreachable_text(
    group: str, rank: int, applicants: list[Applicant], missed: pb.UnreachableMember
) -> str:
    """One member of a forming generation can't reach another."""
    member, other = applicants[rank].member, applicants[missed.rank].member
    return (
        f"group {group!r}: {described(rank, member)} can't reach {described(missed.rank, other)}: "
        f"{clipped(missed.reason, _REASON_SIZE_MAX_BYTES)}; check that nothing between them blocks "
        "that address, and that the worker listens on one that the others can reach"
    )


def mismatch_text(kept: pb.GroupSpec, begun_by: str, request: pb.JoinGroupRequest) -> str:
    """A worker asks for another group of the same name."""
    return (
        f"group {kept.name!r} was begun by {begun_by} with other settings than "
        f"{described(request.rank, request.member)} asks for: {differences(kept, request.spec)}; "
        "give all workers the same"
    )


def overridden_text(waiting: pb.GroupSpec, living: pb.GroupSpec, number: int) -> str:
    """Workers wait for a group of a name, and it turns out that another of that name lives."""
    return (
        f"generation {number} of group {living.name!r} lives, with other settings than those who "
        f"wait ask for: {differences(living, waiting)}; end it, or give this group another name"
    )


def taken_text(group: str, applicant: Applicant, holder: pb.Member | None, note: str) -> str:
    """Somebody that lives has the rank that an applicant wants."""
    rank = applicant.rank
    return (
        f"rank {rank} of group {group!r} belongs to {described(rank, holder)}, which lives; "
        f"{described(rank, applicant.member)} can't have it{note}; "
        "give each worker a rank of its own"
    )


def stranger_error(request: pb.RenewLeaseRequest, member_count: int) -> ArgumentError:
    """A worker says that it is a member of a generation, and is none."""
    return ArgumentError(
        f"generation {request.generation} of group {request.spec.name!r} has {member_count} "
        f"members, and {described(request.rank, request.member)} of {request.member_count} is none "
        "of them; join again",
        rank=request.rank,
    )


def lost_error(group: str, seat: Seat) -> WorkerLostError:
    """A member that was declared lost is back."""
    return WorkerLostError(
        f"{described(seat.rank, seat.member)} of group {group!r} was declared lost: "
        f"{seat.lost_reason}; rebuild the group, or join again",
        rank=seat.rank,
    )


def unknown_generation_error(
    request: pb.RenewLeaseRequest, generation: Generation | None, *, is_old: bool
) -> WorkerLostError:
    """A worker is a member of a generation that is over, or that can't be."""
    what = "is not known, and another lives"
    if is_old and generation is not None:
        what = f"has been succeeded by generation {generation.number}"
    elif is_old:
        what = "is over: all its members were lost or left"
    return WorkerLostError(
        f"generation {request.generation} of group {request.spec.name!r} {what}; "
        f"{described(request.rank, request.member)} is in none; join again",
        rank=request.rank,
    )

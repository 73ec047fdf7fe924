"""The refusals of a gathering, with reasons: errors kept until workers ask. Pure."""

from __future__ import annotations

from collections import deque

from shardwell.errors import ArgumentError, WorkerLostError
from shardwell.group.rendezvous.members import Applicant, Roster, Seat, Verdict, described
from shardwell.group.rendezvous.validation import clipped
from shardwell.specs.parameter import codec_words
from shardwell.v1 import group_pb2 as pb

_VERDICT_COUNT_MAX = 1024
_KEPT_S_MAX = 60.0
_FAILED_S = 10.0
_REASON_SIZE_MAX_BYTES = 400


class Refusals:
    """The refusals of one gathering; the last texts are kept for those who wait."""

    def __init__(self, count_max: int) -> None:
        self.texts: deque[str] = deque(maxlen=count_max)
        self._verdicts: dict[str, tuple[float, Verdict]] = {}
        self._failed: tuple[float, int, Verdict] | None = None

    @property
    def kept_until_s(self) -> float | None:
        """The time at which the last verdict is forgotten; None: it keeps none."""
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
        if verdict.message not in self.texts:
            self.texts.append(verdict.message)

    def fail(self, generation_number: int, verdict: Verdict, now_s: float) -> None:
        """Keeps the verdict for all that have checked this generation, for a while."""
        self._failed = (now_s + _FAILED_S, generation_number, verdict)

    def raise_any(self, member_id: str, checked_generation: int = 0) -> None:
        """Raises the caller's verdict, once."""
        _, verdict = self._verdicts.pop(member_id, (0.0, None))
        if verdict is None and self._failed is not None and checked_generation == self._failed[1]:
            verdict = self._failed[2]  # the answer with the verdict was lost on its way
        if verdict is not None:
            raise verdict.error()

    def drop(self, member_id: str) -> None:
        """Drops the verdict of a member that will not ask again."""
        self._verdicts.pop(member_id, None)

    def expire(self, now_s: float) -> None:
        """Forgets verdicts that no member asked for."""
        for member_id, (until_s, _) in list(self._verdicts.items()):
            if until_s <= now_s:
                del self._verdicts[member_id]
        if self._failed is not None and self._failed[0] <= now_s:
            self._failed = None


def differences(kept: pb.GroupSpec, got: pb.GroupSpec) -> str:
    """The differences of two specs of one name, expected against got; empty where they agree."""
    pairs = (
        ("size", str(kept.size), str(got.size)),
        ("strategy", repr(kept.strategy), repr(got.strategy)),
        ("codec", repr(codec_words(kept.codec)), repr(codec_words(got.codec))),
        ("allow_non_finite", str(kept.allow_non_finite), str(got.allow_non_finite)),
        ("min_size", str(kept.min_size), str(got.min_size)),
    )
    return ", ".join(f"{what} {one}, got {other}" for what, one, other in pairs if one != other)


def unreachable_text(
    group: str, rank: int, applicants: list[Applicant], missed: pb.UnreachableMember
) -> str:
    """The text of a member of a forming generation that can't reach another."""
    member, other = applicants[rank].member, applicants[missed.rank].member
    return (
        f"group {group!r}: {described(rank, member)} can't reach {described(missed.rank, other)}: "
        f"{clipped(missed.reason, _REASON_SIZE_MAX_BYTES)}; check that nothing between them blocks "
        "that address, and that the worker listens on one that the others can reach"
    )


def mismatch_text(kept: pb.GroupSpec, holder: str, applicant: Applicant) -> str:
    """The refusal of a worker that asks for other settings than those of a living group."""
    return (
        f"group {kept.name!r} belongs to {holder}, which lives, with other settings than "
        f"{described(applicant.rank, applicant.member)} asks for: "
        f"{differences(kept, applicant.spec)}; give all workers the same, or this group another "
        "name"
    )


def taken_text(group: str, applicant: Applicant, holder: pb.Member | None, note: str) -> str:
    """The refusal when a living member has the rank that an applicant wants."""
    rank = applicant.rank
    return (
        f"rank {rank} of group {group!r} belongs to {described(rank, holder)}, which lives; "
        f"{described(rank, applicant.member)} can't have it{note}; "
        "give each worker a rank of its own"
    )


def stranger_error(request: pb.RenewLeaseRequest, member_count: int) -> ArgumentError:
    """The error for a worker that claims to be a member of a generation, and is none."""
    return ArgumentError(
        f"generation {request.generation} of group {request.spec.name!r} has {member_count} "
        f"members, and {described(request.rank, request.member)} of {request.member_count} is none "
        "of them; join again",
        rank=request.rank,
    )


def lost_error(group: str, seat: Seat) -> WorkerLostError:
    """The error for a member that comes back after it was declared lost."""
    advice = (
        "the others go on without it; close the group, and join it again"
        if seat.is_expired
        else "rebuild the group, or join it again"
    )
    return WorkerLostError(
        f"{described(seat.rank, seat.member)} of group {group!r} was declared lost: "
        f"{seat.lost_reason}; {advice}",
        rank=seat.rank,
    )


def left_behind_text(
    group: str, number: int, rank: int, member: pb.Member, generation: Roster | None
) -> str:
    """The refusal of a member of a generation that is over, or impossible; another may live."""
    if generation is None:
        what = "is over: all its members were lost or left"
    elif number < generation.number:
        what = f"has been succeeded by generation {generation.number}"
    else:
        what = "is not known, and another lives"
    return (
        f"generation {number} of group {group!r} {what}; {described(rank, member)} is in none; "
        "close the group, and join it again"
    )

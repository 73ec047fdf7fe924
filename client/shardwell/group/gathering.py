"""One group as the rendezvous knows it: who asks for a place, and the generation that lives. Pure.

Invariants: at most one generation lives or forms; its number is larger than any before; a rank has
one member; a member that lives is never replaced. Whoever wants the rank of another, the holder,
contends for it: it is refused when the holder is heard of after it asked, and has the rank when the
holder's lease ends.

Nothing happens by itself: each request says what time it is, and first brings the gathering there.
"""

from __future__ import annotations

from typing import TypeVar

from shardwell.errors import (
    ArgumentError,
    GroupMismatchError,
    RankTakenError,
    WorkerUnreachableError,
)
from shardwell.group.places import (
    Applicant,
    Forming,
    Generation,
    GenerationNumbers,
    Lease,
    Seat,
    described,
    listed,
)
from shardwell.group.refusals import (
    Refusals,
    Verdict,
    differences,
    lost_error,
    unknown_generation_error,
    unreachable_text,
)
from shardwell.group.requests import MeetingLimits
from shardwell.v1 import group_pb2 as pb

RequestT = TypeVar("RequestT", pb.JoinGroupRequest, pb.RenewLeaseRequest)


class Gathering:
    """The state of one name. Requests have been checked, and their times never go back."""

    def __init__(
        self, spec: pb.GroupSpec, numbers: GenerationNumbers, limits: MeetingLimits, now_s: float
    ) -> None:
        self.applicants: dict[str, Applicant] = {}
        """By member id, in the order in which they asked first."""
        self.generation: Generation | None = None
        """The one that has a living member."""
        self.forming: Forming | None = None
        """The one that follows."""
        self.heard_s = now_s
        """When anybody was heard of last."""
        self._spec = spec
        self._begun_by = ""
        self._numbers = numbers
        self._ended_number = 0
        """Of the last generation that lived; all its members are lost."""
        self._refusals = Refusals(limits.refusal_count_max)

    # Requests.

    def join(self, request: pb.JoinGroupRequest, now_s: float) -> pb.JoinGroupResponse:
        """See GroupService.JoinGroup."""
        self._advance(now_s)
        member_id = request.member.member_id
        self._refusals.raise_any(member_id, request.checked_generation)
        if not self._is_spec_kept():
            self._spec, self._begun_by = request.spec, described(request.rank, request.member)
        self._check_spec(request)
        if request.previous_generation:
            self._adopt_previous(request, now_s)
        generation = self.generation
        seat = None if generation is None else generation.seat_of(member_id)
        if generation is not None and seat is not None:
            if request.previous_generation == generation.number:
                self._come_back(generation, seat, request, now_s)
            elif seat.lost_reason:
                raise lost_error(self._spec.name, seat)
            else:  # it has not been told yet that all have checked
                seat.lease.renew(request.lease_ms / 1000, now_s)
                self._settle(now_s)
                return generation.answer(seat.rank)
        self._apply(request, now_s)
        self._note_check(request, now_s)
        self._settle(now_s)
        self._refusals.raise_any(member_id)
        return self._progress(member_id, now_s)

    def renew(self, request: pb.RenewLeaseRequest, now_s: float) -> pb.RenewLeaseResponse:
        """See GroupService.RenewLease."""
        self._advance(now_s)
        lease_s = request.lease_ms / 1000
        member_id, number = request.member.member_id, request.generation
        if self.forming is not None and self.forming.number == number:
            if (applicant := self.applicants.get(member_id)) is not None:
                applicant.lease.renew(lease_s, now_s)
            return pb.RenewLeaseResponse()
        if self.generation is None or self.generation.number != number:
            self._check_adoptable(request)
            self._adopt(request, number, request.member_count, now_s)
        generation = self.generation
        assert generation is not None
        seat = self._renewed_seat(generation, request)
        seat.lease.renew(lease_s, now_s)
        self._settle(now_s)
        lost = [
            pb.LostMember(rank=other.rank, reason=other.lost_reason)
            for other in generation.seats
            if other.lost_reason
        ]
        if not lost:
            lost = [
                pb.LostMember(rank=other.rank, reason="it asked to rebuild the group")
                for other in generation.seats
                if other is not seat and self._is_back(other)
            ]
        return pb.RenewLeaseResponse(lost=lost, waiting_count=len(self._placed()))

    def leave(self, member_id: str, now_s: float) -> None:
        """See GroupService.LeaveGroup."""
        self._advance(now_s)
        self._remove(member_id)
        self._refusals.drop(member_id)
        seat = None if self.generation is None else self.generation.seat_of(member_id)
        if seat is not None and not seat.lost_reason:
            seat.lost_reason = "it left the group"
        self._settle(now_s)

    # What others ask.

    def knows(self, member_id: str) -> bool:
        """Whether it waits or is a member."""
        generation = self.generation
        return member_id in self.applicants or (
            generation is not None and generation.seat_of(member_id) is not None
        )

    def is_over(self) -> bool:
        """Nobody is there, and nobody needs to be told anything."""
        return (
            not self.applicants and self.generation is None and self._refusals.kept_until_s is None
        )

    def is_silent(self, now_s: float) -> bool:
        """Nobody has been heard of for twice the longest lease; who lives makes itself known."""
        leases = [applicant.lease for applicant in self.applicants.values()]
        if self.generation is not None:
            leases += [seat.lease for seat in self.generation.living()]
        longest_s = max((lease.duration_s for lease in leases), default=0.0)
        end_s = max(self.heard_s + 2 * longest_s, self._refusals.kept_until_s or 0.0)
        return now_s > end_s

    # Time.

    def _advance(self, now_s: float) -> None:
        """Brings everything to `now_s`."""
        silence_s = now_s - self.heard_s
        self.heard_s = now_s
        for member_id, applicant in list(self.applicants.items()):
            applicant.lease.spare(silence_s, now_s)
            if applicant.lease.end_s <= now_s:
                self._remove(member_id)
        for seat in [] if self.generation is None else self.generation.living():
            seat.lease.spare(silence_s, now_s)
            if seat.lease.end_s <= now_s:
                seat.lost_reason = f"its lease of {seat.lease.duration_s:g} s ended"
        self._refusals.expire(now_s)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Draws the conclusions from what has changed."""
        if self.generation is not None and not self.generation.living():
            self._ended_number, self.generation = self.generation.number, None
        self._refuse_contenders(now_s)
        forming = self.forming
        if forming is not None and any(
            self.applicants.get(one.member.member_id) is not one for one in forming.applicants
        ):
            self.forming = None
        if self.forming is None:
            self._form(now_s)
        elif not self.forming.unchecked_ranks():
            self._begin_generation(self.forming)

    def _refuse_contenders(self, now_s: float) -> None:
        """Those who want the rank of somebody that was heard of after they asked first."""
        placed = self._placed()
        for applicant in list(self.applicants.values()):
            if placed.get(applicant.rank) is applicant:
                continue
            lease, holder = self._holder(applicant.rank, placed)
            if lease.heard_s is None or lease.heard_s <= applicant.asked_s:
                continue
            message = (
                f"rank {applicant.rank} of group {self._spec.name!r} belongs to "
                f"{described(applicant.rank, holder)}, which lives; "
                f"{described(applicant.rank, applicant.member)} can't have it"
                f"{self._free_ranks(placed)}; give each worker a rank of its own"
            )
            verdict = Verdict(kind=RankTakenError, message=message, rank=applicant.rank)
            self._refuse(applicant, verdict, now_s)

    def _form(self, now_s: float) -> None:
        """Begins to form a generation when those who can be waited for are there."""
        placed = self._placed()
        living = [] if self.generation is None else self.generation.living()
        if not placed or not all(self._is_back(seat) for seat in living):
            return
        if len(placed) < self._spec.size:
            number = self._ended_number if self.generation is None else self.generation.number
            back = [one for one in placed.values() if one.previous_generation == number]
            if not number or not back:
                return
            wait_s = max(one.replacement_wait_s for one in back)
            if now_s < min(one.asked_s for one in back) + wait_s:
                return
        applicants = [placed[rank] for rank in sorted(placed)]
        self.forming = Forming(number=self._numbers.take(), applicants=applicants)

    def _begin_generation(self, forming: Forming) -> None:
        """All have reached one another."""
        if self.generation is not None:
            self._ended_number = self.generation.number
        seats = [
            Seat(rank=rank, member=applicant.member, lease=applicant.lease)
            for rank, applicant in enumerate(forming.applicants)
        ]
        for applicant in forming.applicants:
            del self.applicants[applicant.member.member_id]
        self.generation, self.forming = Generation(number=forming.number, seats=seats), None

    # Places.

    def _placed(self) -> dict[int, Applicant]:
        """Those who would take part, by the ranks they want; others contend with the holders."""
        placed: dict[int, Applicant] = {}
        for applicant in self.applicants.values():
            seat = None if self.generation is None else self.generation.living_at(applicant.rank)
            if (seat is None or self._is_back(seat, applicant)) and applicant.rank not in placed:
                placed[applicant.rank] = applicant
        return placed

    def _holder(self, rank: int, placed: dict[int, Applicant]) -> tuple[Lease, pb.Member | None]:
        """Who has a rank that somebody else contends for."""
        seat = None if self.generation is None else self.generation.living_at(rank)
        if seat is not None:
            return seat.lease, seat.member
        return placed[rank].lease, placed[rank].member

    def _is_back(self, seat: Seat, applicant: Applicant | None = None) -> bool:
        """Whether a living member has asked for the generation that follows its own."""
        if seat.member is None or self.generation is None:
            return False
        found = self.applicants.get(seat.member.member_id)
        return (
            found is not None
            and found.previous_generation == self.generation.number
            and (applicant is None or applicant is found)
        )

    def _apply(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        """The caller asks for a place, for the first time or again."""
        member_id = request.member.member_id
        applicant = self.applicants.get(member_id)
        if applicant is not None and applicant.asks_the_same(request):
            applicant.lease.renew(request.lease_ms / 1000, now_s)
            return
        self._remove(member_id)
        self.applicants[member_id] = Applicant(request, now_s)
        self._numbers.note(request.previous_generation)

    def _come_back(
        self, generation: Generation, seat: Seat, request: pb.JoinGroupRequest, now_s: float
    ) -> None:
        """A member of the generation asks for the one that follows it."""
        if seat.rank != request.rank:
            raise ArgumentError(
                f"{described(seat.rank, seat.member)} of generation {generation.number} can't come "
                f"back from rank {request.rank}"
            )
        if seat.lost_reason:
            return  # it may still replace itself
        seat.lease.renew(request.lease_ms / 1000, now_s)
        for rank in request.lost_ranks:
            lost = generation.living_at(rank)
            if lost is not None and lost is not seat:
                lost.lost_reason = f"{described(seat.rank, seat.member)} found it lost"

    def _note_check(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        """Whether the caller has reached the others."""
        forming, member_id = self.forming, request.member.member_id
        if forming is None or request.checked_generation != forming.number:
            return
        rank = forming.rank_of(member_id)
        if rank is None:
            return
        if not request.unreachable:
            forming.checked_ids.add(member_id)
            return
        missed = request.unreachable[0]
        if missed.rank >= len(forming.applicants):
            raise ArgumentError(
                f"unreachable.rank must be 0 to {len(forming.applicants) - 1}; got {missed.rank}"
            )
        message = unreachable_text(self._spec.name, rank, forming.applicants, missed)
        verdict = Verdict(kind=WorkerUnreachableError, message=message, rank=missed.rank)
        self._refusals.fail(forming.number, verdict)
        for applicant in forming.applicants:
            self._refuse(applicant, verdict, now_s)

    def _remove(self, member_id: str) -> None:
        """Takes an applicant out."""
        if self.applicants.pop(member_id, None) is not None:
            forming = self.forming
            if forming is not None and forming.rank_of(member_id) is not None:
                self.forming = None

    # Generations that were formed before this server was started.

    def _adopt_previous(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        """Takes over the generation that the caller was a member of, if it is not known."""
        number = request.previous_generation
        generation = self.generation
        if number > self._known_number() and (generation is None or generation.is_adopted):
            self._adopt(request, number, request.previous_member_count or request.spec.size, now_s)
        generation = self.generation
        if generation is not None and generation.number == number:
            seat = generation.living_at(request.rank)
            is_known = generation.seat_of(request.member.member_id) is not None
            if seat is not None and seat.member is None and not is_known:
                seat.member = request.member

    def _check_adoptable(self, request: pb.RenewLeaseRequest) -> None:
        """Returns if an unknown generation may be taken over."""
        generation = self.generation
        is_old = request.generation <= self._known_number()
        if is_old or (generation is not None and not generation.is_adopted):
            raise unknown_generation_error(request, generation, is_old=is_old)

    def _known_number(self) -> int:
        """The largest that a generation here has had."""
        return max(self._ended_number, self.generation.number if self.generation else 0)

    def _adopt(self, request: RequestT, number: int, member_count: int, now_s: float) -> None:
        """Takes a generation over: it lives, so all who wait for its ranks go on waiting."""
        self._numbers.note(number)
        self.forming, self._ended_number = None, self._known_number()
        if differences(self._spec, request.spec):
            for applicant in list(self.applicants.values()):
                message = f"generation {number} of group {request.spec.name!r} lives, with another "
                message += "size, strategy or codec; end it, or give this group another name"
                verdict = Verdict(kind=GroupMismatchError, message=message, rank=applicant.rank)
                self._refuse(applicant, verdict, now_s)
        self._spec, self._begun_by = request.spec, described(request.rank, request.member)
        self.generation = Generation.adopted(number, member_count, request.lease_ms / 1000, now_s)
        self.generation.seats[request.rank].member = request.member

    def _renewed_seat(self, generation: Generation, request: pb.RenewLeaseRequest) -> Seat:
        """The living seat that the request is about."""
        own = generation.seat_of(request.member.member_id)
        if own is not None and own.lost_reason:
            raise lost_error(self._spec.name, own)
        if request.member_count == len(generation.seats):
            seat = generation.seats[request.rank]
            if seat.member is None and own is None:
                if seat.lost_reason:
                    raise lost_error(self._spec.name, seat)
                seat.member = request.member
            if seat.member is not None and seat.member.member_id == request.member.member_id:
                return seat
        raise ArgumentError(
            f"generation {generation.number} of group {self._spec.name!r} has "
            f"{len(generation.seats)} members, and {described(request.rank, request.member)} of "
            f"{request.member_count} is none of them; join again"
        )

    # Refusals.

    def _is_spec_kept(self) -> bool:
        """Whether somebody is there who made the group what it is."""
        return bool(self.applicants) or self.generation is not None

    def _check_spec(self, request: pb.JoinGroupRequest) -> None:
        found = differences(self._spec, request.spec)
        if not found:
            return
        who = described(request.rank, request.member)
        message = (
            f"group {self._spec.name!r} was begun by {self._begun_by} with other settings than "
            f"{who} asks for: {found}; give all workers the same"
        )
        self._remove(request.member.member_id)
        self._refusals.note(message)
        raise GroupMismatchError(message, rank=request.rank)

    def _free_ranks(self, placed: dict[int, Applicant]) -> str:
        """Which ranks nobody has, where that is of use: a generation that lives with fewer."""
        generation = self.generation
        if generation is None or len(generation.living()) == self._spec.size:
            return ""
        free = [
            rank
            for rank in range(self._spec.size)
            if rank not in placed and generation.living_at(rank) is None
        ]
        return f" (ranks that are free: {listed(free)})"

    def _refuse(self, applicant: Applicant, verdict: Verdict, now_s: float) -> None:
        """Takes an applicant out; it is told why when it asks again."""
        self._remove(applicant.member.member_id)
        self._refusals.add(applicant, verdict, now_s)

    # Answers.

    def _progress(self, member_id: str, now_s: float) -> pb.JoinGroupResponse:
        """How far the caller's generation is."""
        forming, generation = self.forming, self.generation
        applicant = self.applicants.get(member_id)
        if applicant is None:  # it was the last to check
            seat = None if generation is None else generation.seat_of(member_id)
            assert generation is not None
            assert seat is not None
            return generation.answer(seat.rank)
        rank = None if forming is None else forming.rank_of(member_id)
        if forming is not None and rank is not None:
            return forming.answer(rank, self._refusals.texts)
        placed = self._placed()
        missing = {rank for rank in range(self._spec.size) if rank not in placed}
        notes = list(self._refusals.texts)
        if placed.get(applicant.rank) is not applicant:
            missing.add(applicant.rank)
            lease, holder = self._holder(applicant.rank, placed)
            notes.append(
                f"rank {applicant.rank} belongs to {described(applicant.rank, holder)}; whether "
                f"that lives is known within {max(lease.end_s - now_s, 0.0):.3g} s"
            )
        return pb.JoinGroupResponse(missing_ranks=sorted(missing), refusals=notes)

"""One group as the rendezvous knows it: who asks for a rank, and the generation that lives. Pure.

Invariants: at most one generation lives or forms; its number is no other's, and larger than any
that was known here; a rank has one member; a member that lives is never replaced. An applicant for
the rank of another, the holder, contends for it: it is refused when the holder is heard of after it
asked, and has the rank when the holder's lease ends. In the same way an applicant that wants the
name with another spec contends with all who agree on the one that it has. A generation can be
followed by its members while it lives; a member that comes later must join again.

Nothing happens by itself: each request says what time it is, and first brings the gathering there.
"""

from __future__ import annotations

from typing import TypeVar

from shardwell.errors import (
    ArgumentError,
    GroupMismatchError,
    RankTakenError,
    ShardwellError,
    WorkerLostError,
    WorkerUnreachableError,
)
from shardwell.group.rendezvous.members import (
    WORD_COUNT_OF_THE_LIVING,
    Applicant,
    Forming,
    GenerationNumbers,
    GroupState,
    Roster,
    Seat,
    Suspicion,
    Verdict,
    described,
    incarnation_of,
    listed,
)
from shardwell.group.rendezvous.refusals import (
    Refusals,
    left_behind_text,
    lost_error,
    mismatch_text,
    stranger_error,
    taken_text,
    unreachable_text,
)
from shardwell.group.rendezvous.seating import Seating
from shardwell.group.rendezvous.validation import MeetingLimits
from shardwell.v1 import group_pb2 as pb

RequestT = TypeVar("RequestT", pb.JoinGroupRequest, pb.RenewLeaseRequest)


class Gathering:
    """The state of one name. Requests have been checked, and their times never go back."""

    def __init__(
        self, spec: pb.GroupSpec, numbers: GenerationNumbers, limits: MeetingLimits, now_s: float
    ) -> None:
        self.seating = Seating(spec)
        self.heard_s = now_s
        self._numbers = numbers
        self._ended_number = 0
        self._refusals = Refusals(limits.refusal_count_max)

    # Requests.

    def join(self, request: pb.JoinGroupRequest, now_s: float) -> pb.JoinGroupResponse:
        """Answers an applicant, and takes it in if it is new. Raises its refusal."""
        self._advance(now_s)
        member_id = request.member.member_id
        self._refusals.raise_any(member_id, request.checked_generation)
        generation, seat = self._place_of(request)
        previous = request.previous_generation
        if previous and (generation is None or seat is None or generation.number < previous):
            self._find_previous(request, now_s)
            generation, seat = self._place_of(request)
        if generation is not None and seat is not None:
            if previous == generation.number:
                self._come_back(generation, seat, request, now_s)
            elif seat.lost_reason:
                raise lost_error(self.seating.spec.name, seat)
            else:  # it does not know yet that all have checked
                seat.lease.renew(request.lease_ms / 1000, now_s)
                self.seating.remove(member_id)
                self._settle(now_s)
                return generation.answer(seat.rank)
        self._apply(request, now_s)
        self._note_check(request, now_s)
        self._settle(now_s)
        self._refusals.raise_any(member_id)
        return self.seating.join_answer(member_id, self._refusals.texts, now_s)

    def renew(self, request: pb.RenewLeaseRequest, now_s: float) -> pb.RenewLeaseResponse:
        """Answers a member that says that it lives. Raises the reason why it is none any more."""
        self._advance(now_s)
        lease_s = request.lease_ms / 1000
        member_id, number = request.member.member_id, request.generation
        if self.seating.forming is not None and self.seating.forming.number == number:
            if (applicant := self.seating.applicants.get(member_id)) is not None:
                applicant.lease.renew(lease_s, now_s)
            return pb.RenewLeaseResponse()
        if self.seating.generation is None or self.seating.generation.number != number:
            self._check_adoptable(request, number)
            self._adopt(request, number, request.member_count, now_s)
        generation = self.seating.generation
        assert generation is not None
        seat = self._renewed_seat(generation, request)
        seat.lease.renew(lease_s, now_s)
        self._settle(now_s)
        return self.seating.renewal_answer(generation, seat)

    def leave(self, member_id: str, now_s: float) -> None:
        """Takes out a member or an applicant, if it is one."""
        self._advance(now_s)
        self.seating.remove(member_id)
        self._refusals.drop(member_id)
        seat = (
            None if self.seating.generation is None else self.seating.generation.seat_of(member_id)
        )
        if seat is not None and not seat.lost_reason:
            seat.lost_reason, seat.has_left = "it left the group", True
        self._settle(now_s)

    # What others ask.

    def describe(self, now_s: float) -> GroupState:
        """The state of the group for status; changes nothing."""
        spec, generation = self.seating.spec, self.seating.generation
        living = [s for s in self.seating.living() if s.lease.end_s > now_s]
        placed = {
            rank: one for rank, one in self.seating.placed().items() if one.lease.end_s > now_s
        }
        found = {seat.rank: described(seat.rank, seat.member) for seat in living}
        found |= {rank: described(rank, one.member) for rank, one in placed.items()}
        least = spec.min_size or spec.size
        absent = [rank for rank in range(spec.size) if rank not in found]
        asked_s = [one.asked_s for one in placed.values()]
        return GroupState(
            name=spec.name,
            size=spec.size,
            generation=0 if generation is None or not living else generation.number,
            members=tuple(found[rank] for rank in sorted(found)),
            missing_ranks=tuple(absent[: max(least - len(found), 0)]),
            waited_s=max(now_s - min(asked_s), 0.0) if asked_s else 0.0,
            notes=tuple(self._refusals.texts),
        )

    def is_over(self) -> bool:
        """True if it has no members, no applicants, and no verdicts left to deliver."""
        return (
            not self.seating.applicants
            and self.seating.generation is None
            and self._refusals.kept_until_s is None
        )

    def is_silent(self, now_s: float) -> bool:
        """True if no request came for twice the longest lease; living members renew more often."""
        longest_s = max((one.duration_s for one in self.seating.leases()), default=0.0)
        end_s = max(self.heard_s + 2 * longest_s, self._refusals.kept_until_s or 0.0)
        return now_s > end_s

    # Time.

    def _advance(self, now_s: float) -> None:
        silence_s = now_s - self.heard_s
        self.heard_s = now_s
        for member_id, applicant in list(self.seating.applicants.items()):
            applicant.lease.spare(silence_s, now_s)
            if applicant.lease.end_s <= now_s:
                self.seating.remove(member_id)
        for seat in self.seating.living():
            seat.lease.spare(silence_s, now_s)
            if seat.lease.end_s <= now_s:
                seat.lost_reason = f"its lease of {seat.lease.duration_s:g} s ended"
                seat.is_expired = True
        self._refusals.expire(now_s)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        if not self.seating.living():
            self._ended_number, self.seating.generation = self._known_number(), None
        self.seating.drop_those_left_behind()
        self.seating.pass_on()
        self._refuse_contenders(now_s)
        if self.seating.forming is None:
            self._form(now_s)
        elif not self.seating.forming.unchecked_ranks():
            self._begin_generation(self.seating.forming)

    def _refuse_contenders(self, now_s: float) -> None:
        seating, forming = self.seating, self.seating.forming
        closes_up = forming is not None and len(forming.applicants) < seating.spec.size
        placed = seating.placed()
        for applicant in list(seating.applicants.values()):
            agrees = applicant.spec == seating.spec
            if agrees and seating.is_elastic:
                continue  # it waits for a rank that is free
            if agrees and (closes_up or placed.get(applicant.rank) is applicant):
                continue  # it has a place, or ranks are about to change
            holder = seating.holder(applicant, placed)
            if holder.lease.heard_s is None or holder.lease.heard_s <= applicant.asked_s:
                continue
            if not agrees:
                kind: type[ShardwellError] = GroupMismatchError
                message = mismatch_text(
                    seating.spec, described(holder.rank, holder.member), applicant
                )
            else:
                free = seating.free_ranks()
                if self._has_closed_up() and free and not applicant.previous_generation:
                    applicant.rank = free[0]
                    continue
                kind = RankTakenError
                message = taken_text(
                    seating.spec.name, applicant, holder.member, self._free_ranks()
                )
            verdict = Verdict(kind=kind, message=message, rank=applicant.rank)
            self._refuse(applicant, verdict, now_s)

    def _has_closed_up(self) -> bool:
        """A replacement can't know then which ranks have changed."""
        generation = self.seating.generation
        return generation is not None and len(generation.seats) < self.seating.spec.size

    def _form(self, now_s: float) -> None:
        placed = self.seating.placed()
        living = self.seating.living()
        if not placed or not all(self.seating.is_back(seat) for seat in living):
            return
        if self.seating.is_elastic:
            self._form_elastic(placed, now_s)
            return
        if len(placed) < len(self.seating.agreeing()):
            return  # an applicant contends: whether the holder lives is known within its lease
        if len(placed) < self.seating.spec.size:
            number = self._known_number()
            back = [one for one in placed.values() if one.previous_generation == number]
            if not number or not back:
                return
            wait_s = max(one.replacement_wait_s for one in back)
            if now_s < min(one.asked_s for one in back) + wait_s:
                return
        applicants = [placed[rank] for rank in sorted(placed)]
        self.seating.forming = Forming(number=self._numbers.take(), applicants=applicants)

    def _form_elastic(self, placed: dict[int, Applicant], now_s: float) -> None:
        """Forms a generation in which members keep their order, and newcomers follow.

        A group's first one waits for one lease: the time in which members of an older one, unknown
        to a server that was started anew, make themselves known.
        """
        spec = self.seating.spec
        back = [placed[rank] for rank in sorted(placed) if not placed[rank].is_newcomer]
        new = [placed[rank] for rank in sorted(placed) if placed[rank].is_newcomer]
        if back:
            wait_s = max(one.replacement_wait_s for one in back)
            if len(placed) < spec.size and now_s < min(one.asked_s for one in back) + wait_s:
                return
        elif len(placed) < spec.size and now_s < min(
            one.asked_s + one.lease.duration_s for one in new
        ):
            return
        if any(one.without_newcomers for one in back):
            new = []
        elif len(placed) < spec.min_size:
            return
        self.seating.forming = Forming(number=self._numbers.take(), applicants=[*back, *new])

    def _begin_generation(self, forming: Forming) -> None:
        self._ended_number = self._known_number()
        seats = [
            Seat(rank=rank, member=applicant.member, lease=applicant.lease)
            for rank, applicant in enumerate(forming.applicants)
        ]
        for applicant in forming.applicants:
            del self.seating.applicants[applicant.member.member_id]
        self.seating.generation = Roster(number=forming.number, seats=seats)
        self.seating.forming = None

    # Places.

    def _apply(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        member_id = request.member.member_id
        applicant = self.seating.applicants.get(member_id)
        if applicant is not None and applicant.asks_the_same(request):
            applicant.lease.renew(request.lease_ms / 1000, now_s)
            return
        self.seating.remove(member_id)
        self.seating.applicants[member_id] = Applicant(request, now_s)
        self._numbers.note(request.previous_generation)

    def _come_back(
        self, generation: Roster, seat: Seat, request: pb.JoinGroupRequest, now_s: float
    ) -> None:
        if seat.rank != request.rank:
            raise ArgumentError(
                f"{described(seat.rank, seat.member)} of generation {generation.number} can't come "
                f"back from rank {request.rank}"
            )
        if seat.is_expired:
            raise lost_error(self.seating.spec.name, seat)
        if seat.lost_reason:
            return  # others say so, and may be wrong: it may replace itself
        seat.lease.renew(request.lease_ms / 1000, now_s)
        for rank in request.lost_ranks:
            lost = generation.living_at(rank)
            if lost is not None and lost is not seat and not self.seating.is_back(lost):
                lost.lost_reason = f"{described(seat.rank, seat.member)} found it lost"

    def _note_check(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        """Notes the word of a member that others can't reach: it lives if it asks on."""
        forming, member_id = self.seating.forming, request.member.member_id
        rank = None if forming is None else forming.rank_of(member_id)
        if forming is None or rank is None:
            return
        suspicion = forming.suspicions.get(rank)
        if suspicion is not None:
            suspicion.word_count += 1
            if suspicion.word_count >= WORD_COUNT_OF_THE_LIVING:
                if (
                    self.seating.is_elastic
                    and suspicion.reporter.is_newcomer
                    and not (forming.applicants[rank].is_newcomer)
                ):  # the members go on without it
                    self._refuse(suspicion.reporter, suspicion.verdict, now_s)
                    return
                self._refusals.fail(forming.number, suspicion.verdict, now_s)
                for applicant in forming.applicants:
                    self._refuse(applicant, suspicion.verdict, now_s)
                return
        if request.checked_generation != forming.number:
            return
        if not request.unreachable:
            forming.checked_ids.add(member_id)
            return
        missed = request.unreachable[0]
        if missed.rank >= len(forming.applicants):
            raise ArgumentError(
                f"unreachable.rank must be 0 to {len(forming.applicants) - 1}; got {missed.rank}"
            )
        if missed.rank not in forming.suspicions:
            message = unreachable_text(self.seating.spec.name, rank, forming.applicants, missed)
            verdict = Verdict(kind=WorkerUnreachableError, message=message, rank=missed.rank)
            reporter, other = forming.applicants[rank], forming.applicants[missed.rank]
            if self.seating.is_elastic and other.is_newcomer and not reporter.is_newcomer:
                self._refuse(other, verdict, now_s)  # members do not wait until its lease ends
                return
            forming.suspicions[missed.rank] = Suspicion(verdict=verdict, reporter=reporter)

    # Generations that were formed before this server was started.

    def _find_previous(self, request: pb.JoinGroupRequest, now_s: float) -> None:
        number = request.previous_generation
        if self._known_number() != number or self.seating.generation is None:
            self._check_adoptable(request, number)
            self._adopt(request, number, request.previous_member_count or request.spec.size, now_s)
        generation = self.seating.generation
        assert generation is not None
        seat = generation.living_at(request.rank)
        is_known = generation.seat_of(request.member.member_id) is not None
        if seat is not None and seat.member is None and not is_known:
            seat.member = request.member

    def _place_of(self, request: pb.JoinGroupRequest) -> tuple[Roster | None, Seat | None]:
        generation = self.seating.generation
        if generation is None:
            return None, None
        seat = generation.seat_of(request.member.member_id)
        if (
            seat is None
            and generation.is_adopted
            and request.checked_generation == generation.number
            and len(generation.seats) == self.seating.spec.size  # where no rank has changed
            and not self.seating.is_elastic
        ):
            free = generation.living_at(request.rank)
            if free is not None and free.member is None:
                free.member, seat = request.member, free
        return generation, seat

    def _check_adoptable(self, request: RequestT, number: int) -> None:
        """Raises WorkerLostError if an unknown generation may not be taken over.

        The order of two generations is known within one life of a server: the next may not have
        heard of the one before. So of two from other lives, the one stays that more than half of
        its members follow.
        """
        generation, known = self.seating.generation, self._known_number()
        is_same_life = incarnation_of(number) == incarnation_of(known)
        is_old = self._numbers.is_own(number) or (is_same_life and number <= known)
        stays = generation is not None and (
            not generation.is_adopted or (generation.is_followed() and not is_same_life)
        )
        if is_old or stays:
            where = (request.spec.name, number, request.rank, request.member)
            raise WorkerLostError(left_behind_text(*where, generation), rank=request.rank)

    def _known_number(self) -> int:
        generation = self.seating.generation
        return self._ended_number if generation is None else generation.number

    def _adopt(self, request: RequestT, number: int, member_count: int, now_s: float) -> None:
        self._numbers.note(number)
        self.seating.forming, self._ended_number = None, self._known_number()
        self.seating.spec = request.spec
        self.seating.generation = Roster.adopted(
            number, member_count, request.lease_ms / 1000, now_s
        )
        self.seating.generation.seats[request.rank].member = request.member

    def _renewed_seat(self, generation: Roster, request: pb.RenewLeaseRequest) -> Seat:
        own = generation.seat_of(request.member.member_id)
        if own is not None and own.lost_reason:
            raise lost_error(self.seating.spec.name, own)
        if request.member_count == len(generation.seats):
            seat = generation.seats[request.rank]
            if seat.member is None and own is None:
                if seat.lost_reason:
                    raise lost_error(self.seating.spec.name, seat)
                seat.member = request.member
            if seat.member is not None and seat.member.member_id == request.member.member_id:
                return seat
        raise stranger_error(request, len(generation.seats))

    # Refusals.

    def _free_ranks(self) -> str:
        living_count = len(self.seating.living())
        if not 0 < living_count < self.seating.spec.size:
            return ""
        return f" (ranks that are free: {listed(self.seating.free_ranks())})"

    def _refuse(self, applicant: Applicant, verdict: Verdict, now_s: float) -> None:
        self.seating.remove(applicant.member.member_id)
        self._refusals.add(applicant, verdict, now_s)

"""The ranks of a group: members that live, and applicants. Pure.

An applicant that asks for the rank of another, the holder, contends for it, and has no place while
it does. So does an applicant that asks for the group's name with other settings than its members'.
In an elastic group a rank is a wish, and no applicant contends: it gets a free rank, or waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwell.group.rendezvous.members import (
    Applicant,
    Forming,
    Lease,
    Roster,
    Seat,
    described,
)
from shardwell.group.rendezvous.refusals import differences
from shardwell.v1 import group_pb2 as pb

_NAMED_COUNT_MAX = 8


class Seating:
    """The places of one group; `Gathering` decides who comes and goes."""

    def __init__(self, spec: pb.GroupSpec) -> None:
        self.spec = spec
        self.applicants: dict[str, Applicant] = {}
        """Applicants by member id, in the order in which they asked first."""
        self.generation: Roster | None = None
        self.forming: Forming | None = None

    def knows(self, member_id: str) -> bool:
        """True if it waits or is a member."""
        generation = self.generation
        return member_id in self.applicants or (
            generation is not None and generation.seat_of(member_id) is not None
        )

    def member_ids(self, now_s: float) -> set[str]:
        """The ids of all that wait, or are members, and whose leases have not ended."""
        return {
            one.member.member_id
            for one in self._known()
            if one.member is not None and one.lease.end_s > now_s
        }

    def placed(self) -> dict[int, Applicant]:
        """The applicants that would take part, by the ranks they want; others contend for them."""
        if self.is_elastic:
            return self._placed_by_age()
        placed: dict[int, Applicant] = {}
        for applicant in self.agreeing():
            seat = None if self.generation is None else self.generation.living_at(applicant.rank)
            if (seat is None or self.is_back(seat, applicant)) and applicant.rank not in placed:
                placed[applicant.rank] = applicant
        return placed

    def _placed_by_age(self) -> dict[int, Applicant]:
        agreeing = self.agreeing()
        placed = {one.rank: one for one in agreeing if not one.is_newcomer}
        taken = placed.keys() | {seat.rank for seat in self.living()}
        free = [rank for rank in range(self.spec.size) if rank not in taken]
        for applicant in agreeing:
            if applicant.is_newcomer and free:
                rank = applicant.rank if applicant.rank in free else free[0]
                free.remove(rank)
                placed[rank] = applicant
        return placed

    @property
    def is_elastic(self) -> bool:
        """True if workers come and go: `size` is the largest number then, `min_size` the least."""
        return self.spec.min_size > 0

    def agreeing(self) -> list[Applicant]:
        """The applicants that ask for the group as it is."""
        return [one for one in self.applicants.values() if one.spec == self.spec]

    def drop_those_left_behind(self) -> None:
        """Takes out applicants that follow another generation; their next request is refused."""
        number = 0 if self.generation is None else self.generation.number
        for applicant in list(self.applicants.values()):
            if applicant.previous_generation not in (0, number):
                self.remove(applicant.member.member_id)

    def pass_on(self) -> None:
        """Takes the first applicant's spec when no applicant with the agreed one is left."""
        if self.generation is None and self.applicants and not self.agreeing():
            self.spec = next(iter(self.applicants.values())).spec

    def holder(self, applicant: Applicant, placed: dict[int, Applicant]) -> Seat | Applicant:
        """The holder, heard of last, of the rank or the name that an applicant contends for."""
        if applicant.spec != self.spec:
            return max(self._holders(), key=lambda one: one.lease.heard_s or -math.inf)
        seat = None if self.generation is None else self.generation.living_at(applicant.rank)
        return placed[applicant.rank] if seat is None else seat

    def _holders(self) -> list[Seat | Applicant]:
        return [*self.living(), *self.agreeing()]

    def is_back(self, seat: Seat, applicant: Applicant | None = None) -> bool:
        """True if a living member has asked for the generation that follows its own."""
        if seat.member is None or self.generation is None:
            return False
        found = self.applicants.get(seat.member.member_id)
        return (
            found is not None
            and found.spec == self.spec
            and found.previous_generation == self.generation.number
            and (applicant is None or applicant is found)
        )

    def living(self) -> list[Seat]:
        """The members of the generation that live, by rank."""
        return [] if self.generation is None else self.generation.living()

    def _known(self) -> list[Seat | Applicant]:
        return [*self.living(), *self.applicants.values()]

    def leases(self) -> list[Lease]:
        """The leases of all that live, as members or applicants."""
        return [one.lease for one in self._known()]

    def free_ranks(self) -> list[int]:
        """Ranks without a member."""
        taken = self.placed().keys() | {seat.rank for seat in self.living()}
        return [rank for rank in range(self.spec.size) if rank not in taken]

    def remove(self, member_id: str) -> None:
        """Takes an applicant out."""
        if self.applicants.pop(member_id, None) is not None:
            forming = self.forming
            if forming is not None and forming.rank_of(member_id) is not None:
                self.forming = None

    # Answers.

    def join_answer(
        self, member_id: str, refusals: Iterable[str], now_s: float
    ) -> pb.JoinGroupResponse:
        """The answer to an applicant: the progress of its generation."""
        forming, generation = self.forming, self.generation
        applicant = self.applicants.get(member_id)
        if applicant is None:  # it was the last to check
            seat = None if generation is None else generation.seat_of(member_id)
            assert generation is not None
            assert seat is not None
            return generation.answer(seat.rank)
        if applicant.spec != self.spec:
            return self._contender_answer(applicant, now_s)
        rank = None if forming is None else forming.rank_of(member_id)
        if forming is not None and rank is not None:
            return forming.answer(rank, refusals)
        placed = self.placed()
        missing = {rank for rank in range(self.spec.size) if rank not in placed}
        notes = list(refusals)
        if self.is_elastic:
            missing = self._missing_of_elastic(placed)
            notes.append(self._note_of_elastic(applicant, placed))
        asking: Iterable[Applicant] = self.agreeing()
        if forming is not None:
            missing, asking = set(range(len(forming.applicants))), ()
            notes.append(f"generation {forming.number} is formed without this worker; it waits")
        contending = {
            one.rank: one
            for one in asking
            if not self.is_elastic and placed.get(one.rank) is not one
        }
        for rank, contender in sorted(contending.items()):
            missing.add(rank)
            holder = self.holder(contender, placed)
            notes.append(
                f"rank {rank} belongs to {described(rank, holder.member)}, and another asks for "
                f"it; whether that lives is known within "
                f"{max(holder.lease.end_s - now_s, 0.0):.3g} s"
            )
        return pb.JoinGroupResponse(missing_ranks=sorted(missing), refusals=notes)

    def _missing_of_elastic(self, placed: dict[int, Applicant]) -> set[int]:
        awaited = {seat.rank for seat in self.living() if not self.is_back(seat)}
        open_ranks = [
            rank for rank in range(self.spec.size) if rank not in placed and rank not in awaited
        ]
        return awaited | set(open_ranks[: max(self.spec.min_size - len(placed) - len(awaited), 0)])

    def _note_of_elastic(self, applicant: Applicant, placed: dict[int, Applicant]) -> str:
        living, least = self.living(), self.spec.min_size
        if applicant not in placed.values():
            return f"all {self.spec.size} places are taken (size); this worker waits for one"
        if applicant.is_newcomer and living:
            return (
                f"generation {self.generation.number if self.generation else 0} has "
                f"{len(living)} members, which let this worker in at their next call: at "
                "broadcast_state, where they call that"
            )
        there = ", ".join(
            described(rank, one.member) for rank, one in sorted(placed.items())[:_NAMED_COUNT_MAX]
        )
        if len(placed) >= least:
            return f"{len(placed)} workers are here, and more may come for one lease: {there}"
        return f"{len(placed)} of at least {least} workers (min_size) are here: {there}"

    def _contender_answer(self, applicant: Applicant, now_s: float) -> pb.JoinGroupResponse:
        holder = self.holder(applicant, {})
        known_s = max(one.lease.end_s for one in self._holders()) - now_s
        note = (
            f"group {self.spec.name!r} belongs to {described(holder.rank, holder.member)} with "
            f"other settings: {differences(self.spec, applicant.spec)}; whether a member of it "
            f"lives is known within {max(known_s, 0.0):.3g} s"
        )
        return pb.JoinGroupResponse(missing_ranks=range(applicant.spec.size), refusals=[note])

    def renewal_answer(self, generation: Roster, seat: Seat) -> pb.RenewLeaseResponse:
        """The answer to a member's renewal: which others are lost."""
        lost = [
            pb.LostMember(
                rank=other.rank,
                reason=other.lost_reason,
                left=other.has_left,
                expired=other.is_expired,
            )
            for other in generation.seats
            if other.lost_reason
        ]
        if all(member.left for member in lost):
            lost += [
                pb.LostMember(
                    rank=other.rank, reason="it asked to rebuild the group", rebuilds=True
                )
                for other in generation.seats
                if other is not seat and self.is_back(other)
            ]
        waiting = [one for one in self.placed().values() if one.is_newcomer or not self.is_elastic]
        return pb.RenewLeaseResponse(lost=lost, waiting_count=len(waiting))

"""Who has which place of a group: the members that live, and those who ask for one. Pure.

Who asks for the rank of another, the holder, contends for it, and has no place while it does.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwell.group.places import Applicant, Forming, Generation, Lease, Seat, described
from shardwell.v1 import group_pb2 as pb


class Seating:
    """The places of one group; `Gathering` decides who comes and goes."""

    def __init__(self) -> None:
        self.applicants: dict[str, Applicant] = {}
        """By member id, in the order in which they asked first."""
        self.generation: Generation | None = None
        """The one that has a living member."""
        self.forming: Forming | None = None
        """The one that follows."""

    def knows(self, member_id: str) -> bool:
        """Whether it waits or is a member."""
        generation = self.generation
        return member_id in self.applicants or (
            generation is not None and generation.seat_of(member_id) is not None
        )

    def placed(self) -> dict[int, Applicant]:
        """Those who would take part, by the ranks they want; others contend with the holders."""
        placed: dict[int, Applicant] = {}
        for applicant in self.applicants.values():
            seat = None if self.generation is None else self.generation.living_at(applicant.rank)
            if (seat is None or self.is_back(seat, applicant)) and applicant.rank not in placed:
                placed[applicant.rank] = applicant
        return placed

    def holder(self, rank: int, placed: dict[int, Applicant]) -> tuple[Lease, pb.Member | None]:
        """Who has a rank that somebody else contends for."""
        seat = None if self.generation is None else self.generation.living_at(rank)
        if seat is not None:
            return seat.lease, seat.member
        return placed[rank].lease, placed[rank].member

    def is_back(self, seat: Seat, applicant: Applicant | None = None) -> bool:
        """Whether a living member has asked for the generation that follows its own."""
        if seat.member is None or self.generation is None:
            return False
        found = self.applicants.get(seat.member.member_id)
        return (
            found is not None
            and found.previous_generation == self.generation.number
            and (applicant is None or applicant is found)
        )

    def living(self) -> list[Seat]:
        """The members of the generation that live, by rank."""
        return [] if self.generation is None else self.generation.living()

    def leases(self) -> list[Lease]:
        """Of all that live, as members or applicants."""
        waiting = [applicant.lease for applicant in self.applicants.values()]
        return waiting + [seat.lease for seat in self.living()]

    def free_ranks(self, size: int) -> list[int]:
        """Ranks that nobody has."""
        placed = self.placed()
        taken = {seat.rank for seat in self.living()}
        return [rank for rank in range(size) if rank not in placed and rank not in taken]

    def remove(self, member_id: str) -> None:
        """Takes an applicant out."""
        if self.applicants.pop(member_id, None) is not None:
            forming = self.forming
            if forming is not None and forming.rank_of(member_id) is not None:
                self.forming = None

    # Answers.

    def join_answer(
        self, member_id: str, size: int, refusals: Iterable[str], now_s: float
    ) -> pb.JoinGroupResponse:
        """How far the generation is of one that has asked for a place in a group of `size`."""
        forming, generation = self.forming, self.generation
        applicant = self.applicants.get(member_id)
        if applicant is None:  # it was the last to check
            seat = None if generation is None else generation.seat_of(member_id)
            assert generation is not None
            assert seat is not None
            return generation.answer(seat.rank)
        rank = None if forming is None else forming.rank_of(member_id)
        if forming is not None and rank is not None:
            return forming.answer(rank, refusals)
        placed = self.placed()
        missing = {rank for rank in range(size) if rank not in placed}
        notes = list(refusals)
        asking: Iterable[Applicant] = self.applicants.values()
        if forming is not None:
            missing, asking = set(range(len(forming.applicants))), ()
            notes.append(f"generation {forming.number} is formed without this worker; it waits")
        for rank in sorted({one.rank for one in asking if placed.get(one.rank) is not one}):
            missing.add(rank)
            lease, holder = self.holder(rank, placed)
            notes.append(
                f"rank {rank} belongs to {described(rank, holder)}, and another asks for it; "
                f"whether that lives is known within {max(lease.end_s - now_s, 0.0):.3g} s"
            )
        return pb.JoinGroupResponse(missing_ranks=sorted(missing), refusals=notes)

    def renewal_answer(self, generation: Generation, seat: Seat) -> pb.RenewLeaseResponse:
        """What a member of the generation is told of the others."""
        lost = [
            pb.LostMember(rank=other.rank, reason=other.lost_reason, left=other.has_left)
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
        return pb.RenewLeaseResponse(lost=lost, waiting_count=len(self.placed()))

"""A rendezvous without a wire: Meetings and a clock, and workers that ask it things."""

from __future__ import annotations

from typing import Any

from shardwell.group.rendezvous.registry import Meetings
from shardwell.group.rendezvous.validation import MeetingLimits
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import types_pb2

LEASE_S = 5.0


def group_spec(size: int = 3, **fields: Any) -> pb.GroupSpec:
    """A group "job" with a ring of fp16, unless fields say otherwise."""
    defaults = {"name": "job", "strategy": "ring", "codec": types_pb2.CODEC_FP16}
    return pb.GroupSpec(size=size, **{**defaults, **fields})


def group_member(member_id: str) -> pb.Member:
    """Who runs on a host of its own name."""
    return pb.Member(
        member_id=member_id, address=f"{member_id}:7000", description=f"on {member_id}"
    )


def lost_of(answer: pb.RenewLeaseResponse) -> dict[int, str]:
    """Who is lost, by rank, and why."""
    return {member.rank: member.reason for member in answer.lost}


class Room:
    """Meetings at a time that tests set; requests with one spec."""

    def __init__(
        self, size: int = 3, *, limits: MeetingLimits | None = None, incarnation: int = 7
    ) -> None:
        self.spec = group_spec(size)
        self.now_s = 100.0
        self.limits = limits
        self.meetings = Meetings(limits, incarnation=incarnation)

    def restart(self, incarnation: int = 3) -> None:
        """The server is started anew, and knows nothing."""
        self.meetings = Meetings(self.limits, incarnation=incarnation)

    def join(self, member_id: str, rank: int, **fields: Any) -> pb.JoinGroupResponse:
        """Asks once."""
        return self.meetings.join(self.join_request(member_id, rank, **fields), self.now_s)

    def join_request(self, member_id: str, rank: int, **fields: Any) -> pb.JoinGroupRequest:
        """What `join` asks."""
        defaults = {
            "spec": self.spec,
            "member": group_member(member_id),
            "lease_ms": int(LEASE_S * 1000),
        }
        return pb.JoinGroupRequest(rank=rank, **{**defaults, **fields})

    def renew(
        self, member_id: str, rank: int, generation: int, **fields: Any
    ) -> pb.RenewLeaseResponse:
        """Renews once; the generation has `size` members unless fields say otherwise."""
        defaults = {
            "spec": self.spec,
            "member": group_member(member_id),
            "member_count": self.spec.size,
            "lease_ms": int(LEASE_S * 1000),
        }
        request = pb.RenewLeaseRequest(rank=rank, generation=generation, **{**defaults, **fields})
        return self.meetings.renew(request, self.now_s)

    def leave(self, member_id: str) -> None:
        """Leaves."""
        request = pb.LeaveGroupRequest(group=self.spec.name, member_id=member_id)
        self.meetings.leave(request, self.now_s)

    def form(self, *member_ids: str, **fields: Any) -> int:
        """Brings members to a generation, with ranks in their order; its number."""
        for _ in range(2):
            for rank, member_id in enumerate(member_ids):
                answer = self.join(member_id, rank, **fields)
        for rank, member_id in enumerate(member_ids):
            answer = self.join(member_id, rank, checked_generation=answer.generation, **fields)
        assert answer.ready
        return answer.generation

    def pass_time(self, duration_s: float, generation: int, *members: tuple[str, int]) -> None:
        """Time passes, in which these members renew, each four times a lease."""
        for _ in range(round(duration_s / (LEASE_S / 4))):
            self.now_s += LEASE_S / 4
            for member_id, rank in members:
                self.renew(member_id, rank, generation)

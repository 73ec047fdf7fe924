"""GroupService: the wire contract of group.proto, over Meetings."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

from shardwell.connection.credentials import SameToken, authorization_of
from shardwell.connection.handlers import Handlers
from shardwell.errors import WrongShardError
from shardwell.group.rendezvous.members import INCARNATION_BITS, GroupState
from shardwell.group.rendezvous.registry import Meetings, Owner
from shardwell.v1 import group_pb2 as pb

_LOG = logging.getLogger("shardwell.group")
_SERVICE = pb.DESCRIPTOR.services_by_name["GroupService"]
Admit: TypeAlias = Callable[[Any, str], Owner]
"""The owner that calls, given the context and a group's name; raises where it is refused."""


def admit_anybody(context: Any, group: str) -> Owner:
    """Lets everybody in."""
    return Owner()


def admit_same(token: SameToken) -> Admit:
    """Lets in workers that bring that token."""

    def admit(context: grpc.ServicerContext, group: str) -> Owner:
        token.check(authorization_of(context.invocation_metadata()))
        return Owner()

    return admit


class GroupService:
    """Handlers, one method an RPC; none blocks. A shard whose index is not 0 refuses every call."""

    def __init__(
        self,
        *,
        shard_index: int = 0,
        admit: Admit = admit_anybody,
    ) -> None:
        self._shard_index = shard_index
        self._admit = admit
        self._lock = threading.Lock()
        self._meetings = Meetings(incarnation=secrets.randbits(INCARNATION_BITS))
        self._answering = Handlers(_LOG, shard_index=shard_index, place="rendezvous")

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods for a grpc.Server."""
        unary = self._answering.unary
        handlers = {
            "JoinGroup": unary(self.join_group, pb.JoinGroupRequest),
            "RenewLease": unary(self.renew_lease, pb.RenewLeaseRequest),
            "LeaveGroup": unary(self.leave_group, pb.LeaveGroupRequest),
        }
        assert set(handlers) == {method.name for method in _SERVICE.methods}
        return grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)

    def describe(self) -> list[GroupState]:
        """The states of all groups that meet here, by name."""
        with self._lock:
            return self._meetings.describe(time.monotonic())

    def join_group(self, request: pb.JoinGroupRequest, context: Any) -> pb.JoinGroupResponse:
        """Serves JoinGroup."""
        self._check_shard()
        owner = self._admit(context, request.spec.name)
        with self._lock:
            return self._meetings.join(request, time.monotonic(), owner)

    def renew_lease(self, request: pb.RenewLeaseRequest, context: Any) -> pb.RenewLeaseResponse:
        """Serves RenewLease."""
        self._check_shard()
        owner = self._admit(context, request.spec.name)
        with self._lock:
            return self._meetings.renew(request, time.monotonic(), owner)

    def leave_group(self, request: pb.LeaveGroupRequest, context: Any) -> pb.LeaveGroupResponse:
        """Serves LeaveGroup."""
        self._check_shard()
        self._admit(context, request.group)
        with self._lock:
            return self._meetings.leave(request, time.monotonic())

    def _check_shard(self) -> None:
        if self._shard_index != 0:
            raise WrongShardError(
                f"groups meet at shard 0; this is shard {self._shard_index}; "
                "give the cluster's addresses in the order of the shards"
            )

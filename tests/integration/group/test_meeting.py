"""Goal: workers meet at a real shard, and a worker that does not get a place learns why.

Method: real shards and real clients; their addresses lead nowhere, as no test calls them.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import shardwell
from harness.group.rendezvous_driver import group_spec
from harness.polling import BRIEF_S, PATIENCE_S, Stopwatch, eventually
from harness.tokens import bearing
from harness.wire_client import crc as wire_crc
from harness.wire_client.worker import error_detail
from shardwell.connection.credentials import Credentials
from shardwell.group.rendezvous.client import Greet, Rendezvous
from shardwell.group.rendezvous.lease import LeaseKeeper
from shardwell.v1 import group_pb2 as pb
from shardwell.v1 import group_pb2_grpc, types_pb2

LEASE_MS = 1000
TIMEOUT_S = 20.0
Run = Callable[..., "Future[pb.JoinGroupResponse]"]


def new_member(name: str) -> pb.Member:
    return pb.Member(member_id=uuid.uuid4().hex, address=f"{name}:7000", description=f"on {name}")


class Greeted:
    """Members that were greeted: at once, or never if `unreachable` is None."""

    def __init__(self, unreachable: Sequence[pb.UnreachableMember] | None) -> None:
        self.unreachable = None if unreachable is None else list(unreachable)
        self.closed = False

    def wait(self, timeout_s: float) -> None:
        if self.unreachable is None:
            threading.Event().wait(timeout_s)

    def close(self) -> None:
        self.closed = True


def nobody(members: Sequence[pb.Member], deadline_s: float) -> Greeted:
    """All can be reached."""
    return Greeted([])


def join_with(
    rendezvous: Rendezvous,
    spec: pb.GroupSpec,
    member: pb.Member,
    rank: int,
    *,
    timeout_s: float = TIMEOUT_S,
    greet: Greet = nobody,
    previous: pb.JoinGroupResponse | None = None,
    **more: Any,
) -> pb.JoinGroupResponse:
    """A place in the group's next generation; after `previous`, if it is given."""
    if previous is not None:
        more["previous_generation"] = previous.generation
        more["previous_member_count"] = len(previous.members)
    more = {"lease_ms": LEASE_MS, **more}
    request = pb.JoinGroupRequest(spec=spec, member=member, rank=rank, **more)
    return rendezvous.join(request, timeout_s=timeout_s, greet=greet)


def join(
    target: str, member: pb.Member, rank: int, spec: pb.GroupSpec, **options: Any
) -> pb.JoinGroupResponse:
    with Rendezvous(target, Credentials.of()) as rendezvous:
        return join_with(rendezvous, spec, member, rank, **options)


def renewal(
    spec: pb.GroupSpec, member: pb.Member, formed: pb.JoinGroupResponse
) -> pb.RenewLeaseRequest:
    return pb.RenewLeaseRequest(
        spec=spec,
        member=member,
        generation=formed.generation,
        rank=formed.rank,
        member_count=len(formed.members),
        lease_ms=LEASE_MS,
    )


@pytest.fixture
def run() -> Iterator[Run]:
    """Joins in a thread of its own."""
    with ThreadPoolExecutor(8) as threads:
        yield lambda *arguments, **options: threads.submit(join, *arguments, **options)


@pytest.fixture
def keep() -> Iterator[Callable[..., list[Sequence[pb.LostMember]]]]:
    """Keeps leases; the lost members that each hears of come into the list that it returns."""
    with contextlib.ExitStack() as stack:

        def start(target: str, request: pb.RenewLeaseRequest) -> list[Sequence[pb.LostMember]]:
            losses: list[Sequence[pb.LostMember]] = []
            rendezvous = stack.enter_context(Rendezvous(target, Credentials.of()))
            stack.enter_context(LeaseKeeper(rendezvous, request, losses.append))
            return losses

        yield start


def test_a_group_forms_and_all_know_the_same(cluster, run) -> None:
    target, spec = cluster(2).target, group_spec(4)
    members = [new_member(f"h{rank}") for rank in range(4)]
    formed = [f.result() for f in [run(target, members[r], r, spec) for r in range(4)]]
    assert {one.generation for one in formed} == {formed[0].generation}
    assert [one.rank for one in formed] == [0, 1, 2, 3]
    assert all(list(one.members) == members for one in formed)


def test_members_greet_all_before_it_is_ready(cluster, run) -> None:
    target, spec = cluster(1).target, group_spec(2)
    greeted: list[list[str]] = []

    def greet(members: Sequence[pb.Member], deadline_s: float) -> Greeted:
        greeted.append([member.description for member in members])
        return Greeted([])

    futures = [run(target, new_member(f"h{r}"), r, spec, greet=greet) for r in range(2)]
    for future in futures:
        future.result()
    assert greeted == [["on h0", "on h1"]] * 2


def test_an_unreachable_member_is_named_to_all(cluster, run) -> None:
    target, spec = cluster(1).target, group_spec(3)

    def greet(members: Sequence[pb.Member], deadline_s: float) -> Greeted:
        return Greeted([pb.UnreachableMember(rank=2, reason="connection refused")])

    options: list[dict[str, Any]] = [{}, {"greet": greet}, {}]
    futures = [run(target, new_member(f"h{r}"), r, spec, **options[r]) for r in range(3)]
    for future in futures:
        with pytest.raises(shardwell.WorkerUnreachableError, match=r"on h1.*can't reach.*on h2"):
            future.result()
    futures = [run(target, new_member(f"h{r}"), r, spec) for r in range(3)]
    assert len({future.result().generation for future in futures}) == 1


def test_the_deadline_names_the_missing_and_the_refused(cluster, run) -> None:
    target, spec = cluster(1).target, group_spec(3)
    waiting = run(target, new_member("h0"), 0, spec, timeout_s=2 * BRIEF_S)
    with Rendezvous(target, Credentials.of()) as rendezvous:
        eventually("the first is there", lambda: _is_there(rendezvous, spec))
        other = group_spec(4)
        eventually("another is refused", lambda: _is_refused(rendezvous, other))
    with pytest.raises(shardwell.WorkersMissingError, match="ranks 1, 2 of 3 did not") as caught:
        waiting.result()
    assert caught.value.missing_ranks == (1, 2)
    assert "rank 0 did" in str(caught.value)
    assert "size 3, got 4" in str(caught.value)
    # It has left: the place is free at once, and so is the name.
    assert join(target, new_member("h9"), 0, group_spec(1)).rank == 0


def _is_there(rendezvous: Rendezvous, spec: pb.GroupSpec) -> bool:
    """Whether rank 0 is; asked by one that is soon gone again."""
    with pytest.raises(shardwell.ShardwellError) as caught:
        join_with(rendezvous, spec, new_member("y"), 1, timeout_s=0.1)
    return 0 not in getattr(caught.value, "missing_ranks", (0,))


def _is_refused(rendezvous: Rendezvous, spec: pb.GroupSpec) -> bool:
    try:
        join_with(rendezvous, spec, new_member("x"), 1, timeout_s=0.1)
    except shardwell.GroupMismatchError:
        return True
    except (shardwell.WorkersMissingError, shardwell.ShardUnavailableError):
        return False
    return False


def test_the_rank_of_a_member_that_lives_is_taken(cluster, run, keep) -> None:
    target, spec = cluster(1).target, group_spec(1)
    member = new_member("h0")
    losses = keep(target, renewal(spec, member, join(target, member, 0, spec)))
    with pytest.raises(shardwell.RankTakenError, match="on h0") as caught:
        join(target, new_member("h1"), 0, spec)
    assert caught.value.rank == 0
    assert not losses


def test_a_replacement_after_a_lease_has_ended(cluster, run, keep) -> None:
    target, spec = cluster(1).target, group_spec(2)
    members = [new_member("h0"), new_member("h1")]
    formed = [f.result() for f in [run(target, members[r], r, spec) for r in range(2)]]
    losses = keep(target, renewal(spec, members[0], formed[0]))
    replacement = run(target, new_member("h2"), 1, spec)
    eventually("the loss is known", lambda: losses)
    ((lost,),) = losses
    assert (lost.rank, lost.reason) == (1, "its lease of 1 s ended")
    again = join(
        target, members[0], 0, spec, previous=formed[0], replacement_wait_ms=int(TIMEOUT_S * 1000)
    )
    assert again.generation == replacement.result().generation > formed[0].generation
    assert [member.description for member in again.members] == ["on h0", "on h2"]
    with Rendezvous(target, Credentials.of()) as rendezvous:
        request = renewal(spec, members[1], formed[1])
        with pytest.raises(shardwell.WorkerLostError, match="succeeded"):
            rendezvous.finish_renewal(rendezvous.begin_renewal(request, timeout_s=TIMEOUT_S))


def test_a_lost_member_gets_an_error_that_says_so(cluster, run, keep) -> None:
    target, spec = cluster(1).target, group_spec(2)
    members = [new_member("h0"), new_member("h1")]
    formed = [f.result() for f in [run(target, members[r], r, spec) for r in range(2)]]
    survivor = run(target, members[0], 0, spec, previous=formed[0], lost_ranks=[1])
    survivor.result()
    losses = keep(target, renewal(spec, members[1], formed[1]))
    eventually("it knows", lambda: losses)
    assert [lost.rank for lost in losses[0]] == [1]
    assert len(losses) == 1


def test_a_shard_that_is_started_anew_takes_the_group_over(cluster, run, keep, tmp_path) -> None:
    running, spec = cluster(1, processes=True, data_dir=tmp_path), group_spec(2)
    target = running.target
    members = [new_member("h0"), new_member("h1")]
    formed = [f.result() for f in [run(target, members[r], r, spec) for r in range(2)]]
    losses = [keep(target, renewal(spec, members[r], formed[r])) for r in range(2)]
    waiting = run(target, new_member("h2"), 0, group_spec(2, name="other"))
    running.children[0].kill()
    running.children[0].wait(TIMEOUT_S)
    running.start_again(0)
    other = join(target, new_member("h3"), 1, group_spec(2, name="other"))
    assert other.generation == waiting.result().generation != formed[0].generation
    with Rendezvous(target, Credentials.of()) as rendezvous:
        eventually(
            "it knows the group",
            lambda: _is_taken(rendezvous, spec),
        )
        assert losses == [[], []]
        rendezvous.leave(spec.name, members[0].member_id)
    eventually("the other knows", lambda: losses[1])
    assert [(lost.rank, lost.reason) for lost in losses[1][0]] == [(0, "it left the group")]


def _is_taken(rendezvous: Rendezvous, spec: pb.GroupSpec) -> bool:
    try:
        join_with(rendezvous, spec, new_member("x"), 0, timeout_s=0.5)
    except shardwell.RankTakenError:
        return True
    except (shardwell.WorkersMissingError, shardwell.ShardUnavailableError):
        return False
    return False


def test_a_rendezvous_that_comes_late_is_waited_for(cluster, run, tmp_path) -> None:
    running = cluster(1, processes=True, data_dir=tmp_path)
    running.children[0].kill()
    running.children[0].wait(TIMEOUT_S)
    waiting = run(running.target, new_member("h0"), 0, group_spec(1))
    running.start_again(0)
    assert waiting.result().rank == 0


def test_no_rendezvous_at_all() -> None:
    watch = Stopwatch()
    with pytest.raises(shardwell.ShardUnavailableError) as caught:
        join("127.0.0.1:1", new_member("h0"), 0, group_spec(2), timeout_s=0.5)
    assert caught.value.message.startswith("no rendezvous at 127.0.0.1:1:")
    assert "nothing listens on port 1 of 127.0.0.1" in caught.value.message
    assert watch.elapsed_s < PATIENCE_S


def test_one_that_is_interrupted_leaves(cluster) -> None:
    target = cluster(1).target

    def greet(members: Sequence[pb.Member], deadline_s: float) -> Greeted:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        join(target, new_member("h0"), 0, group_spec(1), greet=greet, lease_ms=60_000)
    assert join(target, new_member("h1"), 0, group_spec(1), timeout_s=5).rank == 0


class Silent(group_pb2_grpc.GroupServiceServicer):
    """A rendezvous that takes every request and answers none."""

    def __init__(self) -> None:
        self.leaving_s: list[float] = []
        """How long each that leaves would wait for the answer."""

    def JoinGroup(self, request: pb.JoinGroupRequest, context: grpc.ServicerContext) -> Any:
        self._wait(context)
        return pb.JoinGroupResponse()

    def LeaveGroup(self, request: pb.LeaveGroupRequest, context: grpc.ServicerContext) -> Any:
        remaining_s = context.time_remaining()
        assert remaining_s is not None
        self.leaving_s.append(remaining_s)
        self._wait(context)
        return pb.LeaveGroupResponse()

    @staticmethod
    def _wait(context: grpc.ServicerContext) -> None:
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(PATIENCE_S)


def test_giving_up_on_a_silent_rendezvous_does_not_wait_for_it() -> None:
    """It has waited for as long as it was to already."""
    silent = Silent()
    server = grpc.server(ThreadPoolExecutor(4))
    group_pb2_grpc.add_GroupServiceServicer_to_server(silent, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(shardwell.ShardUnavailableError, match="no rendezvous at"):
            shardwell.join_group("g", rank=0, size=1, rendezvous=target, join_timeout_s=0.5)
    finally:
        server.stop(None).wait()
    assert sum(silent.leaving_s) <= 0.25


def test_closing_ends_a_join_and_a_lease_at_once(cluster) -> None:
    target, spec = cluster(1).target, group_spec(2)
    rendezvous, caught = Rendezvous(target, Credentials.of()), []

    def wait() -> None:
        with pytest.raises(shardwell.ClosedError) as error:
            join_with(rendezvous, spec, new_member("h0"), 0)
        caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    rendezvous.close()
    rendezvous.close()
    thread.join(PATIENCE_S)
    assert caught


def test_a_lease_at_a_rendezvous_that_is_away_ends_quickly() -> None:
    formed = pb.JoinGroupResponse(generation=5, rank=0, members=(pb.Member(), pb.Member()))
    request = renewal(group_spec(2), new_member("h0"), formed)
    request.lease_ms = 600_000
    losses: list[Any] = []
    with Rendezvous("127.0.0.1:1", Credentials.of()) as rendezvous:
        keeper = LeaseKeeper(rendezvous, request, losses.append)
        watch = Stopwatch()
        keeper.close()
        keeper.close()
    assert watch.elapsed_s < PATIENCE_S
    assert not losses


def test_groups_meet_at_shard_0(cluster) -> None:
    addresses = cluster(2).addresses
    with pytest.raises(shardwell.WrongShardError, match="groups meet at shard 0; this is shard 1"):
        join(addresses[1], new_member("h0"), 0, group_spec(1))


@pytest.mark.parametrize("method", ["JoinGroup", "RenewLease", "LeaveGroup"])
@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"", bytes(50_000)], ids=["garbage", "", "0"])
def test_bytes_that_are_no_request(cluster, method: str, message: bytes) -> None:
    target = cluster(1).target
    with bearing(grpc.insecure_channel(target)) as channel:
        call = channel.unary_unary(f"/shardwell.v1.GroupService/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=PATIENCE_S)
    expected = (
        (grpc.StatusCode.INVALID_ARGUMENT, types_pb2.ERROR_CODE_INVALID_ARGUMENT)
        if message
        else (grpc.StatusCode.DATA_LOSS, types_pb2.ERROR_CODE_CORRUPT_CHUNK)  # all but the CRC
    )
    if method == "JoinGroup" and not message:  # as one of an earlier version, without its number
        expected = (grpc.StatusCode.FAILED_PRECONDITION, types_pb2.ERROR_CODE_WRONG_SHARD)
    assert (caught.value.code(), error_detail(caught.value).code) == expected
    assert join(target, new_member("h0"), 0, group_spec(1)).rank == 0


def test_requests_that_are_too_large(cluster) -> None:
    target = cluster(1).target
    spec, member = group_spec(2), new_member("h0")
    attacks = [
        pb.JoinGroupRequest(spec=spec, member=member, lease_ms=1000, lost_ranks=[1] * 200_000),
        pb.JoinGroupRequest(
            spec=spec,
            member=member,
            lease_ms=1000,
            unreachable=[pb.UnreachableMember(rank=1, reason="x" * 500)] * 1500,
        ),
        pb.JoinGroupRequest(spec=group_spec(2**32 - 1), member=member, lease_ms=1000),
    ]
    with bearing(grpc.insecure_channel(target)) as channel:
        stub: Any = group_pb2_grpc.GroupServiceStub(channel)
        for attack in attacks:
            with pytest.raises(grpc.RpcError) as caught:
                stub.JoinGroup(wire_crc.seal_message(attack), timeout=PATIENCE_S)
            assert caught.value.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
            assert len(caught.value.details() or "") < 2000
    assert join(target, new_member("h0"), 0, group_spec(1)).rank == 0

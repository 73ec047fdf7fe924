"""A worker's way into a group, its rank there, and its way into the next generation."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from functools import partial

from shardwell.connection.credentials import (
    INSECURE_VARIABLE,
    Credentials,
    TokenFileArgument,
    insecure_setting,
    is_loopback,
)
from shardwell.connection.tls import TlsArgument
from shardwell.errors import (
    ArgumentError,
)
from shardwell.group.calls import CallMaker
from shardwell.group.elastic import ElasticGroup
from shardwell.group.group import Group
from shardwell.group.launch import GROUP_VARIABLE, LaunchEnvironment
from shardwell.group.membership import Arguments, Membership, host_towards
from shardwell.group.schedule.strategies import Ring, Strategy
from shardwell.numerics.arguments import check_integer
from shardwell.process.allocator import tune_malloc
from shardwell.process.environment import variable, warn_of_misspelt_variables
from shardwell.process.spans import Traffic
from shardwell.specs.deadlines import check_duration, check_timeout
from shardwell.specs.names import check_name, parse_target
from shardwell.specs.parameter import GROUP_CODECS, WireName
from shardwell.threads.calls import CallThreads
from shardwell.threads.spread import CoreThreads, thread_count
from shardwell.transport.arena import same_host_setting
from shardwell.v1 import group_pb2

GROUP_SIZE_MAX = 256
LEASE_S_DEFAULT = 5.0


def join_group(
    name: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    strategy: Strategy | str | None = None,
    rendezvous: str | Sequence[str] | None = None,
    *,
    codec: WireName = "fp16",
    timeout_s: float = 120.0,
    join_timeout_s: float = 120.0,
    lease_s: float = LEASE_S_DEFAULT,
    listen: str | None = None,
    advertise: str | None = None,
    allow_non_finite: bool = False,
    keep_freed_memory: bool = True,
    same_host: bool = True,
    tls: TlsArgument = None,
    token_file: TokenFileArgument = None,
    insecure: bool | None = None,
    threads: int | None = None,
    elastic: bool = False,
    min_size: int = 1,
) -> Group:
    """Joins a group of workers, waiting until all its ranks are there and reach one another.

    Without `rank`, `size` and `rendezvous`, what `shardwell run`, torchrun, MPI or Slurm have put
    in the environment: see `shardwell.group.launch`.

    Args:
        name: The group's name; the same on all ranks. Default: $SHARDWELL_GROUP, the launcher's
            job, or "default".
        rank: This worker's 0-based rank. In an elastic group a wish, which need not be given.
        size: Number of workers, 1 to 256; the largest number in an elastic group.
        strategy: `Ring()` (default), `Tree(arity=2)` or `Centralized()`; or its spelling, such as
            "tree(arity=2)".
        rendezvous: Where the workers meet: the address of a cluster's shard 0, or the cluster's
            whole target; or a list with an address for each rank, where that rank listens, and of
            which rank 0's is the meeting place.
        codec: How chunks travel unless a call says otherwise: "fp16", "fp32" or "bf16".
        timeout_s: Bound of later calls, unless they say otherwise.
        join_timeout_s: How long the other workers are waited for now.
        lease_s: How long this worker counts as alive without a word of it. A process that is
            killed is noticed at once; this is for machines that vanish. Longer than the longest
            time that the process keeps Python's global lock; 0.1 to 600.
        listen: HOST:PORT for the other workers. Default: a free port of the interface that leads
            to the meeting place.
        advertise: HOST:PORT where the others reach it, if that differs from `listen`.
        allow_non_finite: Let NaN and infinity through instead of refusing them; the same on all
            ranks.
        keep_freed_memory: See `shardwell.connect`.
        same_host: Share memory with ranks that run on this machine, under the same user, for large
            arrays; the results are the same bits. $SHARDWELL_SAME_HOST may be "off", or a
            directory that containers of the machine have in common.
        tls: `shardwell.Tls(ca=..., cert=..., key=...)`: what this worker proves itself with, and
            believes of the others and of the meeting place; members listen and call, so all three
            are needed. Default: the files that $SHARDWELL_TLS_CA, $SHARDWELL_TLS_CERT and
            $SHARDWELL_TLS_KEY name, and no TLS where none is set. False: no TLS.
        token_file: Path of a file with this worker's token, for a meeting place that refuses
            workers without one; see `shardwell.connect`. A worker that serves the meeting place
            itself lets in workers that bring the same token as its own. Default:
            $SHARDWELL_TOKEN_FILE.
        insecure: Listen without TLS where other machines reach this one, so that anyone who shares
            the network may read and change what the group sums. Default: whether
            $SHARDWELL_INSECURE is 1; else that is refused.
        threads: Threads that a call may use for chunks beside each other: see `shardwell.connect`.
            Ranks may differ; the bits do not depend on it.
        elastic: Workers may come, leave and be lost while calls go on: see docs/groups.md. The same
            on all ranks. The group begins when `size` workers have come, or when `min_size` have
            and `lease_s` has passed. A worker that comes later comes in at the members' next call,
            and this function returns then. The meeting place should outlive members: a shard.
        min_size: Elastic groups only: with fewer members, calls wait for others, until their
            deadlines.

    Raises:
        ArgumentError: an argument, or what a launcher says, can't be used; or this worker would
            listen to other machines without TLS.
        AuthenticationError: TLS keeps this worker and the meeting place apart, or that does not
            believe the token; says why.
        AccessDeniedError: the token has no right to join the group.
        WorkersMissingError: not all came in time; those that are missing are named, and so is who
            was refused, and why.
        GroupMismatchError: the group has another size, strategy, codec or allow_non_finite.
        RankTakenError: another worker has the rank, and lives.
        WorkerUnreachableError: a worker can't be reached by another at the address that it gave.
        ShardUnavailableError: no server answers at the meeting place.

    Examples:
        >>> with shardwell.join_group("job", rank=0, size=1, rendezvous=cluster.target) as group:
        ...     group.size
        1
    """
    warn_of_misspelt_variables()
    arguments = _arguments(name, rank, size, rendezvous, listen, elastic=elastic)
    min_size = check_integer("min_size", min_size, 1, arguments.size)
    if min_size > 1 and not elastic:
        raise ArgumentError(
            f"min_size={min_size} needs elastic=True; a group has `size` ranks else"
        )
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    strategy = Ring() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise ArgumentError(f"strategy must be Ring(), Tree() or Centralized(); got {strategy!r}")
    if codec not in GROUP_CODECS:
        raise ArgumentError(f"codec must be one of {', '.join(GROUP_CODECS)}; got {codec!r}")
    lease_s = check_duration("lease_s", lease_s, 0.1, 600)
    timeout_s = check_timeout(timeout_s)
    join_timeout_s = check_timeout(join_timeout_s, "join_timeout_s")
    if advertise is not None:
        parse_target(advertise)
    if keep_freed_memory:
        tune_malloc()
    spec = group_pb2.GroupSpec(
        name=arguments.name,
        size=arguments.size,
        strategy=str(strategy),
        codec=GROUP_CODECS[codec],
        allow_non_finite=bool(allow_non_finite),
        min_size=min_size if elastic else 0,
    )
    traffic = Traffic()
    credentials = Credentials.of(tls, token_file)
    credentials.check_private([arguments.rendezvous])
    files = credentials.tls
    if files is None and not (is_loopback(arguments.listen) or insecure_setting(insecure)):
        raise ArgumentError(
            f"this worker would listen on {arguments.listen} without TLS, so that anyone who "
            "reaches it may read and change what the group sums: give tls=shardwell.Tls(ca=, "
            "cert=, key=), which `shardwell certs` makes; or insecure=True, or set "
            f"${INSECURE_VARIABLE}=1, if "
            "that network is yours alone"
        )
    if files is not None and (files.tls.ca is None or files.tls.cert is None):
        raise ArgumentError(
            f"members of a group listen and call: tls needs ca, cert and key; got {files.tls!r}"
        )

    core_threads = CoreThreads(thread_count(threads))
    call_threads = CallThreads("group")

    def joined() -> Group:
        membership = Membership(
            spec,
            arguments,
            traffic,
            lease_s=lease_s,
            advertise=advertise,
            same_host=same_host_setting(is_wanted=same_host),
            credentials=credentials,
            threads=core_threads,
        )
        try:
            membership.join(join_timeout_s)
            # Made here, so that a group which a Ctrl-C keeps from the caller leaves by itself.
            make = partial(ElasticGroup, min_size=min_size) if elastic else Group
            group = make(
                arguments.name,
                membership,
                call_threads,
                CallMaker(
                    strategy,
                    codec,
                    core_threads,
                    timeout_s=timeout_s,
                    allow_non_finite=allow_non_finite,
                ),
                traffic=traffic,
                credentials=credentials,
            )
            if isinstance(group, ElasticGroup):
                group.begin(join_timeout_s)
            return group
        except BaseException:
            membership.close()
            raise

    try:
        return call_threads.run(joined, join_timeout_s)
    except Exception:  # after Ctrl-C a group may have come, which ends them when it has left
        call_threads.close()
        raise


def _arguments(
    name: str | None,
    rank: int | None,
    size: int | None,
    rendezvous: str | Sequence[str] | None,
    listen: str | None,
    *,
    elastic: bool,
) -> Arguments:
    launched: LaunchEnvironment | None = None
    if elastic and rank is None and isinstance(rendezvous, str):
        rank = 0  # any: a newcomer has a rank that is free
    given = (rank, size, rendezvous)
    if all(value is None for value in given):
        launched = LaunchEnvironment.of(os.environ)
        rank, size = launched.rank, launched.size
    elif any(value is None for value in given):
        raise ArgumentError(
            "pass rank, size and rendezvous all three, or none of them to take them from the "
            f"launcher's variables; got rank={rank!r}, size={size!r}, rendezvous={rendezvous!r:.80}"
        )
    size = check_integer("size", size, 1, GROUP_SIZE_MAX)
    rank = check_integer("rank", rank, 0, size - 1)
    if name is None:
        name = launched.group_name if launched else variable(GROUP_VARIABLE) or "default"
    serves = False
    if launched is not None:
        meeting, serves = launched.rendezvous_address, launched.serves_rendezvous
    elif isinstance(rendezvous, str):
        meeting = parse_target(rendezvous)[0]
    else:
        assert rendezvous is not None
        addresses = parse_target(",".join(rendezvous))
        if len(addresses) not in (1, size):
            raise ArgumentError(
                f"rendezvous has {len(addresses)} addresses; expected one for each of {size} "
                "ranks, or rank 0's alone"
            )
        meeting, serves = addresses[0], rank == 0
        if rank < len(addresses):
            listen = listen or addresses[rank]
    if listen is None:
        listen = listening_address(meeting) if serves else f"{host_towards(meeting)}:0"
    return Arguments(
        name=check_name("name of a group", name),
        rank=rank,
        size=size,
        rendezvous=meeting,
        serves_rendezvous=serves,
        listen=listen,
    )


def listening_address(address: str) -> str:
    """The HOST:PORT to listen on to be found at `address`: a name may be of any interface."""
    host, _, port = address.rpartition(":")
    if host == "localhost":
        return address
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"
    return address

"""A cluster of the workers themselves: each rank of a group has a shard beside it.

with (
    shardwell.join_group() as group,
    GroupCluster(group) as cluster,
    shardwell.connect(cluster.target, worker_id=f"w{group.rank}") as client,
):
    ...
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Self

import numpy as np

from shardwell.errors import ShardUnavailableError
from shardwell.group.group import Group
from shardwell.group.join import listening_address
from shardwell.process.connected import OwnerProcess
from shardwell.specs.names import ADDRESS_LENGTH_MAX, format_ranks
from shardwell_server.config import ShardConfig
from shardwell_server.processes import signals
from shardwell_server.processes.shard import START_TIMEOUT_S, STOP_MARGIN_S, ShardProcess
from shardwell_server.processes.supervise import Supervisor

_SAYING_TIMEOUT_S = 2 * START_TIMEOUT_S
"""Longer than the group's calls: another rank's shard may need a while to start."""
_CLOSE_TIMEOUT_S = 3600.0
"""Others may have many batches left, which need this rank's shard."""
_ANY_HOST = ("0.0.0.0", "[::]")


class GroupCluster:
    """One shard a rank: shard i is a child process of rank i's, and keeps its slices in memory.

    Shards speak TLS where the group does, with the same certificates, and let in clients that have
    the same token as the group's workers.

    All ranks make it, and leave it, at the same point of their programs, as they call the group.
    Left without an error it waits for all ranks, so that no shard ends while others need it. A
    worker that dies takes its shard with it, and so its part of the weights: start the job again,
    from a checkpoint.

    Args:
        group: The group, whose ranks get a shard each; it must not be rebuilt meanwhile.
        listen: HOST:PORT of this rank's shard. Default: a free port, where the other ranks reach
            this one; on all interfaces if they know it by a name.
        chunk_size_bytes: See ShardConfig.
        grace_s: See ShardConfig.
        session_lease_s: See ShardConfig.
        log_level: The least that this rank's shard logs, to stderr.

    Raises:
        ArgumentError: an argument can't be used.
        ShardUnavailableError: this rank's shard did not start, or that of another, whatever it
            raises there: no other rank waits for it.
        ShardwellError: as from any call of the group.

    Examples:
        >>> with shardwell_server.GroupCluster(group) as shards:  # on every rank
        ...     with shardwell.connect(shards.target, worker_id=f"rank-{group.rank}") as worker:
        ...         worker.shard_count
        1
    """

    def __init__(
        self,
        group: Group,
        *,
        listen: str | None = None,
        chunk_size_bytes: int = 2**20,
        grace_s: float = 2.0,
        session_lease_s: float = 30.0,
        log_level: str = "error",
    ) -> None:
        self._owner = OwnerProcess("cluster")
        self._group = group
        self._supervisor: Supervisor[ShardProcess] = Supervisor(grace_s + STOP_MARGIN_S)
        # Rank 0's counts, so that no two clusters can be mixed up.
        self._cluster_id = _said_by_all(group, f"group-{uuid.uuid4().hex[:12]}")[0]
        reachable_host = group.addresses[group.rank].rpartition(":")[0]
        failed: Exception | None = None
        try:
            address = ""
            try:
                config = ShardConfig(
                    shard_index=group.rank,
                    shard_count=group.size,
                    cluster_id=self._cluster_id,
                    listen=listen or listening_address(f"{reachable_host}:0"),
                    chunk_size_bytes=chunk_size_bytes,
                    grace_s=grace_s,
                    session_lease_s=session_lease_s,
                    tls=group.tls,
                    same_token=None if group.token_file is None else Path(group.token_file),
                    insecure=True,  # as far as the group is: it was asked for when that was joined
                )
                with signals.held():
                    place = self._supervisor.add(
                        lambda _: ShardProcess(config, log_level=log_level)
                    )
                host, _, port = place.process.await_address().rpartition(":")
                address = f"{reachable_host if host in _ANY_HOST else host}:{port}"
            except Exception as error:  # the others wait for a word of this rank all the same
                failed = error
            self._addresses = _said_by_all(group, address)
            if failed is not None:
                raise failed
            missing = [rank for rank, found in enumerate(self._addresses) if not found]
            if missing:
                raise ShardUnavailableError(
                    f"no shard of {format_ranks(missing)} started; what that rank raises, and its "
                    "shard's log, say why",
                    shard_index=missing[0],
                )
        except BaseException:
            self._stop()
            raise

    @property
    def target(self) -> str:
        """The addresses for `shardwell.connect`, in order; all ranks have them alike."""
        return ",".join(self._addresses)

    @property
    def addresses(self) -> list[str]:
        """The HOST:PORT of each shard, by rank."""
        return list(self._addresses)

    @property
    def cluster_id(self) -> str:
        """The cluster's name."""
        return self._cluster_id

    def close(self) -> None:
        """Waits until all ranks have called it, and stops this rank's shard. Safe to repeat.

        Blocks. In a process that was forked from the one that made it, it does nothing.

        Raises:
            WorkersMissingError: others did not within an hour; this rank's shard is stopped.
            WorkerLostError, ClosedError: as from `Group.barrier`; the same.
        """
        if self._supervisor.stop_s is not None or not self._owner.is_here:
            return
        try:
            self._group.barrier(timeout_s=_CLOSE_TIMEOUT_S)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """Closes the cluster; after an error, for which the others do not wait, at once."""
        if error is None or (isinstance(error, SystemExit) and not error.code):  # sys.exit()
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        if self._owner.is_here:
            self._supervisor.close()


def _said_by_all(group: Group, text: str) -> list[str]:
    """Returns each rank's text, whose bytes travel as whole numbers."""
    said = np.zeros((group.size, ADDRESS_LENGTH_MAX), np.float32)
    own = np.frombuffer(text.encode(), np.uint8)
    said[group.rank, : own.size] = own
    group.all_gather(said, codec="fp32", timeout_s=_SAYING_TIMEOUT_S)
    return [row.astype(np.uint8).tobytes().rstrip(b"\0").decode() for row in said]

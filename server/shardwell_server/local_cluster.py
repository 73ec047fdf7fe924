"""A whole cluster on this machine, for tests, notebooks, benchmarks and the demo.

    with LocalCluster(shard_count=2) as cluster:
        with shardwell.connect(cluster.target) as client:
            ...

Real servers on real ports either way: in this process (fast to start, easy to debug), or each in a
process of its own (`processes=True`), as a deployment has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from shardwell.connection.tls import Tls
from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.process.connected import Closing, OwnerProcess
from shardwell.process.html_table import Link, html_table
from shardwell.process.local_paths import local_path
from shardwell_server.config import LOCAL_SHARD_COUNT_MAX, Durability, Limits, ShardConfig
from shardwell_server.processes import signals
from shardwell_server.processes.shard import STOP_MARGIN_S, ShardProcess
from shardwell_server.processes.supervise import Supervisor
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir, kept_cluster_id, kept_shard_count

_FREED_S = 5.0
"""A killed command's shard may hold its port so long."""
_LOOK_INTERVAL_S = 0.05


class LocalCluster(Closing):
    """A cluster on 127.0.0.1 and free ports. A context manager that leaves nothing behind.

    Args:
        shard_count: Number of shards, 1 to 64.
        data_dir: Where each shard gets a directory `shard-I`, which it goes on from when there is
            one; None: all is in memory.
        processes: Each shard in a process of its own, which can be killed; else in this one.
        addresses: HOST:PORT of each shard, in processes of their own; None: free ports.
        cluster_id: Default: that of data_dir, else a random one, so that no two clusters can be
            mixed up.
        durability: "process", "step" or a number of seconds; see Durability.
        chunk_size_bytes: See ShardConfig.
        grace_s: See ShardConfig.
        session_lease_s: See ShardConfig.
        same_host: See ShardConfig.
        tls: See ShardConfig; its certificate must name 127.0.0.1.
        connection_age_s: See ShardConfig.
        tokens: See ShardConfig.
        jwt_keys: See ShardConfig.
        same_token: See ShardConfig.
        audit_dir: Where each shard writes its audit log, `shard-I.jsonl`; None: nowhere.
        contribution_dir: Where each shard writes its contribution log, `shard-I.jsonl`; None:
            nowhere.
        admin_listen: HOST:PORT of shard 0's admin port; the others' are on the ports after it, and
            port 0 takes free ones. Empty: there are none.
        limits: See Limits; shards in this process only.
        log_level: The least that shards in processes of their own log, to stderr.

    Raises:
        ArgumentError: an argument can't be used.
        ShardUnavailableError: a shard did not start.
        StorageError: a shard in this process can't go on from its directory.

    Examples:
        >>> with shardwell_server.LocalCluster(2) as cluster:
        ...     with shardwell.connect(cluster.target, worker_id="w0") as client:
        ...         client.shard_count
        2
    """

    def __init__(
        self,
        shard_count: int = 2,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        processes: bool = False,
        addresses: Sequence[str] | None = None,
        cluster_id: str | None = None,
        durability: str = "process",
        chunk_size_bytes: int = 2**20,
        grace_s: float = 2.0,
        session_lease_s: float = 30.0,
        same_host: str = "auto",
        tls: Tls | None = None,
        connection_age_s: float = 3600.0,
        tokens: str | os.PathLike[str] | None = None,
        jwt_keys: str | os.PathLike[str] | None = None,
        same_token: str | os.PathLike[str] | None = None,
        audit_dir: str | os.PathLike[str] | None = None,
        contribution_dir: str | os.PathLike[str] | None = None,
        admin_listen: str = "",
        limits: Limits | None = None,
        log_level: str = "error",
    ) -> None:
        shard_count = check_integer("shard_count", shard_count, 1, LOCAL_SHARD_COUNT_MAX)
        if processes and limits is not None:
            raise ArgumentError("limits apply to shards in this process; use processes=False")
        self._listens = addresses or ["127.0.0.1:0"] * shard_count
        if len(self._listens) != shard_count:
            raise ArgumentError(f"got {len(self._listens)} addresses for {shard_count} shards")
        self._owner = OwnerProcess("cluster")
        audit_dir, contribution_dir = _log_dir(audit_dir), _log_dir(contribution_dir)
        Durability(durability).check_files(data_dir is not None)
        self._data_dir = None if data_dir is None else local_path(data_dir)
        self._check_shard_count(shard_count)
        self._log_level = log_level
        self._cluster_id = cluster_id or self._kept_cluster_id() or f"local-{uuid.uuid4().hex[:12]}"
        self._configs = [
            ShardConfig(
                shard_index=index,
                shard_count=shard_count,
                cluster_id=self._cluster_id,
                chunk_size_bytes=chunk_size_bytes,
                grace_s=grace_s,
                session_lease_s=session_lease_s,
                same_host=same_host,
                tls=tls,
                connection_age_s=connection_age_s,
                tokens=None if tokens is None else local_path(tokens),
                jwt_keys=None if jwt_keys is None else local_path(jwt_keys),
                same_token=None if same_token is None else Path(same_token),
                audit_log=None if audit_dir is None else audit_dir / f"shard-{index}.jsonl",
                contribution_log=(
                    None if contribution_dir is None else contribution_dir / f"shard-{index}.jsonl"
                ),
                admin_listen=_port_after(admin_listen, index),
                durability=Durability(durability),
                limits=limits or Limits(),
            )
            for index in range(shard_count)
        ]
        self.supervisor: Supervisor[ShardProcess] = Supervisor(grace_s + STOP_MARGIN_S)
        """With processes: the places of the shards, by index."""
        self.servers: list[ShardServer] = []
        """Without: the shards, by index."""
        self.admin_urls: list[str] = []
        """With admin_listen: the status page of each shard."""
        self._stack = contextlib.ExitStack()
        self._addresses: list[str] = []
        try:
            if processes:
                self._start_children()
            else:
                self._start_servers()
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """The addresses for `shardwell.connect`, in order."""
        return ",".join(self._addresses)

    def __repr__(self) -> str:
        return f"LocalCluster({self.cluster_id!r}, {len(self._configs)} shards, {self.target})"

    def _repr_html_(self) -> str:
        pages: list[object] = [Link("status page", url) for url in self.admin_urls]
        pages = pages or [""] * len(self._addresses)
        rows = [(*row, page) for row, page in zip(enumerate(self._addresses), pages, strict=True)]
        return html_table(f"cluster {self.cluster_id}", ("shard", "address", ""), rows)

    @property
    def dashboard_link(self) -> str:
        """The status page of the whole cluster, to be opened in a browser.

        Raises:
            ArgumentError: the cluster was started without `admin_listen`.
        """
        if not self.admin_urls:
            raise ArgumentError(
                "this cluster has no status page; start it as LocalCluster(..., "
                "admin_listen='127.0.0.1:0')"
            )
        return self.admin_urls[0]

    @property
    def children(self) -> list[ShardProcess]:
        """The shards, by index, of a cluster with processes."""
        return [place.process for place in self.supervisor.places]

    @property
    def addresses(self) -> list[str]:
        """The HOST:PORT of each shard, by index."""
        return list(self._addresses)

    @property
    def cluster_id(self) -> str:
        """The cluster's name."""
        return self._cluster_id

    def close(self) -> None:
        """Stops all shards and waits for their end. Safe to repeat.

        In a process that was forked from the one that started them, it does nothing.
        """
        if self._owner.is_here:
            try:
                self.supervisor.close()
            finally:
                self._stack.close()

    def _start_servers(self) -> None:
        for config in self._configs:
            claimed = None
            if self._data_dir is not None:
                claimed = DataDir(self._shard_dir(self._data_dir, config.shard_index), config)
                self._stack.enter_context(claimed)
            server = ShardServer(config, claimed)
            self.servers.append(server)
            self._stack.callback(server.stop)
            server.start()
            self._addresses.append(server.address)
        admins = [server.admin for server in self.servers if server.admin is not None]
        for admin in admins:
            admin.know_cluster(self._addresses)
        self.admin_urls.extend(admin.url for admin in admins)

    def start_again(self, shard_index: int) -> None:
        """Starts a shard whose process has ended, on its address; blocks until it serves.

        With processes and a data_dir, it goes on where it was.
        """
        self.begin_start(shard_index)
        self.children[shard_index].await_address()

    def begin_start(self, shard_index: int) -> None:
        """Starts a shard, as `start_again`, without waiting: see `begins_to_serve`."""
        self._owner.check()
        place = self.supervisor.places[shard_index]
        if place.process.poll() is None:
            raise ArgumentError(f"shard {shard_index} is running")
        with signals.held():
            place.begin()

    def begins_to_serve(self, shard_index: int) -> bool:
        """True if a shard whose start was begun serves now."""
        return self.children[shard_index].is_ready()

    def _start_children(self) -> None:
        listens = [
            self._stack.enter_context(_kept_address(index, listen))
            for index, listen in enumerate(self._listens)
        ]
        for index, config in enumerate(self._configs):
            if config.admin_listen:
                scheme = "http" if config.tls is None else "https"
                if config.admin_listen.endswith(":0"):
                    free = self._stack.enter_context(_kept_address(index))
                    config = dataclasses.replace(config, admin_listen=free)
                is_known = not any(listen.endswith(":0") for listen in listens)
                self._configs[index] = dataclasses.replace(
                    config, cluster=tuple(listens) if is_known else ()
                )
                self.admin_urls.append(f"{scheme}://{config.admin_listen}/")
        self._addresses.extend(listens)
        for index in range(len(self._configs)):
            with signals.held():
                self.supervisor.add(partial(self._started, index))
        self._addresses[:] = [child.await_address() for child in self.children]

    def _started(self, index: int, _restart_count: int) -> ShardProcess:
        for ended in self.children[index : index + 1]:
            ended.close(0.0)  # its pipes
        return ShardProcess(
            dataclasses.replace(self._configs[index], listen=self._addresses[index]),
            self._data_dir and self._shard_dir(self._data_dir, index),
            log_level=self._log_level,
        )

    def _check_shard_count(self, shard_count: int) -> None:
        kept = None if self._data_dir is None else kept_shard_count(self._data_dir)
        if kept is not None and kept != shard_count:
            path = shlex.quote(str(self._data_dir))
            raise ArgumentError(
                f"{self._data_dir} has the files of {kept} shards; got shard_count={shard_count}. "
                f"For another number, restore a checkpoint into a new directory: `shardwell "
                f"cluster --shard-count {kept} --data-dir {path}`, `shardwell checkpoint save "
                f"moved`, stop it; `shardwell cluster --shard-count {shard_count} --data-dir "
                f"{path}-{shard_count}`, `shardwell checkpoint restore moved`"
            )

    @staticmethod
    def _shard_dir(data_dir: Path, shard_index: int) -> Path:
        return data_dir / f"shard-{shard_index}"

    def _kept_cluster_id(self) -> str | None:
        if self._data_dir is None:
            return None
        return kept_cluster_id(self._shard_dir(self._data_dir, 0))


def _log_dir(given: str | os.PathLike[str] | None) -> Path | None:
    if given is None:
        return None
    path = local_path(given)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _port_after(address: str, index: int) -> str:
    host, _, port = address.rpartition(":")
    is_fixed = port.isdecimal() and int(port) > 0
    return f"{host}:{int(port) + index}" if is_fixed else address


@contextlib.contextmanager
def _kept_address(index: int, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """Keeps an address free for a shard; ArgumentError: another program has it.

    While a shard is dead, the system might give its port to an outgoing connection, even to that of
    a client that tries to reach it. It does not where a socket that listens to nothing is bound.
    """
    with socket.socket() as keeper:
        if sys.platform != "linux":  # elsewhere no other socket can be bound beside it
            yield listen
            return
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, _, port = listen.rpartition(":")
        deadline_s = time.monotonic() + _FREED_S
        while True:
            try:
                keeper.bind((host, int(port)))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                    raise ArgumentError(
                        f"shard {index} can't listen on {listen}: {error.strerror}; end the "
                        f"program that does (`ss -ltnp 'sport = :{port}'` shows it), or remove "
                        "cluster.json in the data directory, and shards take free ports"
                    ) from None
                time.sleep(_LOOK_INTERVAL_S)
        yield f"{host}:{keeper.getsockname()[1]}"

"""A shard's settings at start, and every limit it keeps, by name. Checked when made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from shardwell.connection.credentials import INSECURE_VARIABLE, is_loopback
from shardwell.connection.tls import Tls
from shardwell.errors import ArgumentError
from shardwell.numerics.arguments import check_integer
from shardwell.specs.deadlines import TIMEOUT_S_MIN, check_duration
from shardwell.specs.names import check_name
from shardwell.threads.spread import thread_count

LOCAL_SHARD_COUNT_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of one shard; going over one is a `LimitError` that names it.

    Examples:
        >>> limits = shardwell_server.Limits(parameter_count_max=16)
        >>> limits.parameter_count_max
        16
    """

    parameter_count_max: int = 4096
    """Parameters. Each costs 20 to 55 KB of bookkeeping beside its values, and with files six
    mappings, of which Linux gives a process 65,530."""
    table_count_max: int = 256
    """Tables. Each has address space for all rows that it may get."""
    table_row_count_max: int = 2**28
    """Rows that exist of one table on this shard. A table keeps what it was made with as its
    capacity; so a higher limit is for tables to come."""
    stored_bytes_max: int = 2**40
    """Bytes of weights, sums and optimizer state of parameters, and with int8 of their images and
    the last three changes of these; the same, and keys, counts and checks, of rows for which there
    is room; of the states that workers keep beside the weights; and, where there is a data
    directory, of the undo file that each table has, 8 MiB or less.

    Not counted, so set it below the machine's memory, and with a data directory below the disk's
    size: in memory, tables' indexes (4 bytes for each row that there can be here up to 2^26 of
    them, else 27 to 54 for each that exists), two batches of a message's rows a table, encoded
    chunks, and, of synchronous parameters, in memory or on disk, the weights of the version before,
    encoded (2 bytes an element with fp16); on disk, undo (of 4 chunks at most), records and marks
    of parameters, events, what `durability` journals, and copies that snapshots keep meanwhile."""
    worker_count_max: int = 4096
    """Workers that have a seat in one parameter or table. Those that only read take none of it; as
    many that are connected are known by name. Asynchronous mode: when all are taken, a newcomer is
    given that of a worker which has ended or was away for `session_lease_s`; so make it larger than
    the number of ids that come while a worker may be away and still has to be recognised."""
    session_count_max: int = 4096
    """Clients connected at once. Each is one connection, without a thread."""
    stream_count_max: int = 1024
    """Streams open at once. A worker keeps as many as it made calls at a time, at most 4 for its
    parameters and 4 for its tables. Idle ones give way to others."""
    answer_bytes_max: int = 2**28
    """Bytes of answers that wait for their readers. Beyond it calls wait, and are refused after a
    while; how much a connection takes besides is up to gRPC."""
    arena_bytes_max: int = 2**33
    """Bytes of memory that clients on this machine share with the shard, for payloads; each stream
    has as much as a step of its worker takes here, at most 256 MiB. Beyond it payloads come over
    the network."""
    encoded_chunk_count_max: int = 16
    """Encoded chunks of weights kept a parameter, so that workers in step share one encoding."""
    wait_max_s: float = 3600.0
    """The longest that a call may wait for other workers, whatever timeout it asks for."""
    init_claim_s: float = 60.0
    """How long a client may take to send first weights before another may take over."""
    abandoned_after_s: float = 600.0
    """How long no worker of a parameter or table may be connected, though not all left in order,
    before it counts as abandoned: from then on status, metrics and alerts do not count it as
    waiting. It goes on when one comes back. A restart of all workers takes less."""
    snapshot_count_max: int = 4
    """Snapshots of one parameter under way at once; each may copy the slice to the disk."""
    learning_rate_change_count_max: int = 64
    """Changes of a learning rate that are scheduled for steps to come."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            what, value = f"limit {entry.name}", getattr(self, entry.name)
            if entry.name.endswith("_s"):
                check_duration(what, value, TIMEOUT_S_MIN)
            else:
                check_integer(what, value, 1, 2**63 - 1)


@dataclass(frozen=True)
class Durability:
    """The losses that an acknowledged gradient survives, where a data directory exists.

    "process" (default): the death of the shard's process. "step": also a loss of power, because it
    is acknowledged when it is on disk. A number of seconds: also a loss of power, except the last
    so many seconds.
    """

    setting: str = "process"

    def __post_init__(self) -> None:
        if self.setting not in ("process", "step") and self.interval_s is None:
            raise ArgumentError(
                'durability must be "process", "step" or a number of seconds from 0.01 to 86400; '
                f"got {self.setting!r}"
            )

    def check_files(self, has_files: bool) -> None:
        """Refuses to survive a loss of power without files."""
        if not (has_files or self.is_process):
            raise ArgumentError(
                f"durability {self.setting!r} needs a data directory: without files nothing "
                "survives the shard's process; give --data-dir (data_dir=), or leave durability out"
            )

    @property
    def is_process(self) -> bool:
        """True if nothing need be written to disk at any time."""
        return self.setting == "process"

    @property
    def is_step(self) -> bool:
        """True if acknowledgements wait for the disk."""
        return self.setting == "step"

    @property
    def interval_s(self) -> float | None:
        """The seconds between writes to disk; None for the other settings."""
        try:
            seconds = float(self.setting)
        except ValueError:
            return None
        return seconds if 0.01 <= seconds <= 86400 else None


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """One shard's place in its cluster, and how it serves.

    Examples:
        >>> where = {"shard_index": 0, "shard_count": 1, "listen": "127.0.0.1:0"}
        >>> config = shardwell_server.ShardConfig(**where)
        >>> config.cluster_id
        'shardwell'
    """

    shard_index: int
    """0-based place in the cluster's fixed order."""
    shard_count: int
    """Shards of the cluster."""
    cluster_id: str = "shardwell"
    """The cluster's name: the same on all its shards, and on no other cluster's."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one. The default is reachable from this machine only."""
    chunk_size_bytes: int = 2**20
    """Encoded size of a chunk's values, down to whole blocks: a multiple of 64, at most 1 MiB."""
    grace_s: float = 5.0
    """How long streams may go on after SIGTERM."""
    session_lease_s: float = 30.0
    """After how long a client whose machine vanished counts as gone, from 1 to 86400 s; then
    another process may contribute under its worker id. Connections that end are noticed at
    once."""
    durability: Durability = Durability()
    """What an acknowledged gradient survives beside the process."""
    threads: int | None = None
    """Threads that work on one stream's chunks at once, from 1 to 256, and on those of several
    streams together; sums and weights have the same bits with any number. None: as
    $SHARDWELL_THREADS says, else half as many as cores, up to 8."""
    same_host: str = "auto"
    """Whether payloads of clients on this machine go through memory that they share with the shard:
    "auto": where it can be had, by an abstract Unix socket; "off"; or a directory for the socket,
    which containers of the machine have in common. Always between processes of one user alone."""
    tls: Tls | None = None
    """What it proves itself with, and, with `ca`, whose clients it takes; None: no TLS, so that
    anyone who shares the network reads and changes what passes."""
    connection_age_s: float = 3600.0
    """After how long a connection over TLS is replaced by another one, from 1 to 86400 s, so that
    certificates that were replaced have an end; calls that are under way then have half a minute
    to end, and are made again by their client where they do not."""
    tokens: Path | None = None
    """File of tokens, of which each call must bring one, and what each may do; read again when it
    changes. None: with `jwt_keys` neither, calls need no token, and all may do everything."""
    jwt_keys: Path | None = None
    """File of keys, a JSON Web Key Set, whose JWTs are taken as tokens, too; read again when it
    changes."""
    same_token: Path | None = None
    """File of one token with which calls may do everything: that of the workers beside which the
    shard runs."""
    insecure: bool = False
    """Listen where other machines reach it without TLS or without tokens: these may do
    everything, then, or read and change what passes."""
    audit_log: Path | None = None
    """File of the audit log: who opened, made, restored or removed what, and who was refused."""
    contribution_log: Path | None = None
    """File to which a line of JSON is added for each chunk whose step closes, where steps may close
    without a worker: who contributed, in the order of the sum. A line is about 150 bytes."""
    admin_listen: str = ""
    """HOST:PORT for probes, metrics and the status page, over HTTP, or HTTPS with `tls`; port 0
    takes a free one; empty: none. All but probes need a token there, as calls do."""
    cluster: tuple[str, ...] = ()
    """HOST:PORT of all shards, in order, for the status page; empty: it shows this shard alone."""
    worker_metrics: bool = True
    """Metrics of each worker by its name, which is a time series each: too many where workers come
    and go by the thousand."""
    reflection: bool = False
    """Answer gRPC reflection, for tools such as grpcurl."""
    limits: Limits = field(default_factory=Limits)
    """What clients may take of it."""

    def __post_init__(self) -> None:
        check_name("cluster_id", self.cluster_id)
        thread_count(self.threads)
        if self.shard_count < 1 or not 0 <= self.shard_index < self.shard_count:
            raise ArgumentError(
                "shard_index must be from 0 to shard_count - 1; got "
                f"shard_index={self.shard_index}, shard_count={self.shard_count}"
            )
        if not 64 <= self.chunk_size_bytes <= 2**20 or self.chunk_size_bytes % 64:
            raise ArgumentError(
                "chunk_size_bytes must be a multiple of 64 from 64 to 1048576; "
                f"got {self.chunk_size_bytes}"
            )
        if not self.same_host or "\0" in self.same_host:
            raise ArgumentError(
                f'same_host must be "auto", "off" or a directory; got {self.same_host!r}'
            )
        _check_address("listen", self.listen)
        self._check_closed(self.listen)
        if self.admin_listen:
            _check_address("admin_listen", self.admin_listen)
            self._check_closed(self.admin_listen)
        if self.cluster and len(self.cluster) != self.shard_count:
            raise ArgumentError(
                f"cluster (--cluster, $SHARDWELL_SHARDS) must have the addresses of all "
                f"{self.shard_count} shards; got {', '.join(self.cluster)}; unset it where it is "
                "another cluster's"
            )
        check_duration("session_lease_s", self.session_lease_s, 1, 86400)
        check_duration("grace_s", self.grace_s)
        check_duration("connection_age_s", self.connection_age_s, 1, 86400)

    @property
    def asks_for_tokens(self) -> bool:
        """Returns True if each call must bring one."""
        return any(each is not None for each in (self.tokens, self.jwt_keys, self.same_token))

    def _check_closed(self, listen: str) -> None:
        """Refuses to be open to other machines, unless `insecure` is set."""
        if self.insecure or is_loopback(listen) or (self.tls and self.asks_for_tokens):
            return
        lacks = " and no ".join(
            what
            for what, is_there in (
                ("TLS (--tls-cert, --tls-key)", self.tls is not None),
                ("tokens (--tokens)", self.asks_for_tokens),
            )
            if not is_there
        )
        host = listen.rpartition(":")[0].strip("[]")
        name = "HOST" if host in ("0.0.0.0", "::") else host
        raise ArgumentError(
            f"{listen} can be reached from other machines, and there is no {lacks}. In three "
            f"commands:\n"
            f"  shardwell certs certs --host {name}\n"
            f"  shardwell token create workers --right create --tokens certs/tokens.json\n"
            f"  shardwell serve ... --tls-cert certs/server.pem --tls-key certs/server.key "
            f"--tls-client-ca certs/ca.pem --tokens certs/tokens.json\n"
            f"Or --insecure (${INSECURE_VARIABLE}=1), where that network is yours alone; or "
            "listen on 127.0.0.1"
        )


def _check_address(what: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 2**16):
        raise ArgumentError(f"{what} must be HOST:PORT; got {address!r}")

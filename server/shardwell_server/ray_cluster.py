"""A cluster of Ray's: each shard is an actor, which Ray places, and starts again when it is lost.

with shardwell.ray.start_shards(2, data_dir="/shared/run-7") as cluster:
    ...  # in a worker, wherever Ray runs it: shardwell.connect(cluster.target, worker_id="w0")

A shard lives in its actor's own process: it ends with it, and there is never one without the other.
Each has a bundle of one placement group, so that Ray starts it again on its node as long as that
lives, and elsewhere when it does not. The states of a shard, and of the cluster that has lost what
one held, are in docs/adr/0022-ray.md. One more actor, the coordinator, says where the shards are;
it alone decides that the cluster goes back to a checkpoint, and it remembers nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from fastcrc import crc32
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardwell.checkpoint.steps import StepPaths, is_there
from shardwell.checkpoint.stores import place_of
from shardwell.client import connect
from shardwell.connection.credentials import is_loopback
from shardwell.connection.tls import Tls
from shardwell.errors import (
    ArgumentError,
    DeadlineError,
    ShardUnavailableError,
    ShardwellError,
    StorageError,
)
from shardwell.numerics.arguments import check_integer
from shardwell.process.connected import Closing, OwnerProcess
from shardwell.process.local_paths import local_path
from shardwell.specs.deadlines import check_timeout
from shardwell.specs.names import SHARD_COUNT_MAX
from shardwell_server.config import Durability, Limits, ShardConfig
from shardwell_server.logs import configure_logs
from shardwell_server.processes.own import become_shard
from shardwell_server.server import ShardServer
from shardwell_server.store.files.data_dir import DataDir, DataDirInUseError, kept_cluster_id

_NAMESPACE = "shardwell"
_PathArgument = str | os.PathLike[str]
_PORT_MIN, _PORT_COUNT = 20000, 10000
"""The range of drawn ports: above those of Ray's own workers, and below those that systems give to
outgoing connections, which might take a shard's while it is away."""
_PORT_WAIT_S = 5.0
_PORT_TRY_COUNT = 64
_CLAIM_WAIT_S = 60.0
"""A shard's wait for its directory: Ray ends the processes of a lost node within seconds."""
_POLL_S = 0.2
_STOP_MARGIN_S = 15.0
"""The time beyond the grace to stop in order; then by force, after which files are as good."""
_JOINED_NAME = "joined"
"""A file in a shard's directory: the shard was in the cluster, and has its state."""


@dataclass(frozen=True, kw_only=True)
class _ShardState:
    process: str
    address: str
    life: int
    """One more than the cluster's returns to a checkpoint."""
    is_admitted: bool
    """True if this process was counted in, so that it serves what workers gave it."""
    has_joined: bool
    """True if it has all that it ever held: this process or its directory has been counted in."""
    holds_something: bool


class _ShardActor:
    """One shard, in the process of its actor. The coordinator and `RayCluster` call it.

    Faults that keep it from serving, such as a damaged file, are raised by `state`: the actor lives
    on, as another start would not help.
    """

    def __init__(
        self, config: ShardConfig, data_dir: Path | None, port: int, log_level: str
    ) -> None:
        configure_logs(log_level, shard_index=config.shard_index)
        become_shard()
        self._config = config
        self._port = port
        self._process = uuid.uuid4().hex
        self._life = 1
        self._is_admitted = False
        self._claimed: DataDir | None = None
        self._server: ShardServer | None = None
        self._failure: ShardwellError | None = None
        try:
            if data_dir is not None:
                self._claimed = _claimed(data_dir, config)
            self._serve()
        except ShardwellError as error:
            self._failure = error

    def state(self) -> _ShardState:
        if self._failure is not None:
            raise self._failure
        assert self._server is not None
        shard = self._server.shard
        joined = self._joined_file()
        return _ShardState(
            process=self._process,
            address=self._server.address,
            life=self._life,
            is_admitted=self._is_admitted,
            has_joined=self._is_admitted or (joined is not None and joined.exists()),
            holds_something=bool(shard.parameters.all() or shard.tables.all()),
        )

    def admit(self, process: str) -> bool:
        if process != self._process:
            return False
        joined = self._joined_file()
        if joined is not None:
            joined.touch()
        self._is_admitted = True
        return True

    def begin_anew(self, life: int) -> None:
        """Serves a cluster of another id, without parameters and tables; for shards in memory."""
        assert self._claimed is None
        self._is_admitted = False
        self._stop(0.0)
        self._life = life
        self._serve()

    def stop(self) -> None:
        self._stop(None)
        if self._claimed is not None:
            self._claimed.close()

    def _stop(self, grace_s: float | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(grace_s)

    def _serve(self) -> None:
        host = _bracketed(ray.util.get_node_ip_address())
        suffix = "" if self._life == 1 else f"-{self._life}"
        config = dataclasses.replace(
            self._config,
            cluster_id=f"{self._config.cluster_id}{suffix}",
            listen=f"{host}:{self._free_port(host)}",
        )
        self._server = ShardServer(config, self._claimed)
        self._server.start()

    def _free_port(self, host: str) -> int:
        config = self._config
        if self._port:
            return self._port + config.shard_index
        drawn = crc32.iscsi(config.cluster_id.encode())
        for number in range(_PORT_TRY_COUNT):
            place = drawn + number * config.shard_count + config.shard_index
            port = _PORT_MIN + place % _PORT_COUNT
            if _is_free(host, port, _PORT_WAIT_S if number == 0 else 0.0):
                return port
        return 0

    def _joined_file(self) -> Path | None:
        return None if self._claimed is None else self._claimed.path / _JOINED_NAME


class _Coordinator:
    """Says where the shards are, once they belong together; it may be lost at any time."""

    def __init__(self, names: Sequence[str], checkpoint: str | None) -> None:
        # Handles as arguments would be kept in the memory of a node, with which they are lost.
        self._shards = [ray.get_actor(name, namespace=_NAMESPACE) for name in names]
        self._checkpoint = checkpoint

    def addresses(self, timeout_s: float) -> list[str]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            states = self._states(deadline_s)
            if not all(state.is_admitted for state in states):
                states = self._made_whole(states, deadline_s)
            if all(self._each("admit", deadline_s, [(state.process,) for state in states])):
                return [state.address for state in states]

    def _states(self, deadline_s: float) -> list[_ShardState]:
        return self._each("state", deadline_s, [()] * len(self._shards))

    def _made_whole(self, states: list[_ShardState], deadline_s: float) -> list[_ShardState]:
        is_anything_held = any(state.holds_something for state in states)
        lost = [index for index, state in enumerate(states) if not state.has_joined]
        if self._checkpoint is None:
            if lost and is_anything_held:
                raise StorageError(
                    f"shard {lost[0]} at {states[lost[0]].address} was started again and found "
                    "nothing of what it held, while other shards have theirs; give a data_dir that "
                    "all nodes reach, or a checkpoint, and start the shards anew",
                    shard_index=lost[0],
                )
            return states
        lives = {state.life for state in states}
        if is_anything_held or len(lives) > 1:
            self._each("begin_anew", deadline_s, [(max(lives) + 1,)] * len(states))
            states = self._states(deadline_s)
        if is_there(self._checkpoint):
            target = ",".join(state.address for state in states)
            rest_s = max(deadline_s - time.monotonic(), 1.0)
            with connect(target, timeout_s=rest_s, connect_timeout_s=rest_s) as client:
                client.restore_checkpoint(self._checkpoint)
        return states

    def _each(
        self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        return [
            _answer(
                partial(getattr(shard, method).remote, *given),
                deadline_s,
                f"shard {index}",
                shard_index=index,
            )
            for index, (shard, given) in enumerate(zip(self._shards, arguments, strict=True))
        ]


class RayCluster(Closing):
    """A cluster that `shardwell.ray.start_shards` made. A context manager, which stops all shards.

    It may be sent to Ray's tasks, actors and Train's workers, by `train_loop_config` for example:
    there it says where the shards are, and `close` does nothing.

    Examples:
        >>> def train_on_ray(train):
        ...     with shardwell.ray.start_shards(2, data_dir="/shared/run-7") as cluster:
        ...         TorchTrainer(train, train_loop_config={"target": cluster.target}).fit()
    """

    def __init__(
        self,
        shards: Sequence[Any],
        coordinator: Any,
        group: PlacementGroup,
        *,
        cluster_id: str,
        grace_s: float,
        timeout_s: float,
    ) -> None:
        self._owner: OwnerProcess | None = OwnerProcess("cluster")
        self._shards = shards
        self._coordinator = coordinator
        self._group = group
        self._cluster_id = cluster_id
        self._grace_s = grace_s
        self._timeout_s = timeout_s

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}

    def __repr__(self) -> str:
        return f"RayCluster({self._cluster_id!r}, {len(self._shards)} shards)"

    @property
    def target(self) -> str:
        """The addresses for `shardwell.connect`, as they are now, in order.

        Asks the shards, and waits for those that are being started again. A shard that lost its
        node has another address afterwards: ask again where a call has failed with
        ShardUnavailableError. Where `checkpoint` was given and a shard has lost what it held, all
        shards have gone back to the checkpoint when this returns.

        Raises:
            ShardUnavailableError: a shard was not there within `timeout_s`.
            StorageError: a shard has lost what it held, and there is no checkpoint, or a shard
                can't use its directory.
            ShardwellError: what else keeps a shard from serving, or the restore has met.
        """
        return ",".join(self.addresses)

    @property
    def addresses(self) -> list[str]:
        """The HOST:PORT of each shard, by index; as `target`."""
        return self._await_addresses(self._timeout_s)

    def _await_addresses(self, timeout_s: float) -> list[str]:
        found: list[str] = _answer(
            lambda: self._coordinator.addresses.remote(timeout_s),
            # The coordinator names the shard, if it may.
            time.monotonic() + timeout_s + _STOP_MARGIN_S,
            "the coordinator of the shards",
        )
        return found

    def close(self) -> None:
        """Stops all shards, and waits until steps that are under way have ended. Safe to repeat.

        Where the cluster was sent to, and in a process that was forked from the one that started
        it, it does nothing.
        """
        owner, self._owner = self._owner, None
        if owner is None or not owner.is_here or not ray.is_initialized():
            return
        ray.kill(self._coordinator)
        try:
            stopped = [shard.stop.remote() for shard in self._shards]
            with contextlib.suppress(RayError):  # what has not stopped by then is ended
                ray.get(stopped, timeout=self._grace_s + _STOP_MARGIN_S)
        finally:
            for shard in self._shards:
                ray.kill(shard)
            remove_placement_group(self._group)


def start_shards(
    count: int,
    *,
    data_dir: _PathArgument | None = None,
    checkpoint: _PathArgument | None = None,
    num_cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    port: int = 0,
    cluster_id: str | None = None,
    timeout_s: float = 120.0,
    durability: str = "process",
    tls: Tls | None = None,
    tokens: _PathArgument | None = None,
    jwt_keys: _PathArgument | None = None,
    insecure: bool = False,
    chunk_size_bytes: int = 2**20,
    grace_s: float = 5.0,
    session_lease_s: float = 30.0,
    limits: Limits | None = None,
    log_level: str = "warning",
) -> RayCluster:
    """Starts shards as Ray's actors, spread over its nodes; blocks until all serve.

    A shard whose process dies is started again by Ray, on its node and address: workers wait for it
    within their calls' deadline. One whose node is lost is started on another, if there is room, at
    another address: workers ask `target` again. With `data_dir` it goes on where it was, if the
    directory can be reached from there; with `checkpoint` all shards go back to the newest one, as
    soon as a program asks `target`; with neither a loss is an error, and ends the training.

    Shards end with the `with` block, or with the process that started them. Paths are those of the
    nodes: all of them must have the files.

    Args:
        count: Shards of the cluster.
        data_dir: Where each shard has a directory `shard-I`, which it goes on from when there is
            one. On a file system that all nodes share, a shard survives its node. None: all is in
            memory.
        checkpoint: A checkpoint's directory on such a file system, "runs/{step}" for the newest:
            what shards in memory begin with, if it exists, and go back to when one is lost. Not
            together with `data_dir`.
        num_cpus: CPUs that Ray sets aside for each shard. 1: a shard adds and updates in native
            code, which one core does at several GB/s, faster than most networks bring it.
        resources: What else of Ray's a shard's node must have, {"shards": 1} for example.
        port: Shard i listens on `port` + i, for firewalls. 0: ports from 20000 to 29999, drawn from
            the cluster's id. A shard that is started again takes the same.
        cluster_id: Default: that of `data_dir` as seen from here, else a random one.
        timeout_s: How long Ray may take to find room for the shards, and they to start, restored
            from a checkpoint if there is one; later, how long `target` waits for the same.
        durability: "process", "step" or a number of seconds; see Durability.
        tls: What shards prove themselves with; see ShardConfig. Its certificate names the nodes, or
            one name that workers give as `Tls(server_name=)`.
        tokens: See ShardConfig.
        jwt_keys: See ShardConfig.
        insecure: See ShardConfig; without it shards want TLS and tokens where other machines reach
            them.
        chunk_size_bytes: See ShardConfig.
        grace_s: See ShardConfig.
        session_lease_s: See ShardConfig.
        limits: See Limits.
        log_level: The least that shards log, which Ray shows with its workers' output.

    Raises:
        ArgumentError: an argument can't be used.
        DeadlineError: Ray found no room for them in time; says what it has.
        ShardUnavailableError: a shard did not start in time.
        StorageError: a shard can't go on from its directory, or there is no whole checkpoint.

    Examples:
        >>> def train_on_ray(train):
        ...     with shardwell.ray.start_shards(2, data_dir="/shared/run-7") as cluster:
        ...         TorchTrainer(train, train_loop_config={"target": cluster.target}).fit()
    """
    check_integer("count", count, 1, SHARD_COUNT_MAX)
    check_integer("port", port, 0, 2**16 - 1 - count)
    check_timeout(timeout_s)
    if data_dir is not None and checkpoint is not None:
        raise ArgumentError(
            "data_dir and checkpoint are two ways to come back: give data_dir where all nodes "
            "reach it, else checkpoint"
        )
    Durability(durability).check_files(data_dir is not None)
    needs = {"CPU": num_cpus, **(resources or {})}
    bundle = {name: amount for name, amount in needs.items() if amount}
    if not bundle or min(bundle.values()) < 0:
        raise ArgumentError(f"a shard needs num_cpus, or resources, above 0; got {needs}")
    if checkpoint is not None:
        place = place_of(checkpoint)
        StepPaths.of(place)  # or says how `{step}` is meant
        checkpoint = str(place)
    deadline_s = time.monotonic() + timeout_s
    directories = [
        None if data_dir is None else Path(os.path.abspath(local_path(data_dir))) / f"shard-{index}"
        for index in range(count)
    ]
    if cluster_id is None:
        kept = None if directories[0] is None else kept_cluster_id(directories[0])
        cluster_id = kept or f"ray-{secrets.token_hex(6)}"
    configs = [
        ShardConfig(
            shard_index=index,
            shard_count=count,
            cluster_id=cluster_id,
            chunk_size_bytes=chunk_size_bytes,
            grace_s=grace_s,
            session_lease_s=session_lease_s,
            durability=Durability(durability),
            tls=None if tls is None else _absolute_tls(tls),
            tokens=_absolute(tokens),
            jwt_keys=_absolute(jwt_keys),
            insecure=insecure,
            limits=limits or Limits(),
        )
        for index in range(count)
    ]
    if not ray.is_initialized():
        ray.init()
    _check_closed(configs[0])
    group = placement_group([bundle] * count, strategy="SPREAD")
    try:
        if not group.wait(timeout_s):
            raise DeadlineError(
                f"Ray found no room for {count} shards with {bundle} each within {timeout_s:g} s; "
                f"its nodes have {_room()}; add nodes, or give num_cpus= or fewer shards"
            )
        shard_class = ray.remote(_ShardActor)
        own = secrets.token_hex(4)  # two drivers may start clusters of one id
        names = [f"{cluster_id}-{index}-{own}" for index in range(count)]
        shards = [
            shard_class.options(
                name=name,
                namespace=_NAMESPACE,
                num_cpus=num_cpus,
                resources=dict(resources or {}),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=config.shard_index
                ),
            ).remote(config, directory, port, log_level)
            for name, config, directory in zip(names, configs, directories, strict=True)
        ]
        coordinator = (
            ray.remote(_Coordinator).options(num_cpus=0, max_restarts=-1).remote(names, checkpoint)
        )
        cluster = RayCluster(
            shards,
            coordinator,
            group,
            cluster_id=cluster_id,
            grace_s=grace_s,
            timeout_s=timeout_s,
        )
    except BaseException:
        remove_placement_group(group)
        raise
    try:
        cluster._await_addresses(max(deadline_s - time.monotonic(), 1.0))
    except BaseException:
        cluster.close()
        raise
    return cluster


def _answer(
    ask: Callable[[], Any], deadline_s: float, who: str, *, shard_index: int | None = None
) -> Any:
    while True:
        rest_s = deadline_s - time.monotonic()
        try:
            return ray.get(ask(), timeout=max(rest_s, 0.01))
        except RayTaskError as error:
            if isinstance(error.cause, ShardwellError):
                raise error.cause from None
            raise
        except GetTimeoutError:
            raise ShardUnavailableError(
                f"{who} did not answer in time; Ray may have no room to start it again: its nodes "
                f"have {_room()}",
                shard_index=shard_index,
            ) from None
        except ActorUnavailableError:
            if rest_s <= 0:
                raise ShardUnavailableError(
                    f"{who} was not there in time; Ray is starting it again",
                    shard_index=shard_index,
                ) from None
            time.sleep(_POLL_S)
        except RayActorError as error:
            raise ShardUnavailableError(
                f"{who} has ended, and Ray does not start it again: {error}",
                shard_index=shard_index,
            ) from None


def _claimed(path: Path, config: ShardConfig) -> DataDir:
    deadline_s = time.monotonic() + _CLAIM_WAIT_S
    while True:
        try:
            return DataDir(path, config)
        except DataDirInUseError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_POLL_S)


def _is_free(host: str, port: int, patience_s: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
            socket.create_server((host.strip("[]"), port), family=family).close()
        except OSError:
            if time.monotonic() > deadline_s:
                return False
        else:
            return True
        time.sleep(_POLL_S)


def _check_closed(config: ShardConfig) -> None:
    """Refuses an open cluster before anything is started."""
    if config.insecure or (config.tls and config.asks_for_tokens):
        return
    for node in ray.nodes():
        address = f"{_bracketed(node['NodeManagerAddress'])}:0"
        if node["Alive"] and not is_loopback(address):
            raise ArgumentError(
                f"shards on {address.rpartition(':')[0]} can be reached from other machines: give "
                "tls= and tokens=, made by `shardwell certs` and `shardwell token`, or "
                "insecure=True where no others are on that network"
            )


def _room() -> str:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    told = (
        ", ".join(
            f"{amount:g} {name}"
            for name, amount in sorted(each.items())
            if not name.startswith(("node:", "bundle", "memory", "object_store"))
            and "_group_" not in name
        )
        for each in nodes
    )
    free = ray.available_resources().get("CPU", 0.0)
    return f"{'; '.join(told)}; {free:g} CPU of these are free"


def _absolute(path: _PathArgument | None) -> Path | None:
    return None if path is None else Path(os.path.abspath(local_path(path)))


def _absolute_tls(tls: Tls) -> Tls:
    return dataclasses.replace(
        tls, ca=_absolute(tls.ca), cert=_absolute(tls.cert), key=_absolute(tls.key)
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""The meeting of a process group's ranks by torch's store, which may hold what earlier ranks wrote.

Torchrun's agent keeps its store when it starts ranks again, and a `file://` store outlives its
program. So what a rank finds there may be of a process that has ended, and counts only when the
process that wrote it answers:

1. Each rank draws an id and writes `rank/R`: its id and its machine.
2. Rank 0 writes `roster` when every rank has an entry, and again when one has changed: the ids that
   it found, the name of the group, and the address at which the ranks will meet.
3. A rank that finds its own id in the roster writes `agreed/R`: the roster's id.
4. When all ranks have agreed to one roster, rank 0 writes `begun`: the roster's id.

A process that has ended agrees to no roster, so none begins with it. Attempts are not counted: the
agents of two machines may count their restarts differently.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwell.connection.credentials import is_loopback
from shardwell.connection.tls import Tls
from shardwell.errors import (
    ArgumentError,
    RankTakenError,
    ShardUnavailableError,
    ShardwellError,
    WorkersMissingError,
)
from shardwell.group.membership import address_towards
from shardwell.group.rendezvous.client import WaitingNotices
from shardwell.specs.names import check_name, format_ranks, is_address

ResultT = TypeVar("ResultT")
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.005, 0.25
_LOOK = timedelta(milliseconds=20)
"""The wait for a store that can't say whether it has a key."""
_VALUE_LENGTH_MAX = 65536
"""Of what is read from the store; a roster of 256 ranks has 9 KB."""
_LOCALHOST = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation: the system says which of its own it would use; nothing is sent."""
_ANY_PORT = 9
_MEETING_VARIABLE = "MASTER_ADDR"


@dataclass(frozen=True, kw_only=True)
class Met:
    """The agreement of all ranks."""

    name: str
    """Name of the group, which no other attempt has."""
    address: str
    """HOST:PORT where rank 0 serves the meeting place."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place where a rank's process runs."""

    machine: str
    """One value for all processes that share a loopback interface."""
    hosts: tuple[str, ...]
    """Addresses at which other machines may reach it, the likeliest first."""

    @staticmethod
    def here(store: Any) -> Place:
        """Returns this process's place."""
        return Place(machine=_this_machine(), hosts=tuple(_own_hosts(store)))


class StoreMeeting:
    """One rank's way into one group, through torch's store for this process group alone."""

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout_s: float, place: Place | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._place = Place.here(store) if place is None else place
        self._id = uuid.uuid4().hex
        self._roster: dict[str, Any] = {}
        """Rank 0: the one that it has written; other ranks: the last that has their id."""

    def meet(self) -> Met:
        """Blocks until all ranks have agreed on a roster."""
        deadline_s = time.monotonic() + self._timeout_s
        notices, pause_s = WaitingNotices(), _PAUSE_S_MIN
        self._set(f"rank/{self._rank}", {"id": self._id, "machine": self._place.machine})
        while not (self._lead() if self._rank == 0 else self._follow()):
            if self._read(f"rank/{self._rank}").get("id") != self._id:
                raise RankTakenError(
                    f"another process has come as rank {self._rank} of {self._size} to the same "
                    "store of torch.distributed; give each process a rank of its own",
                    rank=self._rank,
                )
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                missing = self._missing()
                raise WorkersMissingError(
                    f"{format_ranks(missing)} of {self._size} did not come to the process group "
                    f"within {self._timeout_s:g} s; start the workers that are missing, or raise "
                    f"timeout= of init_process_group ({_described(self._store)})",
                    missing_ranks=missing,
                    rank=self._rank,
                )
            notices.note(
                lambda: (
                    f"as rank {self._rank} of {self._size} of a process group for "
                    f"{format_ranks(self._missing())} ({_described(self._store)})"
                )
            )
            time.sleep(min(pause_s, remaining_s))
            pause_s = min(1.5 * pause_s, _PAUSE_S_MAX)
        if error := self._roster.get("error"):
            raise ArgumentError(str(error))
        return Met(
            name=check_name("name of a group", self._roster["name"]),
            address=self._roster["address"],
        )

    # Rank 0.

    def _lead(self) -> bool:
        entries = [self._read(f"rank/{rank}") for rank in range(self._size)]
        if not all(entries):
            return False
        ids = [entry.get("id") for entry in entries]
        if self._roster.get("ids") != ids:
            self._roster = {
                "id": uuid.uuid4().hex,
                "ids": ids,
                "name": f"torch-{self._id}",
                **self._address([str(entry.get("machine")) for entry in entries]),
            }
            self._set("roster", self._roster)
            self._set("agreed/0", self._roster["id"])
        if self._disagreeing():
            return False
        self._set("begun", self._roster["id"])
        return True

    def _address(self, machines: Sequence[str]) -> dict[str, str]:
        elsewhere = [rank for rank, one in enumerate(machines) if one != machines[0]]
        hosts = [host for host in self._place.hosts if not _is_loopback(host)]
        if not elsewhere and (Tls.from_environment() is None or not hosts):
            return {"address": _free_address(_LOCALHOST)}
        if hosts:
            return {"address": _free_address(hosts[0])}
        there = ", ".join(self._place.hosts) or "no address"
        return {
            "error": f"rank 0 is on {socket.gethostname()}, and {format_ranks(elsewhere)} on other "
            f"machines, from which it can't be reached: it knows itself by {there} alone; pass "
            f"init_method='tcp://HOST:PORT', or set ${_MEETING_VARIABLE}=HOST, with the address of "
            "rank 0's machine in the network of the others"
        }

    # The others.

    def _follow(self) -> bool:
        roster = self._read("roster")
        ids = roster.get("ids")
        if not isinstance(ids, list) or ids[self._rank : self._rank + 1] != [self._id]:
            return False
        if roster.get("id") != self._roster.get("id"):
            self._roster = _checked(roster)
            self._set(f"agreed/{self._rank}", self._roster["id"])
        return self._read_text("begun") == str(self._roster["id"])

    # Both.

    def _disagreeing(self) -> tuple[int, ...]:
        return tuple(
            rank
            for rank in range(self._size)
            if self._read_text(f"agreed/{rank}") != self._roster["id"]
        )

    def _missing(self) -> tuple[int, ...]:
        if self._roster:
            missing = self._disagreeing()
        else:
            missing = tuple(r for r in range(self._size) if not self._read(f"rank/{r}"))
        return missing or (0,)

    # The store.

    def _set(self, key: str, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self._asked(lambda: self._store.set(f"shardwell/{key}", text))

    def _read_text(self, key: str) -> str:
        """The store's value, "" where it has none; does not wait for it."""
        name = f"shardwell/{key}"
        found = self._asked(lambda: self._store.get(name) if self._has(name) else b"")
        if len(found) > _VALUE_LENGTH_MAX:
            return ""
        return bytes(found).decode(errors="replace")

    def _has(self, name: str) -> bool:
        if hasattr(self._store, "check"):
            return bool(self._store.check([name]))
        try:  # earlier versions of torch
            self._store.wait([name], _LOOK)
        except RuntimeError:
            return False
        return True

    def _read(self, key: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read_text(key))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _asked(self, call: Callable[[], ResultT]) -> ResultT:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise ShardUnavailableError(
                f"the store by which the ranks of a process group meet has failed: {error}; check "
                f"that the process which serves it runs ({_described(self._store)})",
                rank=self._rank,
            ) from None


def _checked(roster: dict[str, Any]) -> dict[str, Any]:
    is_whole = isinstance(roster.get("id"), str) and isinstance(roster.get("name"), str)
    address = roster.get("address")
    if not is_whole or not (
        roster.get("error") or (isinstance(address, str) and is_address(address))
    ):
        raise ShardwellError(
            f"rank 0 wrote a roster that this version can't read: {roster!s:.200}; run the same "
            "version of shardwell on all ranks"
        )
    return roster


def _described(store: Any) -> str:
    inner = _innermost(store)
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    path = getattr(inner, "path", None)
    where = f"at {host}:{port}" if host else f"in {path}" if path else type(inner).__name__
    return f"the store {where}"


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _this_machine() -> str:
    """Returns a text that differs between machines, and containers with networks of their own."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:  # not Linux
        parts.append(f"{uuid.getnode():x}")
    return " ".join(parts)


def _own_hosts(store: Any) -> list[str]:
    inner = _innermost(store)
    meeting = [getattr(inner, "host", None), os.environ.get(_MEETING_VARIABLE)]
    found = [
        _address_towards(host) for host in (*meeting, *_ELSEWHERE, socket.gethostname()) if host
    ]
    return list(dict.fromkeys(host for host in found if host is not None))


def _address_towards(host: str) -> str | None:
    with contextlib.suppress(OSError):
        return address_towards(host, _ANY_PORT)
    return None


def _is_loopback(host: str) -> bool:
    return is_loopback(f"[{host}]:1" if ":" in host else f"{host}:1")


def _free_address(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as free:
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

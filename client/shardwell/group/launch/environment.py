"""Arguments that `join_group()` did not get, from the variables of a launcher. Pure.

`launchers.py` reads the rank. The workers meet at the first of these that is known:

1. $SHARDWELL_RENDEZVOUS, else the first address of $SHARDWELL_SHARDS: a server that runs already.
2. MASTER_ADDR, served by rank 0. The port is $SHARDWELL_RENDEZVOUS_PORT, else MASTER_PORT + 1
   (torch's own store has MASTER_PORT), else the derived one.
3. The first host of the Slurm step, where rank 0 runs; or this machine, if MPI runs all ranks here.
   The port is as above, or derived from the job: 20000 + (job id * 31 + step id) modulo 10000 for
   Slurm; with a CRC of the job's name for Open MPI and Intel MPI; with the number of the parent
   process for MPICH, which all ranks share unless each is started by a script of its own.
   20000 to 29999 are neither ports that systems hand out (32768 and up) nor Kubernetes' (30000).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.group.launch.launchers import Launcher, crc_of, find_launcher, parse_number
from shardwell.specs.names import NAME_LENGTH_MAX, check_name, parse_target

RENDEZVOUS_VARIABLE = "SHARDWELL_RENDEZVOUS"
RENDEZVOUS_PORT_VARIABLE = "SHARDWELL_RENDEZVOUS_PORT"
GROUP_VARIABLE = "SHARDWELL_GROUP"
DEFAULT_GROUP_NAME = "default"
DERIVED_PORT_FIRST = 20000
DERIVED_PORT_COUNT = 10000
_PORT_MAX = 65535
_SUFFIX_LENGTH = 9


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """A worker's place in its group, and where the group meets, as its launcher tells."""

    rank: int
    size: int
    local_rank: int | None
    """The rank among the workers of this machine, such as for choosing a GPU; None if unknown."""
    group_name: str
    """$SHARDWELL_GROUP, else the launcher's job id, else "default". $TORCHELASTIC_RESTART_COUNT is
    no part of it: after a failure only the agent of the node that failed counts one up, so its
    workers and the others' would look for different groups. Restarted workers form the group's
    next generation."""
    rendezvous_address: str
    serves_rendezvous: bool
    """This worker is rank 0 and is to serve `rendezvous_address`, as no other process does."""
    source: str

    @staticmethod
    def of(environ: Mapping[str, str], *, parent_pid: int | None = None) -> LaunchEnvironment:
        """Reads the variables; ArgumentError names what is missing or wrong, and what to set.

        Without `parent_pid`, workers of MPICH get an error that wants $SHARDWELL_RENDEZVOUS.
        """
        launcher = find_launcher(environ, parent_pid)
        given = {name: value.strip() for name, value in environ.items() if value.strip()}
        address = _running_server(given)
        return LaunchEnvironment(
            rank=launcher.rank,
            size=launcher.size,
            local_rank=launcher.local_rank,
            group_name=_group_name(given, launcher),
            rendezvous_address=address or _served_by_rank_zero(given, launcher),
            serves_rendezvous=address is None and launcher.rank == 0,
            source=launcher.source,
        )


def _group_name(given: Mapping[str, str], launcher: Launcher) -> str:
    if GROUP_VARIABLE in given:
        return check_name(f"${GROUP_VARIABLE}", given[GROUP_VARIABLE])
    if launcher.job_id is None:
        return DEFAULT_GROUP_NAME
    name = re.sub(r"[^A-Za-z0-9._-]", "-", launcher.job_id)
    if name != launcher.job_id or len(name) > NAME_LENGTH_MAX:
        # Ids that differ only in what was replaced or cut off stay different.
        name = f"{name[: NAME_LENGTH_MAX - _SUFFIX_LENGTH]}-{crc_of(launcher.job_id):08x}"
    return name


def _running_server(given: Mapping[str, str]) -> str | None:
    for variable in (RENDEZVOUS_VARIABLE, "SHARDWELL_SHARDS"):
        if variable in given:
            try:
                return parse_target(given[variable])[0]
            except ArgumentError as error:
                raise ArgumentError(
                    f"${variable} must be HOST:PORT of where the group meets, or a cluster's "
                    f"addresses; got {given[variable]!r:.200}; set it right or unset it"
                ) from error
    return None


def _served_by_rank_zero(given: Mapping[str, str], launcher: Launcher) -> str:
    host = given.get("MASTER_ADDR") or launcher.rank_zero_host
    if host is None:
        raise ArgumentError(_no_host(launcher))
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    address = f"{host}:{_port(given, launcher)}"
    try:
        parse_target(address)
    except ArgumentError as error:
        raise ArgumentError(
            f"MASTER_ADDR must be a host's name or address; got {host!r:.200}; set it right, or "
            f"set ${RENDEZVOUS_VARIABLE}=HOST:PORT"
        ) from error
    return address


def _port(given: Mapping[str, str], launcher: Launcher) -> int:
    if RENDEZVOUS_PORT_VARIABLE in given:
        return _checked_port(
            parse_number(given, RENDEZVOUS_PORT_VARIABLE), f"${RENDEZVOUS_PORT_VARIABLE}"
        )
    if "MASTER_PORT" in given:
        return _checked_port(parse_number(given, "MASTER_PORT") + 1, "MASTER_PORT + 1")
    if launcher.port_seed is None:
        raise ArgumentError(
            f"{launcher.source} tells the rank ({launcher.rank} of {launcher.size}) but no port at "
            f"which the workers can meet; set ${RENDEZVOUS_PORT_VARIABLE}, MASTER_PORT, or "
            f"${RENDEZVOUS_VARIABLE}=HOST:PORT, the same for all, or pass rendezvous="
        )
    return DERIVED_PORT_FIRST + launcher.port_seed % DERIVED_PORT_COUNT


def _checked_port(port: int, what: str) -> int:
    if not 0 < port <= _PORT_MAX:
        raise ArgumentError(
            f"{what} must be a port from 1 to {_PORT_MAX}; got {port}; set "
            f"${RENDEZVOUS_PORT_VARIABLE} to a free port of rank 0's machine"
        )
    return port


def _no_host(launcher: Launcher) -> str:
    who = f"{launcher.source} tells the rank ({launcher.rank} of {launcher.size})"
    by_hand = (
        "set MASTER_ADDR and MASTER_PORT (rank 0's machine and a free port there), or pass "
        "rendezvous="
    )
    if launcher.address_option is not None:
        passing = launcher.address_option.format(RENDEZVOUS_VARIABLE)
        return (
            f"{who}, but not that all ranks run on one machine, and no address was given where "
            f"they meet; start them with `mpirun {passing} ...`, the address of a shard; {by_hand}"
        )
    return (
        f"{who}, but not where the workers meet; set ${RENDEZVOUS_VARIABLE}=HOST:PORT, the same "
        f"for all (the address of a shard); {by_hand}"
    )

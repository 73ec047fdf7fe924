"""A worker's rank, and the place where its group meets, from the variables of its launcher. Pure.

Launchers are nested: a batch script of Slurm runs `mpirun`, which runs workers that inherit Slurm's
variables. The innermost launcher knows the rank, so the first of these that is set counts; empty
variables count as not set.

| variables | launcher |
|---|---|
| RANK, WORLD_SIZE | torchrun, `shardwell run`, Kubernetes' PyTorchJob, or a user, on purpose |
| OMPI_COMM_WORLD_RANK, _SIZE | Open MPI's mpirun |
| SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS) | srun, inside a step: the batch script \
itself has SLURM_PROCID=0 and the whole job's SLURM_NTASKS, but is no task of srun |

The workers meet at the first of these that is known:

1. $SHARDWELL_RENDEZVOUS, else the first address of $SHARDWELL_SHARDS: a server that runs already.
2. MASTER_ADDR, served by rank 0. The port is $SHARDWELL_RENDEZVOUS_PORT, else MASTER_PORT + 1
   (torch's own store has MASTER_PORT), else the derived one.
3. The only host of the Slurm step, or this machine if Open MPI runs all ranks here. The port is as
   above, or derived from the job: 20000 + (job id * 31 + step id) modulo 10000 for Slurm; with a
   CRC of the job's name for Open MPI. 20000 to 29999 are neither ports that systems hand out
   (32768 and up) nor Kubernetes' (30000).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwell.errors import ArgumentError
from shardwell.specs.names import NAME_LENGTH_MAX, check_name, parse_target

RENDEZVOUS_VARIABLE = "SHARDWELL_RENDEZVOUS"
RENDEZVOUS_PORT_VARIABLE = "SHARDWELL_RENDEZVOUS_PORT"
GROUP_VARIABLE = "SHARDWELL_GROUP"
LAUNCHER_VARIABLE = "SHARDWELL_LAUNCHER"
"""Set by `shardwell run`, beside its RANK and WORLD_SIZE."""
SHARDWELL_RUN = "shardwell run"
_NUMBER_MAX = 2**31 - 1
_PORT_MAX = 65535
_SUFFIX_LENGTH = 9
_OPEN_MPI = "OMPI_COMM_WORLD_"
_STEP_VARIABLES = (
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST",
)  # fmt: skip
_BY_HAND = "or pass rank=, size= and rendezvous="


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The program that started this worker, and its variables."""

    source: str
    """For messages: "shardwell run", "torchrun", "Open MPI", "Slurm", or "RANK and WORLD_SIZE"."""
    rank: int
    size: int
    local_rank: int | None = None
    job_id: str | None = None
    """The job's name, common to all its ranks; None if the launcher has none."""
    port_seed: int | None = None
    """Like `job_id`, as a number from which all ranks derive one port."""
    rank_zero_host: str | None = None


def known_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher of this process; None where none has set a rank."""
    given = {name: value for name, value in environ.items() if value}
    if by_name := _place(given, "RANK", "WORLD_SIZE"):
        return _by_name(given, *by_name)
    if by_mpi := _place(given, f"{_OPEN_MPI}RANK", f"{_OPEN_MPI}SIZE"):
        return _open_mpi(given, *by_mpi)
    found = _slurm(given)
    _check_other_mpi(given, found)
    return found


def _check_other_mpi(given: Mapping[str, str], found: Launcher | None) -> None:
    """Refuses a worker of an MPI that is not read: each would be alone, or one of Slurm's."""
    size = 1 if found is None else found.size
    for prefix in ("PMI_", "MV2_COMM_WORLD_"):
        other = given.get(f"{prefix}SIZE", "1" if given.get(f"{prefix}RANK", "0") == "0" else "?")
        if other not in ("1", str(size)):
            rest = "" if found is None else f", which contradicts {size} of {found.source}"
            raise ArgumentError(
                f"{prefix}SIZE={other:.20} is of an MPI whose variables are not read{rest}; set "
                f"RANK=${prefix}RANK and WORLD_SIZE=${prefix}SIZE for each worker, {_BY_HAND}"
            )


def _by_name(given: Mapping[str, str], rank: int, size: int) -> Launcher:
    run_id = given.get("TORCHELASTIC_RUN_ID")
    by_mpi = [given.get(f"{_OPEN_MPI}{name}") for name in ("RANK", "SIZE")]
    source = "RANK and WORLD_SIZE"
    if given.get(LAUNCHER_VARIABLE) == SHARDWELL_RUN:
        source = SHARDWELL_RUN
    elif run_id is not None:
        source = "torchrun"
    elif None not in by_mpi and by_mpi != [str(rank), str(size)]:
        # A RANK left over in a shell would give all ranks of mpirun one place.
        raise ArgumentError(
            f"RANK={rank} and WORLD_SIZE={size} contradict MPI's {_OPEN_MPI}RANK={by_mpi[0]:.20} "
            f"and {_OPEN_MPI}SIZE={by_mpi[1]:.20}; unset RANK and WORLD_SIZE if they are left "
            f"over, set them to MPI's values, {_BY_HAND}"
        )
    return Launcher(
        source=source,
        rank=rank,
        size=size,
        local_rank=_number(given, "LOCAL_RANK"),
        # "none" is what torchrun calls all runs that were given no --rdzv-id.
        job_id=f"torchrun-{run_id}" if source == "torchrun" and run_id != "none" else None,
    )


def _open_mpi(given: Mapping[str, str], rank: int, size: int) -> Launcher:
    # Open MPI 5 and 4: "prterun-HOST-PID@1", "26804225".
    job_id = given.get("PMIX_NAMESPACE") or given.get("OMPI_MCA_ess_base_jobid")
    return Launcher(
        source="Open MPI",
        rank=rank,
        size=size,
        local_rank=_number(given, f"{_OPEN_MPI}LOCAL_RANK"),
        job_id=job_id and f"mpi-{job_id}",
        port_seed=None if job_id is None else _crc_of(job_id),
        rank_zero_host="127.0.0.1" if _number(given, f"{_OPEN_MPI}LOCAL_SIZE") == size else None,
    )


def _slurm(given: Mapping[str, str]) -> Launcher | None:
    sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in given]
    if "SLURM_PROCID" not in given or not sizes:
        return None
    place = _place(given, "SLURM_PROCID", sizes[0])
    # A batch script is a task where it is its job's only one.
    if place is None or not (any(name in given for name in _STEP_VARIABLES) or place[1] == 1):
        return None
    job = _slurm_id(given, "SLURM_JOB_ID", "SLURM_JOBID")
    step = _slurm_id(given, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    hosts = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST")
    return Launcher(
        source="Slurm",
        rank=place[0],
        size=place[1],
        local_rank=_number(given, "SLURM_LOCALID"),
        job_id=None if job is None else f"slurm-{job}-{step}",
        port_seed=None if job is None else job * 31 + step,
        rank_zero_host=None if hosts is None or set(hosts) & set(",[") else hosts,
    )


def _place(
    given: Mapping[str, str], rank_variable: str, size_variable: str
) -> tuple[int, int] | None:
    rank, size = _number(given, rank_variable), _number(given, size_variable)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        missing, present = rank_variable, size_variable
        if size is None:
            missing, present = size_variable, rank_variable
        raise ArgumentError(
            f"{present} is set to {given[present]!r:.80}, but {missing} is not; set both "
            f"(as torchrun and `shardwell run` do), unset {present}, {_BY_HAND}"
        )
    if rank >= size:
        raise ArgumentError(
            f"{rank_variable} must be 0 to {size_variable} - 1; got {rank_variable}={rank} and "
            f"{size_variable}={size}; set them right, {_BY_HAND}"
        )
    return rank, size


def _number(given: Mapping[str, str], variable: str) -> int | None:
    text = given.get(variable)
    if text is None:
        return None
    # str.isdecimal alone takes other scripts' digits too; more than ten digits are too many.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _NUMBER_MAX):
        raise ArgumentError(
            f"{variable} must be a number from 0 to {_NUMBER_MAX}; got {text!r:.80}; "
            f"set it right, unset it, {_BY_HAND}"
        )
    return int(text)


def _slurm_id(given: Mapping[str, str], *variables: str) -> int | None:
    """Returns the first that is a number: Slurm's ids may exceed what `_number` takes."""
    for variable in variables:
        text = given.get(variable, "")
        if text.isascii() and text.isdecimal() and len(text) <= 20:
            return int(text)
    return None


def _crc_of(text: str) -> int:
    # An environment may have bytes that are no UTF-8; Python keeps them as lone surrogates.
    return zlib.crc32(text.encode(errors="surrogatepass"))


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """A worker's place in its group, and where the group meets, by its launcher's variables."""

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
    def of(environ: Mapping[str, str]) -> LaunchEnvironment:
        """Reads the variables; ArgumentError names what is missing or wrong, and what to set."""
        launcher = known_launcher(environ)
        given = {name: value.strip() for name, value in environ.items() if value.strip()}
        if launcher is None:
            raise ArgumentError(_no_launcher(given))
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
        return "default"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", launcher.job_id)
    if name != launcher.job_id or len(name) > NAME_LENGTH_MAX:
        # Ids that differ only in what was replaced or cut off stay different.
        name = f"{name[: NAME_LENGTH_MAX - _SUFFIX_LENGTH]}-{_crc_of(launcher.job_id):08x}"
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
    who = f"{launcher.source} gives the rank ({launcher.rank} of {launcher.size})"
    host = given.get("MASTER_ADDR") or launcher.rank_zero_host
    if host is None:
        option = " (mpirun -x)" if launcher.source == "Open MPI" else ""
        raise ArgumentError(
            f"{who}, but no address where the workers meet; set for all{option} "
            f"${RENDEZVOUS_VARIABLE}=HOST:PORT (the address of a shard), or MASTER_ADDR and "
            "MASTER_PORT (rank 0's machine, under Slurm the first line of `scontrol show "
            "hostnames`, and a free port there), or pass rendezvous="
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    if RENDEZVOUS_PORT_VARIABLE in given:
        port, what = _number(given, RENDEZVOUS_PORT_VARIABLE), f"${RENDEZVOUS_PORT_VARIABLE}"
    else:
        port, what = _number(given, "MASTER_PORT"), "MASTER_PORT + 1"
        if port is not None:
            port += 1
        elif launcher.port_seed is not None:
            port = 20000 + launcher.port_seed % 10000
    if port is None:
        raise ArgumentError(
            f"{who}, but no port where the workers meet; set for all "
            f"${RENDEZVOUS_PORT_VARIABLE}, MASTER_PORT or ${RENDEZVOUS_VARIABLE}=HOST:PORT, or "
            "pass rendezvous="
        )
    if not 0 < port <= _PORT_MAX:
        raise ArgumentError(
            f"{what} must be a port from 1 to {_PORT_MAX}; got {port}; set "
            f"${RENDEZVOUS_PORT_VARIABLE} to a free port of rank 0's machine"
        )
    try:
        parse_target(f"{host}:{port}")
    except ArgumentError as error:
        raise ArgumentError(
            f"MASTER_ADDR must be a host's name or address; got {host!r:.200}; set it right, or "
            f"set ${RENDEZVOUS_VARIABLE}=HOST:PORT"
        ) from error
    return f"{host}:{port}"


def _no_launcher(given: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in given or "SLURM_NTASKS" in given:
        names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")
        found = ", ".join(f"{name}={given[name]}" for name in names if name in given)
        return (
            f"this process runs in a Slurm job ({found:.200}) but is no task of srun, so it has no "
            f"rank; start it with `srun python train.py`, with `shardwell run -n N -- ...`, set "
            f"RANK and WORLD_SIZE, {_BY_HAND}"
        )
    return (
        "no launcher has set this worker's rank: understood are RANK and WORLD_SIZE (torchrun, "
        "`shardwell run`, Kubernetes), OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), SLURM_PROCID and "
        "SLURM_STEP_NUM_TASKS (srun); start it with `shardwell run -n N -- python train.py`, set "
        f"RANK and WORLD_SIZE from the variables of your launcher, {_BY_HAND}"
    )

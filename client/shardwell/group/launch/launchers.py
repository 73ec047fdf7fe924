"""The launcher of this worker, its rank and size: the variables of torchrun, MPI and Slurm.

Pure: variables in, values out. Where the workers meet is for `environment` to say.

Launchers are nested: a batch script of Slurm runs `mpirun`, which runs workers that inherit Slurm's
variables. The innermost launcher knows the rank, so the order is

1. RANK and WORLD_SIZE: torchrun, `shardwell run`, Kubernetes' PyTorchJob, and users who set them by
   hand. People set these on purpose.
2. OMPI_COMM_WORLD_RANK and _SIZE: Open MPI's mpirun.
3. PMI_RANK (or PMIX_RANK) and PMI_SIZE: mpiexec of MPICH and Intel MPI. `srun --mpi=pmi2` sets them
   as well, with the values of SLURM_PROCID and SLURM_STEP_NUM_TASKS; then it was Slurm.
4. MV2_COMM_WORLD_RANK and _SIZE: MVAPICH2's mpirun_rsh.
5. SLURM_PROCID and SLURM_STEP_NUM_TASKS (or SLURM_NTASKS): srun. Only inside a step: the batch
   script itself has SLURM_PROCID=0 and the whole job's SLURM_NTASKS, but is no task of srun.

Empty variables count as not set.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwell.errors import ArgumentError

LAUNCHER_VARIABLE = "SHARDWELL_LAUNCHER"
"""Set by `shardwell run`: tells that RANK and WORLD_SIZE are its own."""
SHARDWELL_RUN = "shardwell run"
_NUMBER_MAX = 2**31 - 1
_STEP_VARIABLES = (
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST",
)  # fmt: skip
HOSTLIST_LENGTH_MAX = 65536
"""Characters; thousands of hosts that have no pattern in common fit."""
_RANGES = r"\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_ENTRY = re.compile(rf"(?:[A-Za-z0-9_.-]+|{_RANGES})+")
_RANGES_FIRST = re.compile(r"\[([0-9]+)[^\]]*\]")
_BY_HAND = "or pass rank=, size= and rendezvous="


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The program that started this worker, and what it says about the job."""

    source: str
    """For messages: "shardwell run", "torchrun", "Open MPI", "MPICH/Intel MPI (PMI)", "MVAPICH2",
    "Slurm", or "RANK and WORLD_SIZE" when it is not known who has set them."""
    rank: int
    size: int
    local_rank: int | None = None
    job_id: str | None = None
    """The job's name, common to all its ranks; None if the launcher has none."""
    port_seed: int | None = None
    """Like `job_id`, as a number from which all ranks derive the same port."""
    rank_zero_host: str | None = None
    address_option: str | None = None
    """The option of its mpirun that gives all ranks a variable "{}"; None: it is no mpirun."""


class _Mpi(NamedTuple):
    source: str
    prefix: str
    local_rank: str
    local_size: str
    jobs: tuple[str, ...]
    address_option: str
    is_like_hydra: bool
    """All ranks of a machine have one parent, and srun --mpi=pmi2 sets the same variables."""

    @property
    def size(self) -> str:
        return f"{self.prefix}SIZE"

    def rank(self, given: Mapping[str, str]) -> str:
        name = f"{self.prefix}RANK"
        by_pmix = self.prefix == "PMI_" and self.size in given and "PMIX_RANK" in given
        return "PMIX_RANK" if by_pmix and name not in given else name


_MPIS = (
    _Mpi(
        "Open MPI", "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        # Open MPI 5 and 4: "prterun-HOST-PID@1", "26804225".
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"), "-x {}=HOST:PORT", False,
    ),
    _Mpi(
        "MPICH/Intel MPI (PMI)", "PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        ("I_MPI_HYDRA_UUID",), "-genv {} HOST:PORT", True,
    ),
    _Mpi(
        "MVAPICH2", "MV2_COMM_WORLD_", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
        ("I_MPI_HYDRA_UUID",), "{}=HOST:PORT", True,
    ),
)  # fmt: skip


def find_launcher(environ: Mapping[str, str], parent_pid: int | None) -> Launcher:
    """Finds the launcher that started the process with these variables.

    `parent_pid` alone differs between jobs of MPICH. ArgumentError: no launcher has, or variables
    contradict one another or are no numbers.
    """
    found = known_launcher(environ, parent_pid)
    if found is None:
        raise ArgumentError(_nobody(environ))
    return found


def known_launcher(environ: Mapping[str, str], parent_pid: int | None = None) -> Launcher | None:
    """The launcher of this process, as by `find_launcher`; None where none has set a rank."""
    given = {name: value for name, value in environ.items() if value}
    if by_name := _pair(given, "RANK", "WORLD_SIZE"):
        _refuse_contradiction(given, *by_name)
        return _by_name(given, *by_name)
    for mpi in _MPIS:
        place = _pair(given, mpi.rank(given), mpi.size)
        if place and not (mpi.is_like_hydra and place == _slurm_task(given)):
            return _by_mpi(given, mpi, *place, parent_pid)
    task = _slurm_task(given)
    return _slurm(given, *task) if task else None


def _by_name(given: Mapping[str, str], rank: int, size: int) -> Launcher:
    run_id = given.get("TORCHELASTIC_RUN_ID")
    if given.get(LAUNCHER_VARIABLE) == SHARDWELL_RUN:
        source = SHARDWELL_RUN
    else:
        source = "RANK and WORLD_SIZE" if run_id is None else "torchrun"
    return Launcher(
        source=source,
        rank=rank,
        size=size,
        local_rank=_local_rank(given, "LOCAL_RANK"),
        # "none" is what torchrun calls all runs that were given no --rdzv-id.
        job_id=f"torchrun-{run_id}" if source == "torchrun" and run_id != "none" else None,
    )


def _by_mpi(
    given: Mapping[str, str], mpi: _Mpi, rank: int, size: int, parent_pid: int | None
) -> Launcher:
    job_id = next((given[variable] for variable in mpi.jobs if variable in given), None)
    has_all = mpi.local_size in given and parse_number(given, mpi.local_size) == size
    seed = parent_pid if has_all and mpi.is_like_hydra else None
    return Launcher(
        source=mpi.source,
        rank=rank,
        size=size,
        local_rank=_local_rank(given, mpi.local_rank),
        job_id=job_id and f"mpi-{job_id}",
        port_seed=seed if job_id is None else crc_of(job_id),
        rank_zero_host="127.0.0.1" if has_all else None,
        address_option=mpi.address_option,
    )


def _slurm(given: Mapping[str, str], rank: int, size: int) -> Launcher:
    job = _number_of(given, "SLURM_JOB_ID", "SLURM_JOBID")
    step = _number_of(given, "SLURM_STEP_ID", "SLURM_STEPID") or 0
    hosts = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST")
    return Launcher(
        source="Slurm",
        rank=rank,
        size=size,
        local_rank=_local_rank(given, "SLURM_LOCALID"),
        job_id=None if job is None else f"slurm-{job}-{step}",
        port_seed=None if job is None else job * 31 + step,
        rank_zero_host=hosts and first_host(hosts),
    )


def _slurm_task(given: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and size inside a step of srun; also of a batch script that is its job's only task."""
    if "SLURM_PROCID" not in given:
        return None
    size_variable = next((v for v in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if v in given), None)
    if size_variable is None:
        return None
    rank, size = _place(given, "SLURM_PROCID", size_variable)
    in_step = any(variable in given for variable in _STEP_VARIABLES)
    return (rank, size) if in_step or size == 1 else None


def _pair(
    given: Mapping[str, str], rank_variable: str, size_variable: str
) -> tuple[int, int] | None:
    if rank_variable not in given and size_variable not in given:
        return None
    for missing, present in ((rank_variable, size_variable), (size_variable, rank_variable)):
        if missing not in given:
            raise ArgumentError(
                f"{present} is set to {given[present]!r:.80}, but {missing} is not; set both "
                f"(as torchrun and `shardwell run` do), unset {present}, {_BY_HAND}"
            )
    return _place(given, rank_variable, size_variable)


def _place(given: Mapping[str, str], rank_variable: str, size_variable: str) -> tuple[int, int]:
    rank, size = parse_number(given, rank_variable), parse_number(given, size_variable)
    if not 0 <= rank < size:
        raise ArgumentError(
            f"{rank_variable} must be 0 to {size_variable} - 1; got {rank_variable}={rank} and "
            f"{size_variable}={size}; set them right, {_BY_HAND}"
        )
    return rank, size


def parse_number(given: Mapping[str, str], variable: str) -> int:
    """The variable's value; ArgumentError: it is no decimal number from 0 to 2^31 - 1."""
    text = given[variable]
    # str.isdecimal alone takes other scripts' digits too; more than ten digits are too many.
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _NUMBER_MAX):
        raise ArgumentError(
            f"{variable} must be a number from 0 to {_NUMBER_MAX}; got {text!r:.80}; "
            f"set it right, unset it, {_BY_HAND}"
        )
    return int(text)


def _number_of(given: Mapping[str, str], *variables: str) -> int | None:
    """The first that is a number: Slurm's ids may be larger than what `parse_number` takes."""
    for variable in variables:
        text = given.get(variable, "")
        if text.isascii() and text.isdecimal() and len(text) <= 20:
            return int(text)
    return None


def _local_rank(given: Mapping[str, str], variable: str) -> int | None:
    return parse_number(given, variable) if variable in given else None


def _refuse_contradiction(given: Mapping[str, str], rank: int, size: int) -> None:
    """Refuses a RANK left over in a shell: it gives all ranks of mpirun one place."""
    if "TORCHELASTIC_RUN_ID" in given or LAUNCHER_VARIABLE in given:
        return  # a launcher of its own, that mpirun has started
    for mpi in _MPIS:
        rank_variable, size_variable = f"{mpi.prefix}RANK", mpi.size
        if rank_variable not in given or size_variable not in given:
            continue
        if (given[rank_variable], given[size_variable]) != (str(rank), str(size)):
            raise ArgumentError(
                f"RANK={rank} and WORLD_SIZE={size} contradict MPI's "
                f"{rank_variable}={given[rank_variable]:.20} and "
                f"{size_variable}={given[size_variable]:.20}; unset RANK and WORLD_SIZE if they "
                f"are left over, set them to MPI's values, {_BY_HAND}"
            )


def crc_of(text: str) -> int:
    """A number that is the same in every process, which Python's own hash is not."""
    # An environment may have bytes that are no UTF-8; Python keeps them as lone surrogates.
    return zlib.crc32(text.encode(errors="surrogatepass"))


def _nobody(environ: Mapping[str, str]) -> str:
    given = {name: value for name, value in environ.items() if value}
    if "SLURM_JOB_ID" in given or "SLURM_NTASKS" in given:
        found = {
            v: given[v] for v in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS") if v in given
        }
        told = ", ".join(f"{name}={value}" for name, value in found.items())
        return (
            f"this process runs in a Slurm job ({told:.200}) but is no task of srun, so it has no "
            f"rank; start it with `srun python train.py`, with `shardwell run -n N -- ...`, "
            f"{_BY_HAND}"
        )
    return (
        "no launcher has set this worker's rank: understood are RANK and WORLD_SIZE (torchrun, "
        "`shardwell run`, Kubernetes), OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), PMI_RANK and "
        "PMI_SIZE (MPICH, Intel MPI), MV2_COMM_WORLD_RANK and _SIZE (MVAPICH2), SLURM_PROCID and "
        "SLURM_STEP_NUM_TASKS (srun); start it with `shardwell run -n N -- python train.py`, "
        f"{_BY_HAND}"
    )


def first_host(hostlist: str) -> str:
    """The first host of a list in Slurm's syntax: "node01" of "node[01-04,07],gpu3".

    An entry may have several brackets ("rack[1-2]n[01-16]"), each a list of numbers and ranges with
    leading zeros kept. Others are not expanded, so the work does not grow with their number.
    """
    if len(hostlist) > HOSTLIST_LENGTH_MAX:
        raise ArgumentError(
            f"a list of hosts has at most {HOSTLIST_LENGTH_MAX} characters; got {len(hostlist)}"
        )
    entry = _ENTRY.match(hostlist)
    if entry is None or hostlist[entry.end() : entry.end() + 1] not in ("", ","):
        raise ArgumentError(
            f"a list of hosts is like 'node1,node2' or 'node[01-04,07],gpu3'; got {hostlist!r:.200}"
        )
    return _RANGES_FIRST.sub(r"\1", entry.group())

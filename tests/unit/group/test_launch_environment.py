"""What workers learn from their launcher, with the variables that launchers were seen to set."""

from __future__ import annotations

import zlib
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ArgumentError
from shardwell.group.launch import LaunchEnvironment
from shardwell.specs.names import check_name

# Recorded: torchrun of torch 2.13, --nproc-per-node 2 --standalone, rank 1.
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "43253",
    "OMP_NUM_THREADS": "1",
    "RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "b9e04919-bf05-481f-877c-17c4e917e694",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
# Recorded: mpirun -n 3 of Open MPI 5.0.11, rank 2.
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_num_procs": "3",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-27541@1",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI2": "prterun-vm-27541@0.0;tcp4://127.0.0.1:53811",
    "PRTE_LAUNCHED": "1",
}
# Recorded: mpirun -n 3 of Open MPI 4.1.4, rank 2.
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_ess_base_jobid": "26804225",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_ID": "26804225.2",
    "PMIX_NAMESPACE": "26804225",
    "PMIX_RANK": "2",
}
# After Slurm's manual of srun; the allocation is larger than the step.
SRUN = {
    "SLURM_JOBID": "1731344",
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "3",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node03",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_TASKS_PER_NODE": "1(x8)",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
}
SALLOC_SHELL = {
    "SLURM_JOB_ID": "1731344",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_NTASKS": "8",
}
ANYWHERE = {"SHARDWELL_RENDEZVOUS": "10.0.0.1:7070"}


def _port_of(job: str) -> int:
    return 20000 + zlib.crc32(job.encode()) % 10000


@pytest.mark.parametrize(
    ("environ", "rank", "size", "local_rank", "group_name", "address", "source"),
    [
        (
            TORCHRUN,
            1,
            2,
            1,
            "torchrun-b9e04919-bf05-481f-877c-17c4e917e694",
            "localhost:43254",
            "torchrun",
        ),
        (
            OPEN_MPI_5,
            2,
            3,
            1,
            f"mpi-prterun-vm-27541-1-{zlib.crc32(b'mpi-prterun-vm-27541@1'):08x}",
            f"127.0.0.1:{_port_of('prterun-vm-27541@1')}",
            "Open MPI",
        ),
        (OPEN_MPI_4, 2, 3, 2, "mpi-26804225", f"127.0.0.1:{_port_of('26804225')}", "Open MPI"),
        (
            SRUN,
            2,
            3,
            0,
            "slurm-1731344-3",
            f"node03:{20000 + (1731344 * 31 + 3) % 10000}",
            "Slurm",
        ),
    ],
)
def test_variables_of_each_launcher_are_read(
    environ, rank, size, local_rank, group_name, address, source
) -> None:
    assert asdict(LaunchEnvironment.of(environ)) == {
        "rank": rank,
        "size": size,
        "local_rank": local_rank,
        "group_name": group_name,
        "rendezvous_address": address,
        "serves_rendezvous": False,
        "source": source,
    }


@pytest.mark.parametrize(
    ("environ", "rank_variable"),
    [
        (TORCHRUN, "RANK"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_RANK"),
        (SRUN, "SLURM_PROCID"),
    ],
)
def test_rank_zero_serves_unless_a_server_runs(environ, rank_variable) -> None:
    environ = {**environ, rank_variable: "0"}
    assert LaunchEnvironment.of(environ).serves_rendezvous
    elsewhere = LaunchEnvironment.of({**environ, **ANYWHERE})
    assert not elsewhere.serves_rendezvous
    assert elsewhere.rendezvous_address == "10.0.0.1:7070"


def test_kubernetes_sets_names_only() -> None:
    found = LaunchEnvironment.of(
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    )
    assert (found.rank, found.size, found.local_rank) == (0, 2, None)
    assert (found.group_name, found.source) == ("default", "RANK and WORLD_SIZE")
    assert (found.rendezvous_address, found.serves_rendezvous) == ("job-master-0:23457", True)


def test_a_run_of_torchrun_without_an_id() -> None:
    assert LaunchEnvironment.of({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).group_name == "default"


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"SHARDWELL_RENDEZVOUS": "a:1", "SHARDWELL_SHARDS": "b:2,c:3"}, "a:1"),
        ({"SHARDWELL_RENDEZVOUS": "a:1,b:2"}, "a:1"),
        ({"SHARDWELL_SHARDS": "b:2,c:3"}, "b:2"),
        ({"SHARDWELL_RENDEZVOUS": "", "SHARDWELL_SHARDS": ""}, "localhost:43254"),
        ({"SHARDWELL_RENDEZVOUS_PORT": "9"}, "localhost:9"),
        ({"SHARDWELL_RENDEZVOUS_PORT": "9", "MASTER_PORT": ""}, "localhost:9"),
        ({"MASTER_ADDR": "fd00::2"}, "[fd00::2]:43254"),
        ({"MASTER_ADDR": "[fd00::2]"}, "[fd00::2]:43254"),
    ],
)
def test_where_the_group_meets(variables, address) -> None:
    assert LaunchEnvironment.of({**TORCHRUN, **variables}).rendezvous_address == address


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"MASTER_ADDR": "10.0.0.9"}, f"10.0.0.9:{20000 + (1731344 * 31 + 3) % 10000}"),
        ({"MASTER_PORT": "1234"}, "node03:1235"),
        (
            {"SLURM_STEP_NODELIST": "node[03-04,07]", "MASTER_ADDR": "node03"},
            f"node03:{20000 + (1731344 * 31 + 3) % 10000}",
        ),
    ],
)
def test_where_a_slurm_step_meets(variables, address) -> None:
    assert LaunchEnvironment.of({**SRUN, **variables}).rendezvous_address == address


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        # torchrun in a step of Slurm, and started by mpirun.
        ({**SRUN, **TORCHRUN}, ("torchrun", 1, 2)),
        ({**OPEN_MPI_5, **TORCHRUN}, ("torchrun", 1, 2)),
        # mpirun in a batch script, in an salloc shell, and in a step of one task.
        ({**BATCH_SCRIPT, **OPEN_MPI_5}, ("Open MPI", 2, 3)),
        ({**SALLOC_SHELL, **OPEN_MPI_4}, ("Open MPI", 2, 3)),
        # srun --mpi=pmi2 and --mpi=pmix.
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}, ("Slurm", 2, 3)),
        ({**SRUN, "PMIX_RANK": "2"}, ("Slurm", 2, 3)),
        # People who translate by hand.
        ({**OPEN_MPI_5, "RANK": "2", "WORLD_SIZE": "3", **ANYWHERE}, ("RANK and WORLD_SIZE", 2, 3)),
        ({**OPEN_MPI_5, "RANK": "", "WORLD_SIZE": ""}, ("Open MPI", 2, 3)),
        ({**BATCH_SCRIPT, "SLURM_NTASKS": "1", **ANYWHERE}, ("Slurm", 0, 1)),
        (
            {
                "SHARDWELL_LAUNCHER": "shardwell run",
                "RANK": "0",
                "WORLD_SIZE": "1",
                **OPEN_MPI_4,
                **ANYWHERE,
            },
            ("shardwell run", 0, 1),
        ),
    ],
)
def test_which_launcher_comes_before_which(environ, place) -> None:
    found = LaunchEnvironment.of(environ)
    assert (found.source, found.rank, found.size) == place


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["RANK and WORLD_SIZE", "shardwell run -n N --", "rank=, size= and rendezvous="]),
        (SALLOC_SHELL, ["SLURM_JOB_ID=1731344", "no task of srun", "srun python"]),
        (BATCH_SCRIPT, ["SLURM_PROCID=0", "no task of srun"]),
        ({**TORCHRUN, "WORLD_SIZE": ""}, ["RANK is set to '1'", "WORLD_SIZE is not"]),
        ({**TORCHRUN, "RANK": ""}, ["WORLD_SIZE is set to '2'", "RANK is not"]),
        # Other MPIs: nothing takes their variables, and none of their ranks is Slurm's by mistake.
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_SIZE=2", "not read", "RANK=$PMI_RANK"]),
        ({"PMI_RANK": "2"}, ["PMI_SIZE=?", "not read", "RANK=$PMI_RANK"]),
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
            | {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"},
            ["MV2_COMM_WORLD_SIZE=4", "1 of Slurm", "RANK=$MV2_COMM_WORLD_RANK"],
        ),
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "3"},
            ["PMI_SIZE=3", "contradicts 1 of Slurm", "RANK=$PMI_RANK"],
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE is set", "RANK is not"]),
        ({**TORCHRUN, "RANK": "one"}, ["RANK must be a number", "'one'"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK must be a number", "'-1'"]),
        ({**TORCHRUN, "RANK": "\u0661"}, ["RANK must be a number"]),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE must be a number"]),
        ({**TORCHRUN, "RANK": "2"}, ["RANK=2 and WORLD_SIZE=2", "0 to WORLD_SIZE - 1"]),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, ["LOCAL_RANK must be a number"]),
        (
            {**OPEN_MPI_5, "RANK": "0", "WORLD_SIZE": "1"},
            ["RANK=0 and WORLD_SIZE=1 contradict", "OMPI_COMM_WORLD_RANK=2", "unset"],
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, ["SHARDWELL_RENDEZVOUS=HOST:PORT", "MASTER_ADDR"]),
        ({**TORCHRUN, "MASTER_PORT": ""}, ["no port", "SHARDWELL_RENDEZVOUS_PORT"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT must be a number"]),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, ["MASTER_PORT + 1", "65536"]),
        ({**TORCHRUN, "SHARDWELL_RENDEZVOUS_PORT": "0"}, ["$SHARDWELL_RENDEZVOUS_PORT", "got 0"]),
        ({**TORCHRUN, "MASTER_ADDR": "a b"}, ["MASTER_ADDR must be a host", "'a b'"]),
        ({**TORCHRUN, "SHARDWELL_RENDEZVOUS": "nonsense"}, ["$SHARDWELL_RENDEZVOUS", "'nonsense'"]),
        ({**TORCHRUN, "SHARDWELL_SHARDS": "a:0"}, ["$SHARDWELL_SHARDS", "'a:0'"]),
        ({**TORCHRUN, "SHARDWELL_GROUP": "my job"}, ["$SHARDWELL_GROUP", "'my job'"]),
        (
            {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ["Open MPI gives the rank (2 of 3)", "(mpirun -x) $SHARDWELL_RENDEZVOUS=HOST:PORT"],
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[03-04]"}, ["Slurm gives the rank", "scontrol show"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "a,b"}, ["no address where the workers meet"]),
        ({**SRUN, "SLURM_JOB_ID": "", "SLURM_JOBID": ""}, ["Slurm gives", "no port"]),
    ],
)
def test_what_can_not_be_used_is_named(environ, words) -> None:
    with pytest.raises(ArgumentError) as caught:
        LaunchEnvironment.of(environ)
    for word in words:
        assert word in caught.value.message
    assert len(caught.value.message) < 700


def test_the_name_of_the_group() -> None:
    assert LaunchEnvironment.of({**TORCHRUN, "SHARDWELL_GROUP": "job-7"}).group_name == "job-7"
    restarted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert LaunchEnvironment.of(restarted) == LaunchEnvironment.of(TORCHRUN)


@given(st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=300))
def test_any_run_id_gives_a_name_that_is_allowed(run_id) -> None:
    found = LaunchEnvironment.of({**TORCHRUN, "TORCHELASTIC_RUN_ID": run_id})
    check_name("group", found.group_name)


def test_run_ids_that_differ_in_odd_characters_only_name_different_groups() -> None:
    names = {
        LaunchEnvironment.of({**TORCHRUN, "TORCHELASTIC_RUN_ID": run_id}).group_name
        for run_id in ("a/b", "a:b", "a-b", "x" * 200, "x" * 201, "\udc80")
    }
    assert len(names) == 6

"""Goal: ranks of a process group meet whatever their store holds, and from several machines.

Method: ranks as threads on a real store of torch in which ranks that have ended left their entries;
then real programs: torchrun, which starts killed ranks again with the store that it had, and two
machines that are network namespaces with a cable between them.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import shardwell
from harness.polling import BRIEF_S, PATIENCE_S, eventually
from harness.programs.commands import Program
from harness.programs.networks import can_be_made, two_machines
from harness.programs.ports import free_port
from harness.threads import in_background

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")
dist = torch.distributed
ONE_MACHINE = {"machine": "one", "hosts": ("127.0.0.1",)}
LONG_S = 150.0


@pytest.fixture(scope="module")
def tcp_store() -> Any:
    """Serves until its last reference is gone: longer than a test."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tcp_store: Any, tmp_path: Path) -> Any:
    """Each kind that torch has."""
    kinds = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 3),
        "tcp": lambda: tcp_store,
    }
    return dist.PrefixStore(tmp_path.name, kinds[request.param]())


def comes(store: Any, rank: int, *, timeout_s: float = PATIENCE_S, **place: Any) -> Future[Any]:
    """A rank of three, on a thread of its own; ends with what all have agreed on."""
    from shardwell.torch.meeting import Place, StoreMeeting

    where = Place(**{**ONE_MACHINE, **place})
    meeting = StoreMeeting(store, rank, 3, timeout_s=timeout_s, place=where)
    return in_background(meeting.meet)


def met(futures: list[Future[Any]]) -> Any:
    """What they have agreed on, the same for all."""
    results = [each.result(PATIENCE_S) for each in futures]
    assert results[0] == results[1] == results[2], results
    return results[0]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_store_that_ranks_have_met_by_before(store: Any, first: int) -> None:
    earlier = met([comes(store, rank) for rank in range(3)])
    before = store.get(f"shardwell/rank/{first}")
    early = comes(store, first)
    eventually("it has come", lambda: store.get(f"shardwell/rank/{first}") != before)
    assert not early.done()  # what the others left does not count
    others = [comes(store, rank) for rank in range(3) if rank != first]
    now = met([early, *others])
    assert now.name != earlier.name


def test_ranks_that_ended_while_they_met(store: Any) -> None:
    for there in ([1, 2], [0, 1], [0, 2], [0]):
        for each in [comes(store, rank, timeout_s=0.3) for rank in there]:
            assert isinstance(each.exception(PATIENCE_S), shardwell.WorkersMissingError)
    first = met([comes(store, rank) for rank in range(3)])
    for each in [comes(store, rank, timeout_s=0.3) for rank in (0, 2)]:  # beside whole entries
        error = each.exception(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError)
    assert met([comes(store, rank) for rank in range(3)]).name != first.name


def test_workers_missing_at_the_meeting_are_named(store: Any) -> None:
    left, right = [comes(store, rank, timeout_s=BRIEF_S) for rank in (0, 2)]
    for each, rank in ((left, 0), (right, 2)):
        error = each.exception(PATIENCE_S)
        assert isinstance(error, shardwell.WorkersMissingError)
        assert (error.missing_ranks, error.rank) == ((1,), rank)
        assert "rank 1 of 3 did not come" in error.message
    met([comes(store, rank) for rank in range(3)])
    error = comes(store, 1, timeout_s=0.3).exception(PATIENCE_S)  # all have left entries
    assert isinstance(error, shardwell.WorkersMissingError)
    assert error.missing_ranks == (0,)


def test_who_waits_says_so_after_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwell.group"):
        comes(dist.HashStore(), 2, timeout_s=BRIEF_S).exception(PATIENCE_S)
    (line,) = caplog.messages
    assert "as rank 2 of 3 of a process group for ranks 0, 1 " in line


def test_what_is_none_of_ours_is_passed_over(store: Any) -> None:
    for key in ("rank/0", "rank/1", "roster", "agreed/0", "agreed/2", "begun"):
        store.set(f"shardwell/{key}", "[1]")
    for key, value in (("rank/2", b"\xff{"), ("agreed/1", b"x" * 100_000)):
        store.set(f"shardwell/{key}", value)
    met([comes(store, rank) for rank in range(3)])
    store.set("shardwell/roster", '{"ids": 7}')
    met([comes(store, rank) for rank in range(3)])


def test_two_processes_of_one_rank(store: Any) -> None:
    first = comes(store, 1)
    eventually("it has come", lambda: store.check(["shardwell/rank/1"]))
    others = [comes(store, rank) for rank in range(2)]
    error = first.exception(PATIENCE_S)
    assert isinstance(error, shardwell.RankTakenError)
    assert "another process has come as rank 1 of 3" in error.message
    met([*others, comes(store, 2)])


def test_a_loopback_address_among_machines_is_an_error_at_once(store: Any) -> None:
    machines = ["a", "a", "b"]
    for each in [comes(store, rank, machine=machine) for rank, machine in enumerate(machines)]:
        error = each.exception(PATIENCE_S)
        assert isinstance(error, shardwell.ArgumentError), error
        assert "rank 2 on other machines" in error.message
        assert "127.0.0.1 alone" in error.message
        assert "MASTER_ADDR" in error.message
    assert met([comes(store, rank) for rank in range(3)]).address.startswith("127.0.0.1:")


def test_a_store_that_fails_is_named() -> None:
    class Failing(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("the connection was closed")

    error = comes(Failing(), 1).exception(PATIENCE_S)
    assert isinstance(error, shardwell.ShardUnavailableError)
    assert "the connection was closed" in error.message
    assert "the store Failing" in error.message


def test_a_store_that_can_not_say_what_it_has() -> None:
    """As those of earlier versions of torch."""

    class Earlier:
        def __init__(self) -> None:
            within = dist.HashStore()
            self.set, self.get, self.wait = within.set, within.get, within.wait

    store = Earlier()
    first = met([comes(store, rank) for rank in range(3)])
    assert met([comes(store, rank) for rank in range(3)]).name != first.name


RESTARTED = """
import os, signal, torch, shardwell.torch
import torch.distributed as dist
from datetime import timedelta

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if (attempt, rank) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)  # while the others come together
dist.init_process_group("shardwell", timeout=timedelta(seconds=60))
if (attempt, rank) in ((0, 1), (2, 2)):
    os.kill(os.getpid(), signal.SIGKILL)
tensor = torch.ones(3)
dist.all_reduce(tensor)
os.write(1, b"attempt %d has the sum %d%c" % (attempt, tensor[0], 10))
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=3"]
    torchrun += ["--monitor-interval=0.1", f"--master-port={free_port()}"]
    with Program(*torchrun, str(script)) as program:
        assert program.end(LONG_S) == 0, program.log
    assert program.lines == ["attempt 3 has the sum 3"] * 3


APART = """
import sys, torch, shardwell.torch
import torch.distributed as dist
from datetime import timedelta

rank, how = int(sys.argv[1]), sys.argv[2]
options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
if how.startswith("host:"):
    address = how.partition(":")[2]
    options["store"] = dist.TCPStore(address, 29500, 2, rank == 0)
else:
    options["init_method"] = how
dist.init_process_group("shardwell", **options)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(int(tensor[0]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not can_be_made(), reason="this system allows no network namespaces")
def test_two_machines_without_master_addr(tmp_path: Path) -> None:
    file = f"file://{tmp_path / 'store'}"
    with two_machines() as (first, second):
        for how, variables in (
            (f"tcp://{first.host}:29500", {}),
            (f"host:{first.host}", {}),
            (file, {"MASTER_ADDR": first.host}),
        ):
            environment = {**variables, "SHARDWELL_INSECURE": "1"}
            ranks = [
                Program(*machine.python("-c", APART, str(rank), how), environment=environment)
                for rank, machine in enumerate((first, second))
            ]
            with ranks[0], ranks[1]:
                for each in ranks:
                    assert each.end(LONG_S) == 0, (how, each.log)
                    assert each.lines == ["2"], how
        # Rank 0 has no address that this test could name, and the other is not left to wait.
        ranks = [
            Program(*machine.python("-c", APART, str(rank), f"{file}.2"))
            for rank, machine in enumerate((first, second))
        ]
        with ranks[0], ranks[1]:
            for each in ranks:
                assert each.end(LONG_S) == 1
                assert "ArgumentError: rank 0 is on" in each.log[-1], each.log
                assert "$MASTER_ADDR=HOST" in each.log[-1]

"""Goal: the backend "shardwell" passes the suites of torch and Accelerate for process groups.

Method: torch's own `distributed_test` runs in two processes on our backend under the name of gloo,
so that it makes what gloo has to pass on a CPU (suite_program.py); what needs eight processes is
left to `make test-exhaustive`. Each test passes, is skipped by the suite for a reason that is
listed here, or is in the table, with ours. Accelerate's test scripts run as under torchrun
(accelerate_program.py). Skipped where torch is not installed (`make test-extras`).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from harness.programs.commands import Program

MISSING = [
    name for name in ("torch", "accelerate", "expecttest") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason="make test-extras installs them")
HERE = Path(__file__).parent
END_TIMEOUT_S = 400.0
NO_MESSAGES = "a group has collectives alone: send and recv are refused with an error that says so"
OF_GLOO = "monitored_barrier is of gloo's own class, which a process group in Python is not"
GPU_UNMARKED = "needs GPUs, and the suite does not skip it without"
WORDS = "asserts gloo's words; our error names the rank that is missing"
LEFT_OUT = {
    NO_MESSAGES: (
        "test_batch_isend_irecv_gloo", "test_batch_isend_irecv_gloo_tags", "test_irecv",
        "test_isend", "test_isend_autograd_profiler", "test_isend_torch_profiler",
        "test_send_recv", "test_send_recv_any_source",
        "test_send_recv_any_source_autograd_profiler", "test_send_recv_any_source_torch_profiler",
        "test_send_recv_autograd_profiler", "test_send_recv_torch_profiler",
        "test_send_recv_with_tag", "test_send_recv_with_tag_autograd_profiler",
        "test_send_recv_with_tag_torch_profiler",
    ),
    OF_GLOO: (
        "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_rank_0_timeout",
        "test_monitored_barrier_gloo_subgroup", "test_monitored_barrier_failure_order",
        "test_monitored_barrier_wait_all_ranks",
    ),
    GPU_UNMARKED: (
        "test_SyncBatchNorm_process_group", "test_all_to_all_cuda", "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda", "test_all_to_all_group_cuda",
        "test_batch_isend_irecv_mixed_backend_err", "test_batch_isend_irecv_op_err",
    ),
    WORDS: ("test_barrier_timeout_full_group", "test_barrier_timeout_group"),
    "asserts the name of the backend, which the suite is told is gloo": ("test_get_backend",),
    "asserts groups of exactly four processes": ("test_new_subgroups_with_group_param",),
}  # fmt: skip
NAMED = {name: reason for reason, names in LEFT_OUT.items() for name in names}
SMALL = "Skipped due to small world size."
BY_SUITE = re.compile(
    r"Need at least \d CUDA devices|CUDA is not available\.|no torchvision"
    r"|https://github\.com/pytorch/pytorch/issues/\d+|Test is failing, see https://\S+"
    rf"|{re.escape(SMALL)}"
)
"""Reasons for which the suite skips tests itself: hardware, or defects that torch has noted."""
PASSED_COUNT_MIN = 80
"""Of torch 2.13's 285 tests; most of the others need GPUs."""
OF_GPUS = "Accelerate joins uneven inputs on GPUs alone, as it warns"
SCRIPTS = {
    "test_ops": {},
    "test_sync": {},
    "test_script": {},
    "test_distributed_data_loop": {
        "test_can_join_uneven_inputs": OF_GPUS,
        "test_join_can_override_even_batches": OF_GPUS,
        "test_join_can_override_for_mixed_type_dataloaders": OF_GPUS,
        "test_join_raises_warning_for_iterable_when_overriding_even_batches": OF_GPUS,
        "test_stateful_dataloader": "needs torchdata",
        "test_stateful_dataloader_save_state": "needs torchdata",
    },
}
"""Scripts, each with the functions that are left out, and why."""
OTHER_SCRIPTS = {
    "test_cli": "prints the environment",
    "test_ddp_comm_hook": "passes GPUs' numbers to DDP",
    "test_merge_weights": "is of FSDP, whose parts of a model are not ours",
    "test_notebook": "starts processes by itself, with a backend by name from a list",
}
"""Those that do not run, and why."""


def torch_results(folder: Path, size: int, names: list[str]) -> dict[str, str]:
    """What became of each test of torch's suite, or of those with these names."""
    arguments = [str(HERE / "suite_program.py"), str(folder), str(size), *names]
    with Program(*arguments, environment={"OMP_NUM_THREADS": "1"}) as program:
        assert program.end(END_TIMEOUT_S) == 0, program.log[-20:]
    found = (line.split(" ", 1) for line in program.lines if line.startswith("test_"))
    return dict(found)


def check(results: dict[str, str]) -> list[str]:
    """The names of tests that passed; all others must have a reason."""
    wrong = {
        name: result
        for name, result in results.items()
        if name not in NAMED and not BY_SUITE.fullmatch(result.removeprefix("skipped: "))
        if result != "ok"
    }
    assert not wrong
    mended = [name for name in NAMED if results.get(name) == "ok"]
    assert not mended, f"these pass: take them from the table: {mended}"
    return [name for name, result in results.items() if result == "ok"]


def test_torchs_own_suite(tmp_path: Path) -> None:
    results = torch_results(tmp_path, 2, [])
    passed = check(results)
    assert len(passed) >= PASSED_COUNT_MIN, sorted(passed)
    assert set(NAMED) <= set(results)


@pytest.mark.exhaustive
def test_torchs_own_suite_with_groups_of_some_ranks(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "eight").mkdir()
    small = torch_results(tmp_path / "two", 2, [])
    names = [name for name, result in small.items() if result == f"skipped: {SMALL}"]
    passed = check(torch_results(tmp_path / "eight", 8, names))
    assert len(passed) >= 18, sorted(passed)


def test_accelerates_own_scripts(tmp_path: Path) -> None:
    found = importlib.util.find_spec("accelerate")
    assert found is not None
    folder = Path(str(found.origin)).parent / "test_utils" / "scripts"
    assert {path.stem for path in folder.glob("test_*.py")} == {*SCRIPTS, *OTHER_SCRIPTS}
    scripts = [":".join([name, *left_out]) for name, left_out in SCRIPTS.items()]
    arguments = [str(HERE / "accelerate_program.py"), str(tmp_path), "2", *scripts]
    with Program(*arguments) as program:
        assert program.end(END_TIMEOUT_S) == 0, program.log[-20:]
    assert program.lines == [f"{name} ok" for name in SCRIPTS], program.log[-40:]

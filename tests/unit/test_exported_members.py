"""Goal: `import shardwell` gives exactly the names that are promised, each error among them.

Method: the promise is spelled out here; the errors' tree is read from their module's docstring.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

import shardwell
from shardwell import errors

PROMISED = {
    "__version__",
    "connect",
    "export_checkpoint",
    "inspect_checkpoint",
    "join_group",
    "Centralized",
    "Group",
    "Ring",
    "Strategy",
    "Tree",
    "Tls",
    "tune_malloc",
    "DataParallelTrainer",
    "GradientSync",
    "GroupSync",
    "GroupedRate",
    "LearnerProgress",
    "LearnerStatus",
    "LeaveRequest",
    "LocalSync",
    "ServerSync",
    "StepResult",
    "ThreadedSync",
    "Update",
    "merge_updates",
    "split_batch",
    "Slice",
    "slice_of",
    "Checkpoint",
    "CheckpointFamily",
    "CheckpointParameter",
    "CheckpointTable",
    "Client",
    "ModelExport",
    "Outcome",
    "Outer",
    "Parameter",
    "ParameterSpec",
    "MemberStatus",
    "ParameterStatus",
    "RowOutcome",
    "Batch",
    "Samples",
    "SamplesStatus",
    "StepSamples",
    "ShardStatus",
    "Table",
    "TableExport",
    "TableSpec",
    "TableStatus",
    "TensorGroup",
    "TensorLayout",
    "TensorOptions",
    "TensorSpec",
    "OpenExchange",
    "Traffic",
    "Optimizer",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Average",
    "RMSProp",
    "RowWiseAdagrad",
    "FTRL",
    "Elastic",
    "Fragment",
    "Initializer",
    "Normal",
    "Uniform",
    "Zeros",
}
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, Exception)
}
TREE = re.findall(r"^\s*[│├└─ ]*(\w+Error)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
RETRYABLE = {
    "NotInitializedError",
    "InitSupersededError",
    "CorruptChunkError",
    "MembersAliveError",
    "DeadlineError",
    "WorkersMissingError",
    "SessionUnknownError",
    "ShardUnavailableError",
    "WorkerIdInUseError",
    "WorkerUnreachableError",
}


def test_all_is_what_is_promised() -> None:
    assert set(shardwell.__all__) == PROMISED | set(ERRORS)
    assert len(shardwell.__all__) == len(set(shardwell.__all__))


def test_public_names_are_all_in_all() -> None:
    public = {
        name
        for name in dir(shardwell)
        if not name.startswith("_") and not isinstance(getattr(shardwell, name), ModuleType)
    }
    assert public | {"__version__"} == set(shardwell.__all__)


def test_who_trains_with_shards_imports_nothing_of_groups() -> None:
    """All of it is imported on first use; a wrong name is an error as anywhere."""
    code = """if True:
        import sys, shardwell
        for name in shardwell._LATER:
            assert name not in vars(shardwell), name
        assert not [name for name in sys.modules if name.startswith("shardwell.group")]
        from shardwell import *
        assert join_group is shardwell.group.join.join_group
        try:
            shardwell.join_groups
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "module 'shardwell' has no attribute 'join_groups'\n", done.stderr


@pytest.mark.parametrize("name", sorted(PROMISED | set(ERRORS)))
def test_every_name_exists_and_says_what_it_is(name: str) -> None:
    member = getattr(shardwell, name)
    if name != "__version__":
        assert member.__doc__
        assert member.__doc__.strip()


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    assert {name for name, _ in TREE} == set(ERRORS)
    for name, builtin in TREE:
        bases = {base.__name__ for base in ERRORS[name].__mro__[1:]}
        assert "ShardwellError" in bases or name == "ShardwellError"
        assert not builtin or builtin in bases


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_carries_what_a_program_needs(name: str) -> None:
    bare = ERRORS[name]("what")
    assert (bare.message, str(bare)) == ("what", "what")
    assert (bare.shard_index, bare.worker_id, bare.parameter, bare.rank) == (None,) * 4
    assert bare.retryable == (name in RETRYABLE)
    full = ERRORS[name]("what", shard_index=1, worker_id="w", parameter="p", rank=2)
    assert (full.shard_index, full.worker_id, full.parameter, full.rank) == (1, "w", "p", 2)


def test_errors_are_caught_as_the_builtins_that_they_are() -> None:
    assert issubclass(shardwell.ArgumentError, ValueError)
    assert issubclass(shardwell.NonFiniteError, shardwell.ArgumentError)
    assert issubclass(shardwell.DeadlineError, TimeoutError)
    assert issubclass(shardwell.WorkersMissingError, shardwell.DeadlineError)
    assert issubclass(shardwell.ShardUnavailableError, ConnectionError)


def test_the_service_has_its_names_too() -> None:
    import shardwell_server

    for name in shardwell_server.__all__:
        assert getattr(shardwell_server, name).__doc__


def test_everything_says_what_it_is() -> None:
    """No public class leaves its repr to `object`."""
    silent = {
        name
        for name in PROMISED
        if inspect.isclass(kind := getattr(shardwell, name)) and kind.__repr__ is object.__repr__
    }
    assert silent == {"GradientSync", "Strategy"}  # which users never make

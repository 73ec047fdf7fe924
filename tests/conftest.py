"""Fixtures of all tests: clusters, clients, and the check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import shardwell
from harness.faults.proxy import PROXY_ADDRESSES
from harness.leaks import Resources, descriptor_count
from harness.polling import PATIENCE_S, eventually
from harness.programs import forkserver
from harness.tokens import TOKEN_FILE_VARIABLE, Tokens
from shardwell.transport import arena
from shardwell_server import LocalCluster

CHUNK_SIZE_BYTES = 256
"""Small, so that short parameters have many chunks too."""
CALL_TIMEOUT_S = 60.0
"""Of calls that should succeed: longer than any test waits, so that none ends for lack of time."""
_TOKENS = pytest.StashKey[Path]()
_WITH_LEAK_CHECK = {"integration", "fault"}
_WITH_EXTRAS = {"torch", "jax"}
"""Folders of tests that need more packages than `make test` installs."""
_DESCRIPTOR_COUNT_MAX = 100
"""Of a process between two tests; a state machine's stores, killed by being dropped, have many."""

# A shell that runs the tests in the background may ignore Ctrl-C, and with nohup hangups; children
# inherit that, but not what has a handler here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Ctrl-C is Python's own again: a command that a test ran in this process has a handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes says something about the machine, nothing about the code. The same
# examples each time, so that a failure is of the change that is tested; `make fuzz` draws others.
hypothesis.settings.register_profile("shardwell", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None)
hypothesis.settings.load_profile("shardwell")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Small payloads travel inline, so most tests would share no memory with their shards."""
    parser.addoption(
        "--share-all", action="store_true", help="share memory with shards for payloads of any size"
    )
    parser.addoption(
        "--with-tokens", action="store_true", help="all shards ask for tokens, and all bring one"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--share-all"):
        arena.SHARED_BYTES_MIN = 1
    os.environ.pop(TOKEN_FILE_VARIABLE, None)
    if config.getoption("--with-tokens"):
        # One token, which may do everything and is in the environment of all processes.
        directory = tempfile.TemporaryDirectory(prefix="tokens-")
        config.add_cleanup(directory.cleanup)
        tokens = Tokens(Path(directory.name))
        file = tokens.add("all", "admin", secret="that-of-all-tests")
        os.environ[TOKEN_FILE_VARIABLE] = str(file)
        config.stash[_TOKENS] = tokens.path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves to `make test-exhaustive` all cases of a `sampled` test but a few, evenly spread."""
    for item in items:
        if _WITH_EXTRAS.intersection(item.path.parts):
            item.add_marker(pytest.mark.extras)
    cases: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            name = item.nodeid.partition("[")[0]
            cases.setdefault((item.path, name), []).append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("sampled").args
        kept = {number * len(found) // count for number in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.exhaustive)


StartCluster = Callable[..., LocalCluster]
Connect = Callable[..., shardwell.Client]


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends() -> Iterator[None]:
    """With the session; it begins when it is first needed."""
    yield
    if forkserver.fork_server.cache_info().currsize:
        forkserver.fork_server().close()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a listening port."""
    if not _WITH_LEAK_CHECK.intersection(request.path.parts):
        yield
        return
    before = Resources.now()
    yield
    last: list[str] = []

    def is_clean() -> bool:
        last[:] = Resources.now().beyond(before)
        return not last

    with contextlib.suppress(AssertionError):
        eventually("everything is released", is_clean, timeout_s=PATIENCE_S)
    assert not last, f"left behind: {', '.join(last)}"


@pytest.fixture(autouse=True)
def _what_was_dropped_is_closed() -> Iterator[None]:
    """Collects garbage that has files open, so that it does not take them from later tests."""
    yield
    if descriptor_count() > _DESCRIPTOR_COUNT_MAX:
        gc.collect()


@pytest.fixture(autouse=True)
def _same_host_where_it_is_tested(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("same_host"):
        monkeypatch.delenv(arena.SAME_HOST_VARIABLE, raising=False)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[StartCluster]:
    """Starts clusters of real servers, in this process unless `processes=True`."""
    with contextlib.ExitStack() as stack:

        def start(shard_count: int = 2, **options: Any) -> LocalCluster:
            options.setdefault("chunk_size_bytes", CHUNK_SIZE_BYTES)
            options.setdefault("tokens", request.config.stash.get(_TOKENS, None))
            return stack.enter_context(LocalCluster(shard_count, **options))

        yield start


@pytest.fixture
def connect(cluster: StartCluster) -> Iterator[Connect]:
    """Connects workers by name; they are closed before the clusters of the test."""
    with contextlib.ExitStack() as stack:

        def connect_worker(target: str | LocalCluster, worker_id: str, **options: Any) -> Any:
            options.setdefault("timeout_s", CALL_TIMEOUT_S)
            address = target if isinstance(target, str) else target.target
            if not PROXY_ADDRESSES.isdisjoint(address.split(",")):
                options.setdefault("same_host", False)
            return stack.enter_context(shardwell.connect(address, worker_id=worker_id, **options))

        yield connect_worker

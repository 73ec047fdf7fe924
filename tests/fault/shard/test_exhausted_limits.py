"""Goal: where the system gives no more descriptors, one client is refused, by name; where it gives
no more threads, all are served.

Method: a shard in a process of its own, whose limits are lowered, while it runs, to a little more
than it has; then workers come. Those who are there train on; the shard stops in order.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
from harness.polling import PATIENCE_S, until_accepted
from harness.programs.commands import Program, ServingShard

pytestmark = pytest.mark.timeout(120)

SIZE = 100
ONES = np.ones(SIZE, np.float32)
NEWCOMER_COUNT = 60
_STACK_BYTES = 64 << 20
"""What a thread of the shard takes of the address space: so much that what is left when no further
one fits is more than all else needs."""
CLIENT = """
import os, resource, sys
import shardwell

held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096))
if sys.argv[2] == "before":
    shardwell.connect(sys.argv[1], worker_id="early").close()
while True:
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        break
for _ in range(int(sys.argv[3])):
    os.close(held.pop())
try:
    shardwell.connect(sys.argv[1], worker_id="w0")
except shardwell.LimitError as error:
    print(error.message, error.shard_index, flush=True)
while held:
    os.close(held.pop())
with shardwell.connect(sys.argv[1], worker_id="w0") as client:
    print(client.shard_count, flush=True)
"""


@contextlib.contextmanager
def large_stacks() -> Iterator[None]:
    """Threads of programs that the block starts have stacks of `_STACK_BYTES`."""
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)


def few_threads(pid: int) -> None:
    """Room for some stacks of the shard, and for all else."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (size_kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmSize:"))
    limit = size_kib * 1024 + 8 * _STACK_BYTES + _STACK_BYTES * 3 // 4
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def few_descriptors(pid: int) -> None:
    count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + 40, most))


def opened(client: shardwell.Client) -> shardwell.Parameter:
    """After an exchange, whose stream it keeps."""
    sgd = shardwell.SGD(learning_rate=1.0)
    model = client.parameter("model", size=SIZE, optimizer=sgd, mode="async", codec="fp32")
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(ONES)
    return model


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "files"])
def test_one_client_too_many(tmp_path: Path, connect, stored: bool) -> None:
    flags = [f"--data-dir={tmp_path / 'shard'}"] if stored else []
    with ServingShard(*flags) as shard:
        address = shard.address()
        clients = [connect(address, "w0")]
        models = [opened(clients[0])]
        few_descriptors(shard.pid)
        with pytest.raises(shardwell.LimitError, match="limit of open files") as refused:  # noqa: PT012
            for number in range(1, 300):
                clients.append(connect(address, f"w{number}", connect_timeout_s=10.0))
                models.append(opened(clients[-1]))
        assert refused.value.shard_index == 0
        exchange_count = len(models)
        assert exchange_count > 1
        for model in models:
            exchange_count += 1
            np.testing.assert_array_equal(model.exchange(ONES), -exchange_count * ONES)
        for client in clients[1:]:
            client.close()
        late = until_accepted(
            lambda: connect(address, "late"), shardwell.LimitError, timeout_s=PATIENCE_S
        )
        model = until_accepted(lambda: opened(late), shardwell.LimitError)
        np.testing.assert_array_equal(model.get_weights(), -(exchange_count + 1) * ONES)
        shard.send(signal.SIGTERM)
        assert shard.end() == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stored", [False, True], ids=["memory", "files"])
def test_a_shard_without_further_threads_serves_all(
    tmp_path: Path, connect, stored: bool, stop: signal.Signals
) -> None:
    """No call needs a thread of its own, however many wait, and it stops in order."""
    flags = [f"--data-dir={tmp_path / 'shard'}"] if stored else []
    with contextlib.ExitStack() as stack:
        with large_stacks():
            shard = stack.enter_context(ServingShard(*flags))
        address = shard.address()
        models = [opened(connect(address, "w0"))]
        few_threads(shard.pid)
        for number in range(1, NEWCOMER_COUNT):
            models.append(opened(connect(address, f"w{number}")))
        waiting = [model.get_weights_async(min_version=NEWCOMER_COUNT + 1) for model in models]
        np.testing.assert_array_equal(models[0].get_weights(), -NEWCOMER_COUNT * ONES)
        models[-1].put_gradient(ONES)
        for future in waiting:
            np.testing.assert_array_equal(future.result(PATIENCE_S), -(NEWCOMER_COUNT + 1) * ONES)
        shard.send(stop)
        assert shard.end() == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spare_count", [0, 1, 5])
@pytest.mark.parametrize("when", ["first", "before"])
def test_a_client_without_descriptors_says_so(when: str, spare_count: int) -> None:
    with (
        ServingShard() as shard,
        Program("-c", CLIENT, shard.address(), when, str(spare_count)) as client,
    ):
        message = client.read_line()
        assert "descriptors" in message
        assert "ulimit -n" in message
        assert message.endswith(" None")
        assert client.read_line() == "1"
        assert client.end() == 0

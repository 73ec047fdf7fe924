"""Goal: a shard that goes away and comes back costs time, and nothing else.

Method: real shards that keep what they have, each behind a proxy that cuts the line, refuses, slows
down and lets through again; whole numbers as gradients; at the end the weights of an undisturbed
run, bit for bit, and every chunk counted exactly once.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwell
from harness.faults.proxy import Direction, Proxy
from harness.oracles.parameter import integer_gradient
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import Program, ServingShard
from harness.programs.ports import free_port
from harness.threads import in_background, together

SGD = shardwell.SGD(learning_rate=0.5)
SIZE = 40_000
CHUNK_SIZE_BYTES = 1024
RATE = 0.25


@pytest.fixture
def running(cluster):
    return cluster(2, chunk_size_bytes=CHUNK_SIZE_BYTES)


@pytest.fixture
def proxies(running) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(address)) for address in running.addresses]


@pytest.fixture
def join(proxies, connect) -> Callable[..., tuple[shardwell.Client, shardwell.Parameter]]:
    target = ",".join(proxy.address for proxy in proxies)

    def join_as(index: int = 0, **options: Any) -> tuple[shardwell.Client, shardwell.Parameter]:
        client = connect(target, f"w{index}", timeout_s=options.pop("timeout_s", 30.0))
        return client, client.parameter("model", size=SIZE, optimizer=SGD, **options)

    return join_as


def _gradient(step: int, worker_index: int = 0) -> np.ndarray:
    return integer_gradient(worker_index, step, SIZE)


def _after(step_count: int, worker_count: int = 1, *, mode: str = "sync") -> np.ndarray:
    total = sum(_gradient(s, w) for s in range(step_count) for w in range(worker_count))
    return -0.5 * total / (worker_count if mode == "sync" else 1)


def _counted(running) -> int:
    with shardwell.connect(running.target, worker_id="observer") as observer:
        found = [parameter for shard in observer.status() for parameter in shard.parameters]
        return sum(each.counted_chunk_count for each in found if each.spec.name == "model")


def _chunk_count(running) -> int:
    """Of the whole parameter, from its definition: a slice a shard, fp16."""
    return 2 * -(-SIZE // 2 // (CHUNK_SIZE_BYTES // 2))


def _tried(proxy: Proxy) -> None:
    """Waits until the client has tried to come back, in vain."""
    before = proxy.refused_count
    eventually("it tries to connect", lambda: proxy.refused_count >= before + 2)


VERBS = {
    "first exchange": lambda client, model: model.exchange(_gradient(0)),
    "exchange": lambda client, model: model.exchange(_gradient(1)),
    "first put_gradient": lambda client, model: model.put_gradient(_gradient(0)),
    "put_gradient": lambda client, model: model.put_gradient(_gradient(1)),
    "get_weights": lambda client, model: model.get_weights(),
    "get_weights_async": lambda client, model: model.get_weights_async().result(PATIENCE_S),
    "init": lambda client, model: model.init(np.full(SIZE, 9, np.float32)),
    "set_learning_rate": lambda client, model: model.set_learning_rate(RATE),
    "set_learning_rate now": lambda client, model: model.set_learning_rate(RATE, now=True),
    "reopen": lambda client, model: model.reopen(),
    "parameter": lambda client, model: client.parameter("another", size=50, optimizer=SGD),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_goes_on_when_the_shard_is_back(running, proxies, join, verb, lost) -> None:
    client, model = join()
    is_first = verb.startswith("first")
    if verb != "init":
        model.init(np.zeros(SIZE, np.float32))
    if verb != "init" and not is_first:
        model.exchange(_gradient(0))
    proxies[lost].cut(refuse=True)
    calling = in_background(lambda: VERBS[verb](client, model))
    _tried(proxies[lost])
    assert not calling.done()
    proxies[lost].accept()
    result = calling.result(PATIENCE_S)
    if verb == "init":
        np.testing.assert_array_equal(model.get_weights(), 9)
        return
    if verb == "parameter":
        result.init(np.ones(50, np.float32))
        np.testing.assert_array_equal(result.get_weights(), 1)
    done = 1 if is_first or ("put" not in verb and verb != "exchange") else 2
    assert model.next_step == done
    if verb in ("get_weights", "get_weights_async"):
        np.testing.assert_array_equal(result, _after(1))
    np.testing.assert_array_equal(model.get_weights(min_version=done), _after(done))
    rate = RATE if verb.startswith("set_learning_rate") else 0.5
    np.testing.assert_array_equal(
        model.exchange(_gradient(done)), _after(done) - rate * _gradient(done)
    )
    assert _counted(running) == (done + 1) * _chunk_count(running)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("verb", ["exchange", "put_gradient"])
@pytest.mark.parametrize(
    ("direction", "byte_count"),
    [
        (Direction.TO_SHARD, 20_000),
        (Direction.TO_CLIENT, 1),
        (Direction.TO_CLIENT, 20_000),
    ],
)
def test_cut_in_the_middle_of_a_tensor(
    running, proxies, join, mode, verb, direction, byte_count
) -> None:
    """Two workers; both lose the shard, and both go on where they were."""
    step_count = 3
    if verb == "put_gradient" and direction is Direction.TO_CLIENT:
        byte_count = min(byte_count, 100)  # its answers are short

    def train(index: int) -> None:
        _, model = models[index]
        for step in range(step_count):
            getattr(model, verb)(_gradient(step, index))

    models = [join(index, worker_count=2, mode=mode) for index in (0, 1)]
    together([lambda m=m: m.init(np.zeros(SIZE, np.float32)) for _, m in models])
    proxies[1].cut_after(direction, byte_count)
    training = [in_background(partial(train, index)) for index in (0, 1)]
    eventually("the line is cut", lambda: proxies[1].cut_count)
    _tried(proxies[1])
    proxies[1].accept()
    for each in training:
        each.result(PATIENCE_S)
    for _, model in models:
        assert model.next_step == step_count
        weights = model.get_weights(min_version=step_count if mode == "sync" else 0)
        np.testing.assert_array_equal(weights, _after(step_count, 2, mode=mode))
    assert _counted(running) == 2 * step_count * _chunk_count(running)


def test_a_line_that_never_lasts_for_a_whole_tensor(running, proxies, join) -> None:
    """What was acknowledged is not sent again: each connection takes the exchange further."""
    _, model = join()
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(_gradient(0))
    proxies[1].slow_down(bytes_per_s=400_000)
    proxies[1].cut_after(Direction.TO_SHARD, 15_000, refuse=False, count=1_000)
    np.testing.assert_array_equal(model.exchange(_gradient(1)), _after(2))
    assert proxies[1].cut_count >= 2
    assert _counted(running) == 2 * _chunk_count(running)


def test_cuts_at_random_on_a_slow_line(running, proxies, join) -> None:
    """Two workers in synchronous mode, on lines with some latency, cut at no particular instant."""
    step_count = 6
    models = [join(index, worker_count=2)[1] for index in (0, 1)]
    together([lambda m=m: m.init(np.zeros(SIZE, np.float32)) for m in models])
    generator = np.random.default_rng(11)
    for proxy in proxies:
        proxy.slow_down(delay_s=0.002, bytes_per_s=3_000_000)

    def train(index: int) -> np.ndarray:
        for step in range(step_count):
            weights = models[index].exchange(_gradient(step, index))
        return weights

    training = [in_background(partial(train, index)) for index in (0, 1)]
    for _ in range(8):
        proxy = proxies[int(generator.integers(2))]
        mark = proxy.passed_bytes[Direction.TO_SHARD] + int(generator.integers(5_000, 60_000))
        eventually(
            "bytes flow",
            lambda p=proxy, m=mark: (
                p.passed_bytes[Direction.TO_SHARD] > m or all(each.done() for each in training)
            ),
        )
        proxy.cut()
    for each in training:
        np.testing.assert_array_equal(each.result(PATIENCE_S), _after(step_count, 2))
    assert _counted(running) == 2 * step_count * _chunk_count(running)


def _unavailable(call: Callable[[], Any]) -> shardwell.ShardUnavailableError | None:
    """What a call ends with; None where a busy machine made it end with another shard's silence."""
    with pytest.raises((shardwell.ShardUnavailableError, shardwell.DeadlineError)) as caught:
        call()
    is_it = isinstance(caught.value, shardwell.ShardUnavailableError)
    return caught.value if is_it else None


@pytest.mark.parametrize("lost", [0, 1])
def test_the_deadline_names_the_shard_and_the_client_stays_usable(proxies, join, lost) -> None:
    timeout_s = 0.4
    client, model = join()
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(_gradient(0))
    hasty, _ = join(1, timeout_s=timeout_s)
    proxies[lost].cut(refuse=True)
    calls = {
        "exchange": partial(model.exchange, _gradient(1)),
        "put_gradient": partial(model.put_gradient, _gradient(1)),
        "get_weights": model.get_weights,
        "init": partial(model.init, _gradient(1)),
        "set_learning_rate": partial(model.set_learning_rate, 0.5),
        "parameter": lambda timeout_s: hasty.parameter("another", size=50, optimizer=SGD),
    }
    for verb, call in calls.items():
        watch = Stopwatch()
        error = eventually(verb, partial(_unavailable, partial(call, timeout_s=timeout_s)))
        assert timeout_s - 0.05 < watch.elapsed_s, verb
        assert (error.shard_index, error.retryable) == (lost, True), verb
        for part in (f"shard {lost} at {proxies[lost].address}", "waited ", "timeout_s"):
            assert part in error.message, (verb, error.message)
    assert model.next_step == 1
    watch = Stopwatch()
    with pytest.raises(shardwell.ShardUnavailableError, match=f"shard {lost}"):
        client.status(timeout_s=PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S
    proxies[lost].accept()
    np.testing.assert_array_equal(model.exchange(_gradient(1)), _after(2))
    hasty.parameter("another", size=50, optimizer=SGD)


@pytest.mark.parametrize("verb", ["exchange", "put_gradient", "get_weights"])
def test_a_shard_that_is_there_again_and_says_nothing(proxies, join, verb) -> None:
    """As one does whose machine hangs: connections are taken, and nothing comes back."""
    _, model = join()
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(_gradient(0))
    proxies[1].stall()
    proxies[1].cut()
    calls = {
        "exchange": partial(model.exchange, _gradient(1)),
        "put_gradient": partial(model.put_gradient, _gradient(1)),
        "get_weights": model.get_weights,
    }
    watch = Stopwatch()
    with pytest.raises(shardwell.ShardwellError, match="shard 1 at") as caught:
        calls[verb](timeout_s=0.5)
    assert isinstance(caught.value, (shardwell.ShardUnavailableError, shardwell.DeadlineError))
    assert watch.elapsed_s < PATIENCE_S
    proxies[1].resume()
    calls[verb]()
    done = model.next_step
    np.testing.assert_array_equal(model.get_weights(min_version=done), _after(done))


@pytest.mark.parametrize(
    "verb", ["exchange", "put_gradient", "get_weights", "get_weights_async", "init", "parameter"]
)
def test_close_ends_the_wait_at_once(proxies, join, verb) -> None:
    client, model = join()
    if verb != "init":
        model.init(np.zeros(SIZE, np.float32))
        model.exchange(_gradient(0))
    proxies[1].cut(refuse=True)
    calling = in_background(lambda: VERBS[verb](client, model))
    _tried(proxies[1])
    assert not calling.done()
    watch = Stopwatch()
    client.close()
    assert isinstance(calling.exception(PATIENCE_S), shardwell.ClosedError), calling.exception()
    assert watch.elapsed_s < PATIENCE_S


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["exchange", "get_weights", "parameter"])
def test_ctrl_c_interrupts_the_wait(running, proxies, verb) -> None:
    target = ",".join(proxy.address for proxy in proxies)
    code = f"""
import numpy as np, shardwell, time
SGD = shardwell.SGD(learning_rate=0.5)
with shardwell.connect({target!r}, worker_id="w0", timeout_s=60) as client:
    model = client.parameter("model", size={SIZE}, optimizer=SGD)
    model.init(np.zeros({SIZE}, np.float32))
    model.exchange(np.ones({SIZE}, np.float32))
    print("ready", flush=True)
    calls = {{
        "exchange": lambda: model.exchange(np.ones({SIZE}, np.float32)),
        "get_weights": model.get_weights,
        "parameter": lambda: client.parameter("another", size=50, optimizer=SGD),
    }}
    try:
        while True:
            calls[{verb!r}]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("closed", flush=True)
"""
    with Program("-c", code) as program:
        assert program.read_line() == "ready"
        proxies[1].cut(refuse=True)
        _tried(proxies[1])
        watch = Stopwatch()
        program.send(signal.SIGINT)
        assert program.end() == 0
        assert program.lines[-2:] == ["interrupted", "closed"]
        assert watch.elapsed_s < PATIENCE_S


def test_calls_of_a_parameter_take_turns_while_one_waits(proxies, join) -> None:
    """The one whose turn does not come is told so at its own deadline; nothing is lost."""
    _, model = join()
    model.init(np.zeros(SIZE, np.float32))
    model.exchange(_gradient(0))
    proxies[1].cut(refuse=True)
    first = in_background(lambda: model.put_gradient(_gradient(1)))
    _tried(proxies[1])
    with pytest.raises(shardwell.DeadlineError, match="another thread"):
        model.put_gradient(_gradient(2), timeout_s=0.2)
    second = in_background(lambda: model.put_gradient(_gradient(2)))
    proxies[1].accept()
    assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (1, 2)
    np.testing.assert_array_equal(model.get_weights(min_version=3), _after(3))


def test_a_shard_killed_in_the_middle_comes_back_from_its_files(connect, tmp_path) -> None:
    """Two workers train on; a process is killed twice, and started again on its port."""
    step_count, flags = 30, (f"--data-dir={tmp_path}", f"--chunk-size-bytes={CHUNK_SIZE_BYTES}")
    models: list[shardwell.Parameter] = []

    def train(index: int) -> np.ndarray:
        for step in range(step_count):
            weights = models[index].exchange(_gradient(step, index))
        return weights

    with contextlib.ExitStack() as stack:
        port = free_port()
        shard = stack.enter_context(ServingShard(*flags, port=port))
        address = shard.address()
        for index in (0, 1):
            client = connect(address, f"w{index}", timeout_s=PATIENCE_S)
            models.append(client.parameter("model", size=SIZE, optimizer=SGD, worker_count=2))
        together([lambda m=m: m.init(np.zeros(SIZE, np.float32)) for m in models])
        training = [in_background(partial(train, index)) for index in (0, 1)]
        for kill_count in (1, 2):
            eventually("it trains", lambda n=kill_count: models[0].next_step >= 8 * n)
            shard.close()
            shard = stack.enter_context(ServingShard(*flags, port=port))
            assert shard.address() == address
        for each in training:
            np.testing.assert_array_equal(each.result(PATIENCE_S), _after(step_count, 2))

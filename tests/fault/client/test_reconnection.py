"""Goal: a shard that goes away and comes back costs time, and nothing else.

Method: real shards that keep what they have, each behind a proxy that cuts the line, refuses, slows
down and lets through again; whole numbers as gradients; at the end the values of an undisturbed
run, bit for bit, and every chunk or row counted exactly once.
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
from harness.data.trained import CHUNK_SIZE_BYTES, KINDS, SGD, SIZE, Trained, after, gradient
from harness.faults.proxy import Direction, Proxy
from harness.polling import PATIENCE_S, Stopwatch, eventually
from harness.programs.commands import Program, ServingShard
from harness.programs.ports import free_port
from harness.threads import in_background, together

KIND = pytest.mark.parametrize("kind", KINDS)
CUTS = [
    ("parameter", Direction.TO_SHARD, 20_000),
    ("parameter", Direction.TO_CLIENT, 1),
    ("parameter", Direction.TO_CLIENT, 20_000),
    ("table", Direction.TO_SHARD, 20_000),
    ("table", Direction.TO_SHARD, 800_000),
    ("table", Direction.TO_CLIENT, 1),
    ("table", Direction.TO_CLIENT, 200_000),
]
"""After how many bytes, which way."""


@pytest.fixture
def running(cluster):
    return cluster(2, chunk_size_bytes=CHUNK_SIZE_BYTES)


@pytest.fixture
def proxies(running) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(address)) for address in running.addresses]


@pytest.fixture
def join(proxies, connect) -> Callable[..., Trained]:
    target = ",".join(proxy.address for proxy in proxies)

    def join_as(kind: str = "parameter", index: int = 0, **options: Any) -> Trained:
        # All bytes are on the line, where they are counted and cut.
        client = connect(
            target, f"w{index}", timeout_s=options.pop("timeout_s", 30.0), same_host=False
        )
        return KINDS[kind](client, **options)

    return join_as


def _tried(proxy: Proxy) -> None:
    """Waits until the client has tried to come back, in vain."""
    before = proxy.refused_count
    eventually("it tries to connect", lambda: proxy.refused_count >= before + 2)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("kind", "verb", "lost"),
    [(kind, verb, lost) for kind in KINDS for lost in (0, 1) for verb in KINDS[kind].verbs],
)
def test_every_verb_goes_on_when_the_shard_is_back(
    running, proxies, join, kind, verb, lost
) -> None:
    trained = join(kind)
    trained.prepare(verb)
    proxies[lost].cut(refuse=True)
    calling = in_background(lambda: trained.call(verb))
    _tried(proxies[lost])
    assert not calling.done()
    proxies[lost].accept()
    done = trained.steps_after(verb)
    trained.check_result(verb, calling.result(PATIENCE_S), done)
    assert trained.handle.next_step == done
    trained.check(done)
    trained.check_next(done, trained.rate_after(verb))
    assert trained.counted(running.target) == trained.sent(done + 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("verb", ["exchange", "put"])
@pytest.mark.parametrize(("kind", "direction", "byte_count"), CUTS)
def test_cut_in_the_middle_of_a_step(
    running, proxies, join, kind, mode, verb, direction, byte_count
) -> None:
    """Two workers; both lose the shard, and both go on where they were."""
    step_count = 3
    if verb == "put" and direction is Direction.TO_CLIENT:
        byte_count = min(byte_count, 100)  # its answers are short

    def train(index: int) -> None:
        for step in range(step_count):
            both[index].step(verb, step, index)

    both = [join(kind, index, worker_count=2, mode=mode) for index in (0, 1)]
    together([each.initialize for each in both])
    proxies[1].cut_after(direction, byte_count)
    training = [in_background(partial(train, index)) for index in (0, 1)]
    eventually("the line is cut", lambda: proxies[1].cut_count)
    _tried(proxies[1])
    proxies[1].accept()
    for each in training:
        each.result(PATIENCE_S)
    for trained in both:
        assert trained.handle.next_step == step_count
        trained.check(step_count, 2, mode=mode)
    assert both[0].counted(running.target) == both[0].sent(step_count, 2)


@KIND
def test_a_relay_that_forgets_all_connections(running, proxies, join, kind, caplog) -> None:
    """As one that was started anew: no end comes, and no answer, over what was open. Pings that are
    not answered show it, long before the call's time is over, and a log line says who is silent."""
    trained = join(kind, timeout_s=13.0)
    trained.initialize()
    trained.step("exchange", 0)
    proxies[1].forget()
    trained.step("exchange", 1)
    trained.check(2)
    assert trained.counted(running.target) == trained.sent(2)
    lines = [each.getMessage() for each in caplog.records if "answered nothing" in each.message]
    (line,) = lines
    assert f"shard 1 of 2 at {proxies[1].address} has answered nothing for 2 s" in line
    assert f"exchange{'_rows' if kind == 'table' else ''} of {kind}" in line


def test_a_slow_link_is_a_cause_of_silence_that_the_log_names(proxies, join, caplog) -> None:
    """The question to a shard that lives takes longer than the worker waits for its answer."""
    trained = join(timeout_s=PATIENCE_S)
    trained.initialize()
    proxies[1].slow_down(delay_s=3.0)
    giving = in_background(lambda: trained.step("exchange", 0))
    (line,) = eventually(
        "the log names a silent shard",
        lambda: [each for each in caplog.messages if "answered nothing" in each],
    )
    assert "what this worker sends may fill a slow link" in line
    proxies[1].slow_down()
    giving.result(PATIENCE_S)
    trained.check(1)


def test_who_waits_for_other_workers_reads_of_no_shard(join, caplog) -> None:
    """All shards answer, however long a step is open."""
    trained = join(worker_count=2)
    trained.initialize()
    with pytest.raises(shardwell.WorkersMissingError):
        trained.step("exchange", 0, timeout_s=7.0)
    assert not [each for each in caplog.records if "answered nothing" in each.getMessage()]


def _unavailable(call: Callable[[], Any]) -> shardwell.ShardUnavailableError | None:
    """What a call ends with; None where a busy machine made it end with another shard's silence."""
    with pytest.raises((shardwell.ShardUnavailableError, shardwell.DeadlineError)) as caught:
        call()
    is_it = isinstance(caught.value, shardwell.ShardUnavailableError)
    return caught.value if is_it else None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lost", [0, 1])
@KIND
def test_the_deadline_names_the_shard_and_the_client_stays_usable(
    proxies, join, kind, lost
) -> None:
    timeout_s = 0.4
    trained = join(kind)
    trained.prepare("put")
    hasty = join(kind, 1, timeout_s=timeout_s)
    proxies[lost].cut(refuse=True)
    calls = {verb: partial(trained.call, verb, timeout_s=timeout_s) for verb in trained.timed}
    calls["open"] = partial(hasty.call, "open")
    for verb, call in calls.items():
        watch = Stopwatch()
        error = eventually(verb, partial(_unavailable, call))
        assert timeout_s - 0.05 < watch.elapsed_s, verb
        assert (error.shard_index, error.retryable) == (lost, True), verb
        assert getattr(error, kind) == ("another" if verb == "open" else "model"), verb
        for part in (f"shard {lost} at {proxies[lost].address}", "waited ", "timeout_s"):
            assert error.message.count(part) == 1, (verb, error.message)
    assert trained.handle.next_step == 1
    watch = Stopwatch()
    with pytest.raises(shardwell.ShardUnavailableError, match=f"shard {lost}"):
        trained.client.status(timeout_s=PATIENCE_S)
    assert watch.elapsed_s < PATIENCE_S
    proxies[lost].accept()
    trained.call("put")
    trained.check(2)
    hasty.call("open")


@KIND
@pytest.mark.parametrize("verb", ["exchange", "put", "get"])
def test_a_restarted_shard_that_says_nothing(proxies, join, kind, verb) -> None:
    """As one does whose machine hangs: connections are taken, and nothing comes back."""
    trained = join(kind)
    trained.prepare(verb)
    proxies[1].stall()
    proxies[1].cut()
    watch = Stopwatch()
    with pytest.raises(shardwell.ShardwellError, match="shard 1 at") as caught:
        trained.call(verb, timeout_s=0.5)
    assert isinstance(caught.value, (shardwell.ShardUnavailableError, shardwell.DeadlineError))
    assert watch.elapsed_s < PATIENCE_S
    proxies[1].resume()
    trained.call(verb)
    trained.check(trained.handle.next_step)


@KIND
@pytest.mark.parametrize("verb", ["exchange", "put", "get"])
def test_a_shard_that_says_nothing_on_a_stream_that_was_used(proxies, join, kind, verb) -> None:
    """The deadline holds, and the call may be made again."""
    trained = join(kind)
    trained.prepare(verb)
    trained.call("get")
    proxies[1].stall()
    watch = Stopwatch()
    with pytest.raises((shardwell.DeadlineError, shardwell.ShardUnavailableError), match="shard 1"):
        trained.call(verb, timeout_s=0.5)
    assert watch.elapsed_s < PATIENCE_S
    proxies[1].resume()
    trained.call(verb)
    trained.check(trained.handle.next_step)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        *(("parameter", v) for v in ("exchange", "put", "get", "get_async", "init", "open")),
        *(("table", verb) for verb in ("put", "exchange", "get", "prefetch", "row_ids")),
    ],
)
@pytest.mark.parametrize("what", ["client", "handle"])
def test_close_ends_the_wait_at_once(proxies, join, kind, verb, what) -> None:
    trained = join(kind)
    trained.prepare(verb)
    proxies[1].cut(refuse=True)
    calling = in_background(lambda: trained.call(verb))
    _tried(proxies[1])
    assert not calling.done()
    watch = Stopwatch()
    if what == "client" or verb == "open":  # which is the client's
        trained.client.close()
    else:
        trained.handle.close()
        proxies[1].accept()
    assert isinstance(calling.exception(PATIENCE_S), shardwell.ClosedError), calling.exception()
    assert watch.elapsed_s < PATIENCE_S


# Parameters.


def test_a_line_that_never_lasts_for_a_whole_tensor(running, proxies, join) -> None:
    """Acknowledged chunks are not sent again: each connection takes the exchange further."""
    trained = join()
    trained.prepare("exchange")
    model = trained.handle
    proxies[1].slow_down(bytes_per_s=400_000)
    proxies[1].cut_after(Direction.TO_SHARD, 15_000, refuse=False, count=1_000)
    np.testing.assert_array_equal(model.exchange(gradient(1)), after(2))
    assert proxies[1].cut_count >= 2
    assert trained.counted(running.target) == trained.sent(2)


def test_cuts_at_random_on_a_slow_line(running, proxies, join) -> None:
    """Two workers in synchronous mode, on lines with some latency, cut at no particular instant."""
    step_count = 6
    trained = [join("parameter", index, worker_count=2) for index in (0, 1)]
    models = [each.handle for each in trained]
    together([lambda m=m: m.init(np.zeros(SIZE, np.float32)) for m in models])
    generator = np.random.default_rng(11)
    for proxy in proxies:
        proxy.slow_down(delay_s=0.002, bytes_per_s=3_000_000)

    def train(index: int) -> np.ndarray:
        for step in range(step_count):
            weights = models[index].exchange(gradient(step, index))
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
        np.testing.assert_array_equal(each.result(PATIENCE_S), after(step_count, 2))
    assert trained[0].counted(running.target) == trained[0].sent(step_count, 2)


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
    """The call whose turn does not come fails at its own deadline; nothing is lost."""
    trained = join()
    trained.prepare("exchange")
    model = trained.handle
    proxies[1].cut(refuse=True)
    first = in_background(lambda: model.put_gradient(gradient(1)))
    _tried(proxies[1])
    with pytest.raises(shardwell.DeadlineError, match="another thread"):
        model.put_gradient(gradient(2), timeout_s=0.2)
    second = in_background(lambda: model.put_gradient(gradient(2)))
    proxies[1].accept()
    assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (1, 2)
    np.testing.assert_array_equal(model.get_weights(min_version=3), after(3))


def test_a_shard_killed_in_the_middle_comes_back_from_its_files(connect, tmp_path) -> None:
    """Two workers train on; a process is killed twice, and started again on its port."""
    step_count, flags = 30, (f"--data-dir={tmp_path}", f"--chunk-size-bytes={CHUNK_SIZE_BYTES}")
    models: list[shardwell.Parameter] = []

    def train(index: int) -> np.ndarray:
        for step in range(step_count):
            weights = models[index].exchange(gradient(step, index))
        return weights

    with contextlib.ExitStack() as stack:
        port = free_port()
        shard = stack.enter_context(ServingShard(*flags, port=port))
        address = shard.address()
        for index in (0, 1):
            client = connect(address, f"w{index}", timeout_s=PATIENCE_S, same_host=False)
            models.append(client.parameter("model", size=SIZE, optimizer=SGD, worker_count=2))
        together([lambda m=m: m.init(np.zeros(SIZE, np.float32)) for m in models])
        training = [in_background(partial(train, index)) for index in (0, 1)]
        for kill_count in (1, 2):
            eventually("it trains", lambda n=kill_count: models[0].next_step >= 8 * n)
            shard.close()
            shard = stack.enter_context(ServingShard(*flags, port=port))
            assert shard.address() == address
        for each in training:
            np.testing.assert_array_equal(each.result(PATIENCE_S), after(step_count, 2))

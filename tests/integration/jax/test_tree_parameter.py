"""Goal: a TreeParameter takes and gives pytrees, the same inside jit and outside, and says what it
can't.

Method: optax alone, on one process with all samples, is the oracle; a cluster with small chunks and
fp32 trains the same model by two workers with half the samples each. Skipped where JAX is not
installed (`make test-extras`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import shardwell
from harness.polling import BRIEF_S
from harness.programs.commands import Program
from harness.threads import together

jax = pytest.importorskip("jax", reason="JAX is not installed; it is not a dependency")
optax = pytest.importorskip("optax", reason="optax is not installed; it is not a dependency")
import jax.numpy as jnp  # noqa: E402

import shardwell.jax  # noqa: E402

STEPS = 100
TOGETHER_S = 240.0
"""Of threads that compile and train beside whatever else is tested there."""
SGD = shardwell.SGD(learning_rate=0.1, momentum=0.9)
ADAM_W = shardwell.AdamW(learning_rate=1e-2, weight_decay=0.1)
RULES = [
    (SGD, lambda: optax.sgd(0.1, momentum=0.9)),
    (ADAM_W, lambda: optax.adamw(1e-2, weight_decay=0.1)),
]


def first_weights(seed: int = 0) -> Any:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "hidden": {"kernel": jax.random.normal(keys[0], (20, 30)) / 4, "bias": jnp.zeros(30)},
        "head": [jax.random.normal(keys[1], (30, 3)) / 4, jnp.zeros(3)],
    }


def batches(count: int = STEPS, size: int = 16) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((count, size, 20), np.float32)
    return list(zip(inputs, rng.integers(0, 3, (count, size)), strict=True))


def loss_of(weights: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ weights["hidden"]["kernel"] + weights["hidden"]["bias"])
    logits = hidden @ weights["head"][0] + weights["head"][1]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets])


gradient_of = jax.grad(loss_of)


def ones(tree: Any) -> Any:
    return jax.tree_util.tree_map(jnp.ones_like, tree)


def trained_alone(optimizer: Any, data: list[tuple[Any, Any]]) -> Any:
    weights = first_weights()
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, inputs: Any, targets: Any) -> Any:
        updates, state = optimizer.update(gradient_of(weights, inputs, targets), state, weights)
        return optax.apply_updates(weights, updates), state

    for inputs, targets in data:
        weights, state = step(weights, state, inputs, targets)
    return weights


def assert_close(found: Any, expected: Any) -> None:
    for mine, its in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for mine, its in zip(*map(jax.tree_util.tree_leaves, (found, expected)), strict=True):
        assert mine.dtype == its.dtype
        assert np.asarray(mine).tobytes() == np.asarray(its).tobytes()


def tree_parameter(client: Any, weights: Any, rule: Any = SGD, **options: Any) -> Any:
    given = {"name": "net", "codec": "fp32", **options}
    return shardwell.jax.TreeParameter(client, weights=weights, optimizer=rule, **given)


@pytest.fixture
def client(cluster, connect) -> shardwell.Client:
    return connect(cluster(2), "w0")


@pytest.mark.parametrize(("rule", "theirs"), RULES)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_two_workers_train_as_optax_with_all_samples(
    cluster, connect, rule, theirs, is_compiled
) -> None:
    running, data = cluster(2), batches()

    def work(rank: int) -> Any:
        client = connect(running, f"w{rank}")
        net = tree_parameter(client, first_weights(), rule, worker_count=2)
        rows = slice(0, 8) if rank == 0 else slice(8, 16)
        computed = jax.jit(gradient_of)

        def step(weights: Any, inputs: Any, targets: Any) -> Any:
            return net.exchange(computed(weights, inputs, targets), sample_count=8)

        step = jax.jit(step) if is_compiled else step
        weights = net.get_weights()
        for inputs, targets in data:
            weights = step(weights, inputs[rows], targets[rows])
        return jax.block_until_ready(weights)

    first, second = together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S)
    assert_same_bits(first, second)
    assert_close(first, trained_alone(theirs(), data))


def test_inside_jit_and_outside_are_the_same_bits(client) -> None:
    gradients = [
        jax.tree_util.tree_map(lambda leaf, step=step: jnp.sin(leaf * 100 + step), first_weights())
        for step in range(5)
    ]
    found = []
    for name, exchange in (("eager", lambda net: net.exchange), ("jit", lambda net: None)):
        net = tree_parameter(client, first_weights(), ADAM_W, name=name)
        call = exchange(net) or jax.jit(net.exchange)
        found.append([call(gradient) for gradient in gradients] + [jax.jit(net.get_weights)()])
    for eager, compiled in zip(*found, strict=True):
        assert_same_bits(eager, compiled)


def test_a_program_of_many_steps(client) -> None:
    """lax.scan, in which a schedule and a number of samples are computed."""
    net, data = tree_parameter(client, first_weights()), batches(10)

    @jax.jit
    def epoch(weights: Any, inputs: Any, targets: Any) -> Any:
        def step(weights: Any, batch: Any) -> Any:
            number, *samples = batch
            gradient = gradient_of(weights, *samples)
            rate = 0.1 / (1 + number)
            new = net.exchange(gradient, learning_rate=rate, sample_count=jnp.int32(16))
            return new, number

        return jax.lax.scan(step, weights, (jnp.arange(10.0), inputs, targets))[0]

    weights = epoch(net.get_weights(), *map(np.stack, zip(*data, strict=True)))
    # optax multiplies the rate with the momentum after it, as the shards do.
    expected = trained_alone(optax.sgd(lambda step: 0.1 / (1 + step), momentum=0.9), data)
    assert_close(weights, expected)
    assert net.parameter.next_step == 10


class _Pair(NamedTuple):
    left: Any
    right: Any


def test_leaves_come_back_as_they_are(client) -> None:
    first = {
        "pair": _Pair(jnp.full((2, 3), 1.5, jnp.bfloat16), np.full(2, 2.5, np.float16)),
        "deep": [({"x": np.float64(3.5)}, jnp.zeros((0, 4)))],
        "none": None,
        "number": 4.5,
    }
    net = tree_parameter(client, first)
    names = [tensor.name for tensor in net.parameter.spec.layout]
    assert names == ["deep/0/0/x", "deep/0/1", "number", "pair/left", "pair/right"]
    found = net.get_weights()
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(first)
    for mine, its in zip(*map(jax.tree_util.tree_leaves, (found, first)), strict=True):
        assert isinstance(mine, jax.Array)
        assert mine.dtype == jnp.result_type(its)
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(its, np.float32))
    wide = jax.tree_util.tree_map(lambda leaf: np.ones(np.shape(leaf), np.float32), first)
    new = net.exchange(wide)
    assert new["pair"].left.dtype == jnp.bfloat16
    assert float(new["number"]) == pytest.approx(4.4)
    alone = tree_parameter(client, jnp.zeros(3), name="alone")
    assert [tensor.name for tensor in alone.parameter.spec.layout] == ["array"]


@pytest.mark.parametrize("size", [1, 16, 64, 1000, 4096])
def test_what_was_handed_out_never_changes(client, size) -> None:
    """JAX may take NumPy's memory as its own: no code may write there again."""
    net = tree_parameter(client, {"a": jnp.zeros(size), "b": jnp.zeros(size)}, shardwell.SGD(1.0))
    for call in (net.exchange, jax.jit(net.exchange)):
        before = [net.get_weights()] + [call(ones(net.get_weights())) for _ in range(3)]
        kept = [np.array(tree["a"]) for tree in before]
        for _ in range(3):
            call(ones(before[0]))
            net.get_weights()
        for tree, copied in zip(before, kept, strict=True):
            np.testing.assert_array_equal(tree["a"], copied)
            np.testing.assert_array_equal(tree["b"], copied)


def test_the_first_workers_weights_count_and_a_restarted_one_goes_on(cluster, connect) -> None:
    running = cluster(2)
    before = connect(running, "w0")
    net = tree_parameter(before, first_weights(0))
    weights = net.exchange(ones(first_weights()))
    before.close()
    again = tree_parameter(connect(running, "w0"), first_weights(1))
    assert_same_bits(again.get_weights(), weights)
    assert again.parameter.next_step == 1
    assert repr(again).startswith("TreeParameter(Parameter('net', size=")


def _less(tree: Any) -> Any:
    return {"head": tree["head"]}


def _more(tree: Any) -> Any:
    return {**tree, "extra": jnp.zeros(3)}


def _other_container(tree: Any) -> Any:
    return {**tree, "head": tuple(tree["head"])}


def _misshapen(tree: Any) -> Any:
    return {**tree, "head": [tree["head"][0].T, tree["head"][1]]}


def _integers(tree: Any) -> Any:
    return {**tree, "head": [tree["head"][0], jnp.arange(3)]}


def _text(tree: Any) -> Any:
    return {**tree, "head": [tree["head"][0], "bias"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_less, "gradient of 'net' lacks leaf 'hidden/bias'"),
        (_more, "gradient of 'net' has a leaf 'extra', which the weights have not"),
        (_other_container, "gradient of 'net' has the leaves of the weights in other containers"),
        (_misshapen, r"leaf 'head/0' must have shape \(30, 3\); got \(3, 30\)"),
        (_integers, "leaf 'head/1' is int32; only floating point"),
        (_text, "leaf 'head/1' must be an array of floating point numbers; got str"),
    ],
)
def test_what_is_no_gradient_is_refused_by_name(client, change, words) -> None:
    net = tree_parameter(client, first_weights())
    gradient, sent = change(first_weights()), client.traffic.sent_bytes
    calls = [net.exchange, net.put_gradient]
    if change is not _text:  # which jit itself refuses
        calls.append(jax.jit(net.exchange))
    for call in calls:
        with pytest.raises(shardwell.ArgumentError, match=words):
            call(gradient)
    assert client.traffic.sent_bytes == sent
    assert net.parameter.next_step == 0


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": {"b": 1.0}, "a/b": 2.0}, r"leaves \['a'\]\['b'\] and \['a/b'\] would both be tenso"),
        ({"": 1.0}, "a tensor's name must be 1 to 256 printable characters"),
        ({"line\n": 1.0}, r"a tensor's name must be .* got 'line\\n'"),
        ({"n": np.arange(3)}, "weights of 'net': leaf 'n' is int32"),
        ({"call": print}, "weights of 'net': leaf 'call' must be an array"),
        ({"none": None}, "weights of 'net' must have an array at least"),
        (_Pair(1.0, np.zeros(3, np.complex64)), "leaf 'right' is complex64"),
    ],
)
def test_trees_that_can_be_no_parameter(client, weights, words) -> None:
    with pytest.raises(shardwell.ArgumentError, match=words):
        tree_parameter(client, weights)
    assert not client.status()[0].parameters


def test_a_worker_with_another_tree_gets_an_error(client) -> None:
    tree_parameter(client, first_weights())
    with pytest.raises(shardwell.SpecMismatchError, match="'head/0'"):
        tree_parameter(client, {"hidden": first_weights()["hidden"]})


def test_what_can_not_be_done_inside_jit(client) -> None:
    net = tree_parameter(client, first_weights())
    with pytest.raises(shardwell.ArgumentError, match="put_gradient is called inside jit"):
        jax.jit(net.put_gradient)(first_weights())
    with pytest.raises(shardwell.ArgumentError, match="a TreeParameter is made inside jit"):
        jax.jit(lambda tree: tree_parameter(client, tree).get_weights())(first_weights())
    several = jax.tree_util.tree_map(lambda leaf: leaf[None], first_weights())
    with pytest.raises(ValueError, match="vmap"):
        jax.vmap(net.exchange)(several)
    assert net.parameter.next_step == 0


def test_gradients_are_put_and_waited_for(client) -> None:
    net = tree_parameter(client, first_weights())
    step = net.put_gradient(ones(first_weights()), learning_rate=1.0)
    weights = net.get_weights(min_version=step + 1)
    expected = jax.tree_util.tree_map(lambda leaf: leaf - 1.0, first_weights())
    assert_close(weights, expected)


def computed_late(tree: Any) -> Any:
    """The tree times 1, that is not there yet when a program that needs it is called."""
    size = 150
    slow = jax.jit(
        lambda x: jax.lax.fori_loop(0, 2000, lambda _, each: jnp.tanh(each @ x), x)[0, 0]
    )
    one = slow(jnp.eye(size)) * 0 + 1
    return jax.tree_util.tree_map(lambda leaf: leaf * one, tree)


@pytest.mark.parametrize("way", ["eager", "jit", "jit, late"])
@pytest.mark.parametrize("is_same", [True, False])
def test_a_call_that_failed_counts_once(cluster, connect, way, is_same) -> None:
    """A worker is missing; the call is made again, with the same gradient or the next one."""
    running = cluster(2)
    nets = [
        tree_parameter(connect(running, f"w{rank}"), {"w": jnp.zeros(500)}, SGD, worker_count=2)
        for rank in range(2)
    ]
    gradient = {"w": jnp.ones(500)}

    def exchange(rank: int, gradient: Any, timeout_s: float | None = None) -> Any:
        call = lambda tree: nets[rank].exchange(tree, timeout_s=timeout_s)  # noqa: E731
        given = computed_late(gradient) if way == "jit, late" else gradient
        return (call if way == "eager" else jax.jit(call))(given)

    for name in ("named", "again"):
        with pytest.raises(shardwell.WorkersMissingError, match="w1") as caught:  # noqa: SIM117
            with shardwell.jax.named_errors():
                exchange(0, gradient, BRIEF_S)
        assert caught.value.missing_worker_ids == ("w1",), name
    assert nets[0].parameter.next_step == 0
    own = [gradient] if is_same else [{"w": jnp.full(500, 3.0)}]
    others = [gradient] if is_same else [gradient, gradient]

    def work(rank: int) -> Any:
        with shardwell.jax.named_errors():
            return [exchange(rank, each) for each in (others if rank else own)][-1]

    first, second = together([lambda: work(0), lambda: work(1)], timeout_s=TOGETHER_S)
    assert_same_bits(first, second)
    means, weight, momentum = ([1.0] if is_same else [1.0, 2.0]), 0.0, 0.0
    for mean in means:
        momentum = 0.9 * momentum + mean
        weight -= 0.1 * momentum
    np.testing.assert_allclose(first["w"], np.full(500, weight), rtol=1e-5)
    assert nets[0].parameter.next_step == len(means)


def test_the_text_of_an_error_is_in_jaxs_own(client) -> None:
    net = tree_parameter(client, {"w": jnp.zeros(5)})
    call = jax.jit(net.exchange)
    with pytest.raises(Exception, match=r"NonFiniteError: .*element 2 of tensor 'w' is nan"):
        jax.block_until_ready(call({"w": jnp.zeros(5).at[2].set(np.nan)}))
    with shardwell.jax.named_errors():
        call({"w": jnp.ones(5)})
    assert net.parameter.next_step == 1


@pytest.mark.parametrize("is_late", [True, False])
def test_errors_by_name(client, is_late) -> None:
    net = tree_parameter(client, {"w": jnp.zeros(5)})
    call = jax.jit(net.exchange)
    bad = {"w": jnp.zeros(5).at[2].set(np.nan)}
    for _ in range(2):
        with pytest.raises(shardwell.NonFiniteError, match="element 2 of tensor 'w'") as caught:  # noqa: SIM117
            with shardwell.jax.named_errors():
                call(computed_late(bad) if is_late else bad)
        assert (caught.value.element_index, caught.value.parameter) == (2, "net")
    with shardwell.jax.named_errors():
        found = call({"w": jnp.ones(5)})
    np.testing.assert_allclose(found["w"], -0.1)
    with pytest.raises(KeyError, match="mine"), shardwell.jax.named_errors():
        raise KeyError("mine")
    with pytest.raises(shardwell.ArgumentError), shardwell.jax.named_errors():
        net.exchange({})


def test_a_failure_outside_of_the_block_does_not_last(client) -> None:
    """JAX gives it to every later ordered callback of the thread, until the block begins."""
    net = tree_parameter(client, {"w": jnp.zeros(5)})
    call = jax.jit(net.exchange)
    for _ in range(2):
        with pytest.raises(Exception, match="NonFiniteError"):
            jax.block_until_ready(call(computed_late({"w": jnp.full(5, np.nan)})))
    with shardwell.jax.named_errors():
        call({"w": jnp.ones(5)})
    assert net.parameter.next_step == 1


def test_an_interrupt_is_one(client, monkeypatch) -> None:
    net = tree_parameter(client, {"w": jnp.zeros(5)})

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(net.parameter, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt), shardwell.jax.named_errors():
            jax.jit(net.exchange)({"w": jnp.ones(5)})
    with shardwell.jax.named_errors():
        found = jax.jit(net.exchange)({"w": jnp.ones(5)})
    np.testing.assert_allclose(found["w"], -0.1)
    assert net.parameter.next_step == 1


def test_a_closed_client_raises(client) -> None:
    net = tree_parameter(client, {"w": jnp.zeros(5)})
    client.close()
    with pytest.raises(shardwell.ClosedError), shardwell.jax.named_errors():
        jax.jit(net.exchange)({"w": jnp.ones(5)})


def test_a_tree_trains_asynchronously(client) -> None:
    net = tree_parameter(client, {"w": jnp.zeros(5)}, shardwell.SGD(1.0), mode="async")
    weights = jax.jit(net.exchange)({"w": jnp.ones(5)})
    np.testing.assert_allclose(weights["w"], -1.0)


SEVERAL_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
import shardwell, shardwell.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

assert len(jax.devices()) == 2
mesh = Mesh(np.array(jax.devices()), ("batch",))
with shardwell.connect(sys.argv[1], worker_id="w0") as client:
    rule = shardwell.SGD(learning_rate=1.0)
    net = shardwell.jax.TreeParameter(client, "net", jnp.zeros(3), optimizer=rule, codec="fp32")
    rows = jax.device_put(np.full((8, 3), 2.0), NamedSharding(mesh, PartitionSpec("batch")))
    weights = jax.device_put(net.get_weights(), NamedSharding(mesh, PartitionSpec()))
    step = jax.jit(lambda w, x: net.exchange(jax.grad(lambda v: (x @ v).mean())(w)))
    with shardwell.jax.named_errors():
        weights = step(step(weights, rows), rows)
    weights = net.exchange(jax.device_put(weights * 0 + 1, jax.devices()[1]))
    print(net.parameter.next_step, weights)
"""


def test_programs_on_several_devices_exchange_once(cluster) -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with Program("-c", SEVERAL_DEVICES, cluster(2).target, environment=devices) as program:
        assert program.end(TOGETHER_S) == 0, program.log
    assert program.lines == ["3 [-5. -5. -5.]"]


def test_groups_are_named_by_path(client) -> None:
    groups = [shardwell.TensorGroup("hidden/*", frozen=True)]
    net = tree_parameter(client, first_weights(), shardwell.SGD(1.0), groups=groups)
    weights = net.exchange(ones(first_weights()))
    assert_same_bits(weights["hidden"], first_weights()["hidden"])
    np.testing.assert_allclose(weights["head"][1], -1.0)

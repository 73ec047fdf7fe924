"""Goal: a step's mean is sum(n_i * g_i) / sum(n_i), correctly rounded where the sum is exact.

Method: contributions go through add_to_sum and close_step as ParameterSlice sends them; the mean,
seen through Average, is compared with exact fractions, and elsewhere with float64.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.oracles.codec import decoded, encoded
from shardwell import SGD, Average, Optimizer
from shardwell.numerics import native
from shardwell.numerics.codec import CODECS, SUMMED_CODECS
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.numerics.update_rules import TensorRules
from shardwell.numerics.weighted_mean import shift_for
from shardwell_server.shard.parameter.averaging import (
    NOTHING,
    ChunkState,
    Contribution,
    Total,
    add_to_sum,
    close_full_step,
    close_step,
)
from shardwell_server.store.contract import ChunkRecord, Layout, Transition
from shardwell_server.store.memory import MemoryStore

NAMES = sorted(SUMMED_CODECS)
ALL_NAMES = sorted(CODECS)
LAYOUT = Layout(name="p", slice_size=1, chunk_element_count=1, with_sum=False)
CHANGE = MemoryStore().create(LAYOUT).change(0, Transition.CLOSE)


def contribution(name: str, values: np.ndarray, sample_count: int) -> Contribution:
    made, codec = Contribution(encoded(name, values), sample_count), CODECS[name]
    return made if codec.summed is codec else made.summed(codec)


def shifted(each: Contribution, total: Total, shift: int, worker_count: int) -> tuple[Total, int]:
    """As ParameterSlice does: the sum is scaled down for the heaviest contribution so far."""
    needed = shift_for(each.sample_count, worker_count)
    if total.factor == 0.0:
        return total, needed
    factor = math.ldexp(total.factor, min(shift - needed, 0))
    return total._replace(factor=factor), max(shift, needed)


def stepped(
    name: str,
    gradients: list[np.ndarray],
    sample_counts: list[int],
    *,
    optimizer: Optimizer | None = None,
) -> np.ndarray:
    """The weights after one step, from zero: the same whether the first gradient stays encoded."""
    both = [
        _stepped(name, gradients, sample_counts, optimizer or Average(), may_stay_encoded=may)
        for may in (False, True)
    ]
    assert both[0].tobytes() == both[1].tobytes()
    return both[0]


def _stepped(
    name: str,
    gradients: list[np.ndarray],
    sample_counts: list[int],
    optimizer: Optimizer,
    *,
    may_stay_encoded: bool,
) -> np.ndarray:
    """The sum starts as whatever the last step left."""
    size = gradients[0].size
    rule = TensorRules(optimizer)
    state = ChunkState(
        offset=0,
        weights=np.zeros(size, np.float32),
        gradient_sum=np.full(size, math.nan, np.float32) if len(gradients) > 1 else None,
        slots=(),
    )
    sent = [contribution(name, *each) for each in zip(gradients, sample_counts, strict=True)]
    total, shift = NOTHING, 0
    for each in sent[:-1]:
        assert state.gradient_sum is not None
        total, shift = shifted(each, total, shift, len(sent))
        total = add_to_sum(
            each,
            CODECS[name].summed,
            state.gradient_sum,
            total,
            CHANGE,
            shift=shift,
            may_stay_encoded=may_stay_encoded,
        )
    total, shift = shifted(sent[-1], total, shift, len(sent))
    close_step(
        sent[-1],
        CODECS[name].summed,
        state,
        rule,
        CHANGE,
        total=total,
        shift=shift,
        sample_total=sum(sample_counts),
        update_count=1,
        learning_rate=rule.learning_rate or 0.0,
    )
    return state.weights


def rounded(value: Fraction) -> float:
    """A fraction to the nearest float32, ties to even: integers alone."""
    if value == 0:
        return 0.0
    sign, value = (-1 if value < 0 else 1), abs(value)
    exponent = math.floor(math.log2(value)) - 23
    while value / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while value / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    return sign * math.ldexp(round(value / Fraction(2) ** exponent), exponent)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(NAMES), worker_count=st.integers(1, 5))
def test_the_mean_of_integers_is_correctly_rounded(
    data: st.DataObject, name: str, worker_count: int
) -> None:
    """Integers up to 200 times counts up to 2^12 add exactly, so one rounding is left."""
    size = data.draw(st.integers(1, 9))
    rows = st.lists(st.integers(-200, 200), min_size=size, max_size=size)
    values = [data.draw(rows) for _ in range(worker_count)]
    counts = [data.draw(st.sampled_from([0, 1, 2, 3, 7, 32, 100, 4096])) for _ in values]
    found = stepped(name, [np.array(row, np.float32) for row in values], counts)
    total = sum(counts)
    for element in range(size):
        weighted = sum(count * row[element] for count, row in zip(counts, values, strict=True))
        want = rounded(Fraction(weighted, total)) if total else 0.0
        assert found[element] == want


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize(
    "sample_counts",
    [[1, 1], [32, 32, 32, 32], [1, 2, 3], [0, 5], [5, 0], [7, 0, 0], [2**24, 2**24], [2**24, 1, 0]],
)
def test_the_mean_over_several_blocks(name: str, sample_counts: list[int]) -> None:
    random = np.random.default_rng(6)
    size = 2 * BLOCK_ELEMENT_COUNT + 77
    gradients = [random.standard_normal(size).astype(np.float32) for _ in sample_counts]
    received = [decoded(name, encoded(name, each)).astype(np.float64) for each in gradients]
    weights = np.array(sample_counts, np.float64) / sum(sample_counts)
    want = sum(weight * each for weight, each in zip(weights, received, strict=True))
    found = stepped(name, gradients, sample_counts)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("sample_count", [1, 3, 32, 100, 2**24])
def test_a_single_contribution_is_itself(name: str, sample_count: int) -> None:
    values = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    values[:4] = 1e-38, -3e38, 1e-44, 0.0
    received = decoded(name, encoded(name, values))
    assert stepped(name, [values], [sample_count]).tobytes() == received.tobytes()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("sample_count", [1, 3, 7, 100, 2**24])
@pytest.mark.parametrize("place", [(0, 1), (1, 0), (1, 1), (0, 2), (5, 0), (2, 3)])
def test_a_mean_of_one_is_that_one(name: str, sample_count: int, place: tuple[int, int]) -> None:
    """Whatever weighs nothing, before it and behind it, and however the step closes."""
    values = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    values[:4] = 1e-38, -3e38, 1e-44, 0.0
    given, counts = np.full_like(values, 9.0), [0] * place[0] + [sample_count] + [0] * place[1]
    gradients = [values if count else given for count in counts]
    received = decoded(name, encoded(name, values))
    assert stepped(name, gradients, counts).tobytes() == received.tobytes()
    size_max, rule = len(counts) + 3, Average()
    for may in (False, True) if name in NAMES else ():
        few = [each[:SIZE] for each in gradients]
        for found in closed_both_ways(
            name, few, counts, rule, step_size_max=size_max, may_stay_encoded=may
        ):
            want = decoded(name, encoded(name, values[:SIZE]))
            assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_no_samples_make_a_mean_of_zero(name: str, worker_count: int) -> None:
    gradients = [np.full(10, 3.0, np.float32)] * worker_count
    assert stepped(name, gradients, [0] * worker_count).tolist() == [0.0] * 10
    moved = stepped(name, gradients, [0] * worker_count, optimizer=SGD(learning_rate=1.0))
    assert moved.tolist() == [0.0] * 10


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_without_samples_has_no_effect(name: str) -> None:
    one, other = np.full(5, 2.0, np.float32), np.full(5, 1e30, np.float32)
    for order in ([one, other], [other, one]):
        counts = [0 if gradient is other else 4 for gradient in order]
        assert stepped(name, order, counts).tolist() == [2.0] * 5


@pytest.mark.parametrize("worker_count", [2, 256, 300])
def test_ones_do_not_stick(worker_count: int) -> None:
    """In a half-precision sum, adding 1.0 sticks at 256 (bf16) or 2048 (fp16)."""
    ones = np.ones(3, np.float32)
    for name in NAMES:
        assert stepped(name, [ones] * worker_count, [16] * worker_count).tolist() == [1.0] * 3


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_contributions_may_differ(name: str) -> None:
    gradients = [np.array([scale, -scale], np.float32) for scale in (2.0**40, 2.0**-40, 2.0**20)]
    want = float(np.float32(2.0**40 + 2.0**20)) / 4
    assert stepped(name, gradients, [1, 1, 2])[0] == (2.0**40 + 2.0**21) / 4
    assert stepped(name, gradients[:1] + gradients[2:], [2, 2])[0] * 2 == want * 4


@pytest.mark.parametrize("name", NAMES)
def test_small_gradients_with_powers_of_two_are_exact(name: str) -> None:
    tiny = np.array([2.0**-120, -(2.0**-121)], np.float32)
    assert stepped(name, [tiny] * 4, [8] * 4).tolist() == tiny.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_goes_to_the_optimizer(name: str) -> None:
    gradients = [np.full(6, value, np.float32) for value in (1.0, 2.0, 9.0)]
    found = stepped(name, gradients, [1, 1, 2], optimizer=SGD(learning_rate=0.5))
    assert found.tolist() == [-(1 + 2 + 18) / 4 / 2] * 6


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("counts", [[1000, 1001], [512, 512], [2**24 - 1, 1], [1, 2**24, 0, 3]])
@pytest.mark.parametrize("value", [1e37, 3e38, -3e38])
def test_a_mean_that_float32_holds_does_not_overflow_on_the_way(
    name: str, counts: list[int], value: float
) -> None:
    gradients = [np.array([value, 1.0], np.float32) for _ in counts]
    found = stepped(name, gradients, counts)
    np.testing.assert_allclose(found[0], value, rtol=2**-7)
    assert np.isfinite(found).all()


@settings(deadline=None, max_examples=300)
@given(
    counts=st.lists(
        st.sampled_from([0, 1, 2, 3, 5, 2**23, 2**24 - 1, 2**24]) | st.integers(0, 2**24),
        min_size=2,
        max_size=6,
    ).filter(any)
)
@example(counts=[1, 2**24])
@example(counts=[2**24, 1])
@example(counts=[2**24, 2**24 - 1, 1])
def test_the_mean_of_the_largest_values_is_finite(counts: list[int]) -> None:
    """2^24 + 1, say, is no float32, and neither is a sum that is rounded up by a hair."""
    largest = np.finfo(np.float32).max
    gradients = [np.array([largest, -largest, 1.0], np.float32) for _ in counts]
    found = stepped("fp32", gradients, counts)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, [largest, -largest, 1.0], rtol=1e-6)


@pytest.mark.parametrize("counts", [(512, 511), (2**24, 2**24), (1, 2**24)])
def test_zeros_with_the_largest_scale_stay_zeros(counts: tuple[int, int]) -> None:
    payload = np.array([0] * 8 + [127], np.uint8)
    first, last = (Contribution(payload, count) for count in counts)
    state = ChunkState(0, np.zeros(4, np.float32), np.zeros(4, np.float32), ())
    shift = max(shift_for(count, 2) for count in counts)
    codec = SUMMED_CODECS["fp16"]
    assert state.gradient_sum is not None
    total = add_to_sum(
        first, codec, state.gradient_sum, NOTHING, CHANGE, shift=shift, may_stay_encoded=False
    )
    close_step(
        last,
        codec,
        state,
        TensorRules(Average()),
        CHANGE,
        total=total,
        shift=shift,
        sample_total=sum(counts),
        update_count=1,
        learning_rate=0.0,
    )
    np.testing.assert_array_equal(state.weights, 0.0)


@pytest.mark.parametrize("computes", ["native", "NumPy"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 17, 2047, 2048, 2049, 5001, 2 * BLOCK_ELEMENT_COUNT + 3])
def test_a_gradient_that_waits_as_it_was_written_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, computes: str, name: str, size: int
) -> None:
    """Also where a sum is written over it: each block is read before what lies there is lost."""
    if computes == "NumPy":
        monkeypatch.setattr(native, "LIBRARY", None)
    random = np.random.default_rng(size)
    gradients = [random.standard_normal(size).astype(np.float32) * 10.0**n for n in range(4)]
    for counts in ([3, 5], [0, 5], [3, 0], [8, 8], [1, 2, 4], [3, 0, 5], [0, 3, 0], [3, 1, 4, 1]):
        stepped(name, gradients[: len(counts)], counts, optimizer=SGD(0.1))


# Steps that time closes, or the norm of their mean.

SIZE = 9
EXTREMES = [0.0, -0.0, 1e-45, -3e-42, 1.2e-38, 1e-20, 0.1, -1.0, 1 / 3, 65504.0, 1e19, -3e38]


def closed_both_ways(
    name: str,
    gradients: list[np.ndarray],
    sample_counts: list[int],
    optimizer: Optimizer,
    *,
    step_size_max: int,
    may_stay_encoded: bool,
) -> list[np.ndarray]:
    """The weights where the last gradient closes the step, and where it is closed from the sum."""
    found = []
    for is_closed_by_last in (True, False):
        rules = TensorRules(optimizer)
        state = ChunkState(
            offset=0,
            weights=np.full(SIZE, 0.5, np.float32),
            gradient_sum=np.full(SIZE, math.nan, np.float32),
            slots=tuple(np.full(SIZE, value, np.float32) for value in rules.initial_slots),
        )
        sent = [contribution(name, *each) for each in zip(gradients, sample_counts, strict=True)]
        total, shift, memory = NOTHING, 0, state.gradient_sum
        assert memory is not None
        options = {"learning_rate": rules.learning_rate or 0.0}
        for number, each in enumerate(sent):
            total, shift = shifted(each, total, shift, step_size_max)
            if is_closed_by_last and number == len(sent) - 1:
                close_step(
                    each,
                    SUMMED_CODECS[name],
                    state,
                    rules,
                    CHANGE,
                    total=total,
                    shift=shift,
                    sample_total=sum(sample_counts),
                    update_count=1,
                    is_closed_alike=True,
                    **options,
                )
            else:
                total = add_to_sum(
                    each,
                    SUMMED_CODECS[name],
                    memory,
                    total,
                    CHANGE,
                    shift=shift,
                    may_stay_encoded=may_stay_encoded,
                )
        if not is_closed_by_last:
            record = ChunkRecord(
                0,
                len(sent),
                sum(sample_counts),
                total_factor=total.factor,
                shift=shift,
                is_encoded=total.is_encoded,
            )
            close_full_step(state, SUMMED_CODECS[name], rules, CHANGE, record, **options)
        found.append(np.concatenate([state.weights, *state.slots]))
    return found


@pytest.mark.parametrize("computes", ["native", "NumPy"])
@pytest.mark.parametrize("may_stay_encoded", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_closed_from_its_sum_has_the_same_bits(
    name: str, may_stay_encoded: bool, computes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a last worker, too: time closes a step with the bits of its gradients."""
    if computes == "NumPy":
        monkeypatch.setattr(native, "LIBRARY", None)
    values = st.one_of(
        st.sampled_from(EXTREMES), st.floats(-1e4, 1e4, width=32), st.floats(-1e-30, 1e-30)
    )
    gradients = st.lists(values, min_size=SIZE, max_size=SIZE)
    weights = st.sampled_from([0, 1, 2, 3, 5, 7, 4096, 10**6 + 3, 2**24])

    @settings(deadline=None, max_examples=100)
    @given(
        st.lists(st.tuples(gradients, weights, st.integers(-120, 60)), min_size=1, max_size=4),
        st.sampled_from([Average(), SGD(learning_rate=1.0, momentum=0.5)]),
        st.sampled_from([4, 128, 8192]),
    )
    def check(
        given_: list[tuple[list[float], int, int]], optimizer: Optimizer, step_size_max: int
    ) -> None:
        with np.errstate(all="ignore"):
            scaled = [np.ldexp(np.float32(each), power) for each, _, power in given_]
            largest = np.finfo(np.float32).max
            sent = [np.clip(each, -largest, largest).astype(np.float32) for each in scaled]
            one, other = closed_both_ways(
                name,
                sent,
                [count for _, count, _ in given_],
                optimizer,
                step_size_max=step_size_max,
                may_stay_encoded=may_stay_encoded,
            )
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))

    check()

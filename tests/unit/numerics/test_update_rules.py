"""Goal: every optimizer does what types.proto's formulas say, in blocks of any size.

Method: many steps of float32 beside the formulas in float64 (harness/oracles/optimizers.py); blocks
are compared with the whole bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import os
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.oracles.optimizers import OPTIMIZERS, Oracle, gradients_of, run
from shardwell import SGD, Adam, AdamW, Average, Optimizer, TensorGroup, TensorLayout
from shardwell.numerics import elementwise
from shardwell.numerics.scratch import BLOCK_ELEMENT_COUNT
from shardwell.numerics.update_rules import (
    TensorRules,
    UpdateRule,
    exact_sum,
    power,
    powers,
)
from shardwell.specs.parameter import block_size_of

SIZE = 257
STEP_COUNT = 60


def first_weights(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(42).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_steps_follow_the_formulas(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    gradients = gradients_of(STEP_COUNT, SIZE)
    oracle = Oracle(optimizer, first_weights())
    rate = getattr(optimizer, "learning_rate", 0.0)
    for count, gradient in enumerate(gradients, start=1):
        oracle.update(gradient, rate)
        if count in (1, 2, 3, STEP_COUNT):
            weights, _ = run(optimizer, first_weights(), gradients[:count])
            np.testing.assert_allclose(weights, oracle.weights, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_of_each_update_is_the_one_given(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    gradients = gradients_of(12, SIZE, seed=1)
    rates = [0.1, 0.1, 0.05, 0.0, 0.3, 0.01, 0.01, 1.0, 0.2, 0.1, 0.1, 0.001]
    oracle = Oracle(optimizer, first_weights())
    for gradient, rate in zip(gradients, rates, strict=True):
        oracle.update(gradient, rate)
    weights, _ = run(optimizer, first_weights(), gradients, rates=rates)
    np.testing.assert_allclose(weights, oracle.weights, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_blocks_give_the_same_bits_as_the_whole(name: str) -> None:
    size = 2 * BLOCK_ELEMENT_COUNT + 1001
    gradients = gradients_of(3, size)
    whole = run(OPTIMIZERS[name], first_weights(size), gradients)
    cuts = (1, 2, 5, 12, 29, 64, 1000, 1003, BLOCK_ELEMENT_COUNT, 2 * BLOCK_ELEMENT_COUNT)
    in_blocks = run(OPTIMIZERS[name], first_weights(size), gradients, cuts=cuts)
    assert whole[0].tobytes() == in_blocks[0].tobytes()
    assert [slot.tobytes() for slot in whole[1]] == [slot.tobytes() for slot in in_blocks[1]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cuts_where_chunks_end_give_the_same_bits(name: str) -> None:
    """Chunks are multiples of 16 elements, however small chunk_size_bytes is."""
    gradients = gradients_of(5, 999)
    whole = run(OPTIMIZERS[name], first_weights(999), gradients)
    for size in (16, 32, 176):
        chunked = run(OPTIMIZERS[name], first_weights(999), gradients, cuts=range(size, 999, size))
        assert whole[0].tobytes() == chunked[0].tobytes()
        assert [slot.tobytes() for slot in whole[1]] == [slot.tobytes() for slot in chunked[1]]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    cuts=st.sets(st.integers(1, SIZE - 1), max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_cut_gives_the_same_bits(name: str, cuts: set[int], seed: int) -> None:
    gradients = gradients_of(4, SIZE, seed)
    whole = run(OPTIMIZERS[name], first_weights(), gradients)
    pieces = run(OPTIMIZERS[name], first_weights(), gradients, cuts=sorted(cuts))
    assert whole[0].tobytes() == pieces[0].tobytes()
    assert [slot.tobytes() for slot in whole[1]] == [slot.tobytes() for slot in pieces[1]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_of_zeros_at_the_start_moves_only_what_decays(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    if isinstance(optimizer, Average):
        return
    oracle = Oracle(optimizer, first_weights())
    zeros = np.zeros(SIZE, np.float32)
    oracle.update(zeros, optimizer.learning_rate)  # type: ignore[attr-defined]
    weights, _ = run(optimizer, first_weights(), [zeros])
    np.testing.assert_allclose(weights, oracle.weights, rtol=1e-6, atol=1e-6)
    if not getattr(optimizer, "weight_decay", 0.0):
        assert weights.tobytes() == first_weights().tobytes()


@pytest.mark.parametrize(
    ("optimizer", "slot_starts"),
    [
        ("average", ()),
        ("sgd", ()),
        ("sgd, dampening without momentum", ()),
        ("sgd, momentum", (0.0,)),
        ("adagrad", (0.0,)),
        ("adagrad, all", (0.5,)),
        ("rms_prop", (0.0,)),
        ("rms_prop, all", (0.0, 0.0)),
        ("adam", (0.0, 0.0)),
        ("adam_w", (0.0, 0.0)),
    ],
)
def test_the_state_that_is_kept(optimizer: str, slot_starts: tuple[float, ...]) -> None:
    assert UpdateRule(OPTIMIZERS[optimizer]).initial_slots == slot_starts


def test_average_is_the_gradient_itself() -> None:
    (gradient,) = gradients_of(1, SIZE)
    weights, _ = run(Average(), first_weights(), [gradient])
    assert weights.tobytes() == gradient.tobytes()
    assert UpdateRule(Average()).learning_rate is None


def test_sgd_with_integers_is_exact() -> None:
    weights = np.arange(SIZE, dtype=np.float32)
    gradients = [np.full(SIZE, step, np.float32) for step in range(10)]
    found, _ = run(SGD(learning_rate=0.5), weights, gradients)
    assert (found == np.arange(SIZE) - 22.5).all()


@pytest.mark.parametrize("clip_value", [0.5, 1e-30, 1e30])
def test_clipping_is_elementwise(clip_value: float) -> None:
    (gradient,) = gradients_of(1, SIZE)
    limit = float(np.float32(clip_value))
    weights, _ = run(Average(clip_value=clip_value), first_weights(), [gradient])
    want = [min(max(value, -limit), limit) for value in gradient.tolist()]
    assert weights.tolist() == want


@pytest.mark.parametrize("optimizer", [Average(clip_value=1e300), Average(clip_value=1e-300)])
def test_a_clip_value_beyond_float32_clips_as_it_says(optimizer: Optimizer) -> None:
    gradient = np.array([1.0, -2.0, 0.0, 3e38], np.float32)
    weights, _ = run(optimizer, np.zeros(4, np.float32), [gradient])
    limit = optimizer.clip_value
    want = [min(max(value, -limit), limit) for value in gradient.tolist()]
    np.testing.assert_allclose(weights, want, atol=1e-37)


def test_adams_first_step_is_the_rate_in_the_gradients_direction() -> None:
    gradient = np.array([1e-4, -3.0, 2000.0, 0.0], np.float32)
    weights, _ = run(Adam(learning_rate=0.5, epsilon=1e-12), np.zeros(4, np.float32), [gradient])
    np.testing.assert_allclose(weights, [-0.5, 0.5, -0.5, 0.0], rtol=1e-5)


def test_adam_after_a_million_updates_needs_no_correction() -> None:
    rule = UpdateRule(Adam(learning_rate=0.5, beta1=0.5, beta2=0.25, epsilon=1e-8))
    weights, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    rule.apply(weights, one.copy(), (one.copy(), one.copy()), update_count=10**6, learning_rate=0.5)
    np.testing.assert_allclose(weights, [-0.5], rtol=1e-6)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="no update rule"):
        UpdateRule(Optimizer())


SHAPES = {"w": (7, 5), "none": (0,), "b": (7,), "frozen": (11,), "head": (3,), "scale": ()}
GROUPS = [
    TensorGroup("b", weight_decay=0.0),
    TensorGroup("frozen", frozen=True),
    TensorGroup(["head", "*"], learning_rate_factor=0.25),
]
LAYOUT = TensorLayout.of(SHAPES).with_groups(GROUPS)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if "average" not in name])
@pytest.mark.parametrize("cut", [1, 8, 13, LAYOUT.size])
def test_tensors_with_options_are_as_if_each_were_alone(optimizer: str, cut: int) -> None:
    """Bit for bit, whatever blocks it is cut into."""
    of = OPTIMIZERS[optimizer]
    rules, size = TensorRules(of, LAYOUT), LAYOUT.size
    state = [np.resize(first_weights(), size).astype(np.float32)]
    state += [np.full(size, start, np.float32) for start in rules.initial_slots]
    alone = [array.copy() for array in state]
    untouched = state[0].copy()
    for count, gradient in enumerate(gradients_of(5, size), 1):
        options = {"update_count": count, "learning_rate": rules.learning_rate}
        for start in range(0, size, cut):
            weights, *slots = (array[start : start + cut] for array in state)
            given = gradient[start : start + cut].copy()
            arrays = (weights, given, None, *slots)
            for part, operations in rules.operations(start, weights.size, **options):
                elementwise.run(operations, arrays, part.start, part.stop)
        for tensor in LAYOUT:
            weights, *slots = (array[tensor.offset : tensor.stop] for array in alone)
            given = gradient[tensor.offset : tensor.stop].copy()
            own = of if tensor.name != "b" else dataclasses.replace(of, weight_decay=0.0)
            factor = 1.0 if tensor.name == "b" else 0.25
            rate = {"learning_rate": rules.learning_rate * factor}
            if tensor.size and tensor.name != "frozen":
                UpdateRule(own).apply(weights, given, tuple(slots), **{**options, **rate})
    for found, expected in zip(state, alone, strict=True):
        assert found.tobytes() == expected.tobytes()
    frozen = LAYOUT.by_name["frozen"]
    still = slice(frozen.offset, frozen.stop)
    assert state[0][still].tobytes() == untouched[still].tobytes()
    assert np.array_equal(state[0], untouched) == (rules.learning_rate == 0.0)


def test_the_largest_decay_into_state_counts() -> None:
    layout = TensorLayout.of(SHAPES).with_groups([TensorGroup("b", weight_decay=3.0)])
    assert TensorRules(Adam(weight_decay=0.5), layout).decay_into_state == 3.0
    assert TensorRules(Adam(weight_decay=5.0), layout).decay_into_state == 5.0
    assert TensorRules(AdamW(weight_decay=5.0), layout).decay_into_state == 0.0


BASES = [0.0, 5e-324, 0.1, 0.5, 0.9, 0.98, 0.999, 0.9999, 1.0 - 2.0**-53]


@pytest.mark.parametrize("base", BASES)
def test_powers_are_those_of_exact_arithmetic(base: float) -> None:
    """Rounded once below 256, and twice more with each digit to that base."""
    for count in (*range(40), 63, 255):
        want = Fraction(base) ** count
        assert power(base, count) == float(want) or power(base, count) <= want < 2.0**-60
    with localcontext(prec=80):
        for count in (256, 257, 1000, 65_535, 65_536, 10**6 + 3, 2**40 + 12_345, 2**62):
            exact = Decimal(base) ** count
            error = abs(Decimal(power(base, count)) - exact)
            assert error <= exact * Decimal(2) ** -49 + Decimal(2) ** -68


def test_powers_of_many_counts_are_those_of_each() -> None:
    counts = np.random.default_rng(1).integers(1, 10**6, 3000)
    counts[::3] %= 300
    for base in BASES:
        assert powers(base, counts).tolist() == [power(base, count) for count in counts.tolist()]


def sum_of_part(squares: list[float]) -> float:
    """A sum in NumPy's order: eight sums of each eighth number, halves above 128."""
    if len(squares) > 128:
        half = len(squares) // 2 // 8 * 8
        return sum_of_part(squares[:half]) + sum_of_part(squares[half:])
    whole = len(squares) // 8 * 8
    eighths = [functools.reduce(operator.add, squares[n:whole:8], 0.0) for n in range(8)]
    a, b, c, d, e, f, g, h = eighths
    return functools.reduce(
        operator.add, squares[whole:], ((a + b) + (c + d)) + ((e + f) + (g + h))
    )


def exact(numbers: list[float]) -> Fraction:
    return sum(map(Fraction, numbers), Fraction(0))


def model_of(sizes: list[int]) -> TensorLayout:
    """Runs of two tensors that are trained, two that are frozen, and one with another decay."""
    shapes = {f"{'aabbc'[n % 5]}{n}": (size,) for n, size in enumerate(sizes)}
    groups = [TensorGroup("b*", frozen=True), TensorGroup("c*", weight_decay=0.5)]
    return TensorLayout.of(shapes).with_groups(groups)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(
        st.sampled_from([1, 2, 7, 64, 255, 256, 257, 1000, 40_000]), min_size=5, max_size=9
    ),
    cuts=st.lists(st.floats(0, 1), max_size=7),
    powers_of_two=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_squares_are_the_same_for_all_cuts_between_blocks(
    sizes: list[int], cuts: list[float], powers_of_two: int, seed: int
) -> None:
    """Exactly, and those of plain sums of parts, which are what a block has of a run of tensors."""
    layout = model_of(sizes)
    rules, size = TensorRules(Adam(), layout), layout.size
    random = np.random.default_rng(seed)
    scales = np.exp2(random.integers(-powers_of_two, powers_of_two + 1, size))
    values = (random.standard_normal(size) * scales).astype(np.float32)
    block = block_size_of(size)
    found = rules.squares(0, values, block)
    edges = sorted({0, size} | {int(cut * size) // block * block for cut in cuts})
    by_slice = [rules.squares(a, values[a:b], block) for a, b in itertools.pairwise(edges)]
    assert exact_sum([each for squares in by_slice for each in squares]) == found
    assert all(len(squares) <= 16 for squares in by_slice)

    sums = []
    for letter, tensors in itertools.groupby(layout, lambda tensor: tensor.name[0]):
        of_run = [(tensor.offset, tensor.stop) for tensor in tensors]
        first, last = of_run[0][0], of_run[-1][1]
        inner = range((first // block + 1) * block, last, block)
        for start, end in itertools.pairwise([first, *inner, last]):
            if letter != "b":
                sums.append(sum_of_part([float(each) ** 2 for each in values[start:end].tolist()]))
    assert exact(found) == exact(sums)
    assert found[0] == math.fsum(sums)


@pytest.mark.parametrize("numbers", [[], [0.0, 0.0], [1e308], [1.0, 2.0**-60, 2.0**-200, 3.0]])
def test_an_exact_sum_is_that_of_few_numbers(numbers: list[float]) -> None:
    found = exact_sum(numbers)
    assert exact(found) == exact(numbers)
    assert found[0] == math.fsum(numbers)
    assert exact_sum([math.inf, 1.0]) == [math.inf]
    assert str(exact_sum([math.inf, math.nan])) == "[nan]"


_DIGEST = """
import numpy as np
from shardwell.numerics.update_rules import powers, squared_norm
random = np.random.default_rng(0)
for size in (1, 9, 300, 8191, 100_003):
    print(squared_norm(random.standard_normal(size).astype(np.float32)).hex())
print(powers(0.999, np.arange(1, 100_000)).sum().hex())
"""


def test_norms_and_powers_have_the_same_bits_with_other_kernels() -> None:
    """As far as this processor has them: without native code, in NumPy, BLAS and libm of others."""
    others: list[dict[str, str]] = [
        {"SHARDWELL_NATIVE": "off"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR X86_V3"},
        {"OPENBLAS_CORETYPE": "Prescott", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"},
    ]
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _DIGEST],
            env={**os.environ, **other},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for other in [{}, *others]
    ]
    assert found[0].count("\n") == 6
    assert set(found) == {found[0]}

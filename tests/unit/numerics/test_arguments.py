"""Goal: arrays that can be used pass uncopied, all others are refused with a reason.

Method: arrays of every layout, dtype and shape that callers come with; where a view is promised,
memory is compared.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from shardwell.errors import ArgumentError, NonFiniteError
from shardwell.numerics.arguments import as_flat, as_output, check_finite
from shardwell.table.batch import as_gradients, as_ids

LARGE = 2**19 + 5
"""Elements: more than are looked at in one go."""


class Tensor:
    """What offers an array without being one, as a CPU tensor does."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4", ">f8"])
@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4), (1, 24), (24, 1)])
def test_contiguous_values_are_uncopied(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(24).astype(dtype).reshape(shape)
    flat = as_flat("gradient", values, 24)
    assert flat.shape == (24,)
    assert flat.tolist() == list(range(24))
    assert np.shares_memory(flat, values)


def test_other_layouts_are_read_in_element_order() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (values.T, values[::-1], values[:, ::2], np.asfortranarray(values)):
        flat = as_flat("gradient", array, array.size)
        assert flat.tolist() == [value for row in array.tolist() for value in row]
    assert as_flat("gradient", np.float32(3).reshape(()), 1).tolist() == [3.0]


def test_what_offers_an_array_is_taken() -> None:
    values = np.arange(6, dtype=np.float32)
    assert np.shares_memory(as_flat("gradient", Tensor(values), 6), values)
    assert as_flat("gradient", np.ma.masked_array(values), 6).tolist() == values.tolist()


class OtherTensor:
    """What offers an array and fails, as torch's does on a GPU.

    As torch's, it has a method `size`, where arrays have a number.
    """

    dtype = "torch.float32"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def size(self) -> tuple[int, ...]:
        return (3,)

    def detach(self) -> OtherTensor:
        return self


@pytest.mark.parametrize("size", [3, None])
def test_a_tensor_that_gives_no_array_is_refused_with_its_reason(size: int | None) -> None:
    expected = r"got OtherTensor of torch.float32, .*cuda:0 .*; pass tensor.detach\(\).cpu\(\)"
    with pytest.raises(ArgumentError, match=expected):
        as_flat("gradient", OtherTensor(), size)
    with pytest.raises(ArgumentError, match=expected):
        as_gradients(OtherTensor(), (3,), 1, "users")
    with pytest.raises(ArgumentError, match=r"ids must be an array of integers; .*cuda:0"):
        as_ids(OtherTensor(), None)


@pytest.mark.parametrize("tensor", [OtherTensor(), Tensor(np.zeros(3, np.float32))])
def test_a_tensor_is_no_array_to_write_in_place(tensor: Any) -> None:
    kind = type(tensor).__name__
    for refuse in (
        lambda: as_output(tensor, None, "array"),
        lambda: as_output(tensor, 3),
    ):
        with pytest.raises(ArgumentError, match=f"float32 NumPy array.*; got {kind}") as caught:
            refuse()
        assert "method" not in str(caught.value)


@pytest.mark.extras
def test_real_tensors_are_taken_or_refused() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(3, dtype=torch.float32)
    assert np.shares_memory(as_flat("gradient", values, 3), values.numpy())
    for taken in (values, values.clone().requires_grad_()):
        assert np.shares_memory(as_flat("gradient", taken, 3), taken.detach().numpy())
        assert np.shares_memory(as_output(taken, None, "array"), taken.detach().numpy())
    for converted in (values.bfloat16(), values.half(), values.double()):
        assert as_flat("gradient", converted, 3).tolist() == [0, 1, 2]
        with pytest.raises(ArgumentError, match=r"must be a writable .*; got"):
            as_output(converted, None, "array")
    for refused, remedy in ((values.to_sparse(), "to_dense"), (values.to("meta"), "cpu")):
        with pytest.raises(ArgumentError, match=rf"got Tensor of torch.float32, .*\.{remedy}\(\)"):
            as_flat("gradient", refused, 3)
        with pytest.raises(ArgumentError, match="got Tensor of torch"):
            as_output(refused, None, "array")


@pytest.mark.parametrize("values", [None, 1.0, "ab", {1: 2}, range(3)])
def test_what_is_no_array_is_refused(values: Any) -> None:
    kind = type(values).__name__
    with pytest.raises(ArgumentError, match=f"gradient must be a NumPy array.*got {kind}"):
        as_flat("gradient", values, 2)


@pytest.mark.parametrize("values", [[1.0, 2.5], (1, 2.5), [[1], [2.5]], [np.float64(1), 2.5]])
def test_lists_of_numbers_are_arrays(values: Any) -> None:
    found = as_flat("gradient", values, 2)
    assert found.dtype == np.float32
    assert found.tolist() == [1.0, 2.5]


@pytest.mark.parametrize("values", [["1", "2"], [[1], [2, 3]], [None, 1.0], [True], [1j, 2]])
def test_lists_of_what_is_no_number_are_refused(values: Any) -> None:
    with pytest.raises(ArgumentError, match=r"must be an .* or a list of numbers; got a list"):
        as_flat("gradient", values, 2)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "object", "U1"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ArgumentError, match=r"gradient must be float32.*astype"):
        as_flat("gradient", np.zeros(4).astype(dtype), 4)


def test_structured_and_long_floats_are_refused() -> None:
    for array in (np.zeros(4, [("a", "f4")]), np.zeros(4, np.longdouble)):
        with pytest.raises(ArgumentError, match="must be float32"):
            as_flat("gradient", array, 4)


def test_masked_elements_are_refused() -> None:
    masked = np.ma.masked_array(np.zeros(3, np.float32), mask=[False, True, False])
    with pytest.raises(ArgumentError, match="masked"):
        as_flat("gradient", masked, 3)


@pytest.mark.parametrize("shape", [(0,), (23,), (25,), (5, 5), ()])
def test_another_number_of_elements_is_refused(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    with pytest.raises(ArgumentError, match=rf"must have 24 elements; got {size} in shape"):
        as_flat("gradient", np.zeros(shape, np.float32), 24)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
def test_an_output_is_the_callers_own_memory(shape: tuple[int, ...]) -> None:
    out = np.zeros(shape, np.float32)
    flat = as_output(out, 6)
    flat[:] = np.arange(6)
    assert flat.shape == (6,)
    assert out.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_an_output_that_is_a_matrix_is_one_dimension_or_refused() -> None:
    try:
        flat = as_output(np.matrix(np.zeros((2, 3), np.float32)), 6)
    except ArgumentError:
        return
    assert flat.shape == (6,)


def read_only() -> np.ndarray:
    array = np.zeros(6, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "out",
    [
        None,
        [0.0] * 6,
        np.zeros(5, np.float32),
        np.zeros(7, np.float32),
        np.zeros(6, np.float64),
        np.zeros(6, np.float16),
        np.zeros(6, np.int32),
        np.zeros(6, ">f4"),
        np.zeros(12, np.float32)[::2],
        np.zeros(6, np.float32)[::-1],
        np.zeros((2, 3), np.float32).T,
        read_only(),
        Tensor(np.zeros(6, np.float32)),
    ],
)
def test_other_outputs_are_refused(out: Any) -> None:
    with pytest.raises(
        ArgumentError, match="out must be a writable C-contiguous float32 NumPy array of 6"
    ):
        as_output(out, 6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4"])
@pytest.mark.parametrize("size", [0, 1, LARGE])
def test_finite_values_pass(dtype: str, size: int) -> None:
    check_finite("gradient", np.full(size, -1e4).astype(dtype), "m")
    check_finite("gradient", np.repeat(np.ones(size).astype(dtype), 2)[::2], "m")


def test_an_element_is_named_by_its_index_in_the_whole() -> None:
    values = np.array([1, math.nan], np.float32)
    with pytest.raises(NonFiniteError, match="gradient: element 41 is nan") as caught:
        check_finite("gradient", values, "m", 40)
    assert caught.value.element_index == 41


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 7, 2**16, 2**18 - 1, 2**18, LARGE - 1])
def test_the_first_bad_value_is_named(dtype: str, bad: float, place: int) -> None:
    values = np.ones(LARGE).astype(dtype)
    values[place] = bad
    values[-1] = math.nan if place < values.size - 1 else bad
    with pytest.raises(NonFiniteError, match=f"gradient: element {place} is {bad}") as caught:
        check_finite("gradient", values, "m")
    assert caught.value.element_index == place
    assert caught.value.parameter == "m"


def test_a_float64_must_be_finite_as_float32() -> None:
    largest = float(np.finfo(np.float32).max)
    check_finite("gradient", np.array([largest, -largest]), "m")
    for value in (1e39, -1e300, largest * (1 + 2**-24)):
        with pytest.raises(NonFiniteError, match=r"element 1 is .*float32") as caught:
            check_finite("gradient", np.array([1.0, value]), "m")
        assert caught.value.element_index == 1

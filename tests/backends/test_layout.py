"""layout: where tensors lie in a vector, in which type state changes, and into which bands a vector is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samestep.backends import layout
from samestep.backends.layout import Layout


def test_tensors_lie_one_after_the_other_unless_a_unit_is_asked_for() -> None:
    one = Layout(("a", "b", "c"), ((3,), (), (2, 2)), "float32")
    assert (one.real, one.unit) == (True, 1)
    assert (one.spans, one.size) == ([(0, 3), (3, 4), (4, 8)], 8)
    assert one.padding == [slice(3, 3), slice(4, 4), slice(8, 8)]
    other = Layout(("a", "b", "c"), ((3,), (), (2, 2)), "float32", unit=4)
    assert (other.spans, other.size) == ([(0, 3), (4, 5), (8, 12)], 12)
    assert other.padding == [slice(3, 4), slice(5, 8), slice(12, 12)]
    assert Layout((), (), "float32").size == Layout((), (), "float32", unit=4).size == 0


def test_a_vector_is_filled_by_name() -> None:
    one = Layout(("a", "b"), ((2,), (2, 1)), "float64", unit=3)
    vector = one.filled({"b": np.array([3.0, 4.0]), "a": np.array([1.0, 2.0]), "c": np.array([9.0])})
    assert (str(vector.dtype), vector.tolist()) == ("float64", [1.0, 2.0, 0.0, 3.0, 4.0, 0.0])
    assert {name: tensor.tolist() for name, tensor in one.named(vector).items()} == {"a": [1, 2], "b": [[3], [4]]}


@pytest.mark.parametrize(
    ("dtype", "real", "wide"),
    [
        ("float16", True, "weights"),
        ("float32", True, "float32"),
        ("float64", True, "float64"),
        ("bool", False, "int8"),
        ("int8", False, "int8"),
        ("int16", False, "int16"),
        ("int64", False, "int64"),
        ("uint8", False, "uint8"),
        ("complex64", False, "complex64"),
    ],
)
def test_the_type_in_which_state_changes(dtype: str, real: bool, wide: str) -> None:
    assert Layout(("a",), ((1,),), str(np.dtype(dtype)), real).wide("weights") == wide


def test_how_many_numbers_are_aligned() -> None:
    assert [layout.aligned(itemsize) for itemsize in (1, 2, 4, 8)] == [64, 32, 16, 8]


@pytest.mark.parametrize("off", [0, 1, 63])
def test_a_copy_begins_at_a_multiple_of_64_bytes_wherever_its_memory_does(
    off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(1024, np.uint8)
    begin = -memory.ctypes.data % 64 + off

    def empty(size: int, dtype: Any) -> Any:
        assert size == 48 + 64
        return memory[begin : begin + size]

    numbers = np.arange(12, dtype=np.float32)
    monkeypatch.setattr(np, "empty", empty)
    copied = layout.aligned_copy(numbers)
    assert copied.ctypes.data % 64 == 0
    assert (copied.dtype, copied.tolist()) == (np.float32, list(range(12)))


@pytest.mark.parametrize(
    ("sizes", "bands"),
    [
        ([3, 2, 4, 1, 5], [(10, 15), (5, 10), (0, 5), (15, 99)]),
        ([1, 4, 4], [(5, 9), (1, 5), (0, 1), (9, 99)]),
        ([4, 4], [(4, 8), (0, 4), (8, 99)]),
        ([3, 4], [(0, 99)]),
        ([9], [(0, 9), (9, 99)]),
    ],
    ids=str,
)
def test_bands_of_four_numbers_or_more_the_last_first(
    sizes: list[int], bands: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "LEAST", 4)
    names = tuple(map(str, range(len(sizes))))
    assert layout.bands_of(Layout(names, tuple((size,) for size in sizes), "float32"), 99) == bands


def test_types_that_numpy_knows_stay_on_the_host() -> None:
    for dtype in ("float64", "float16", "int8", "bool", "complex64"):
        numbers = np.ones(2, dtype)
        assert layout.on_host(numbers) is numbers


def test_tensors_by_type() -> None:
    types = [
        (str(np.dtype(name)), name[0] == "f") for name in ("float32", "int32", "float32", "bool", "int32", "float64")
    ]
    found, layouts = layout.by_type(list("abcdef"), [(1,), (2,), (3,), (4,), (5,), (6,)], types)
    assert found == (0, 1, 0, 2, 1, 3)
    assert layouts == (
        Layout(("a", "c"), ((1,), (3,)), "float32", True),
        Layout(("b", "e"), ((2,), (5,)), "int32", False),
        Layout(("d",), ((4,),), "bool", False),
        Layout(("f",), ((6,),), "float64", True),
    )


def test_the_name_of_a_leaf_is_its_path_without_the_value_of_a_variable() -> None:
    def steps(**given: Any) -> list[Any]:
        return [SimpleNamespace(**{kind.rstrip("0123456789"): value}) for kind, value in given.items()]

    assert layout.path_name([]) == ""
    assert layout.path_name(steps(key="dense", idx=3, name="kernel")) == "dense.3.kernel"
    assert layout.path_name(steps(key="dense", name="weight")) == "dense.weight"
    assert layout.path_name(steps(name1="value", name2="kernel", name3="value")) == "value.kernel"
    assert layout.path_name(["plain"]) == "plain"

"""by_hand: every way to sum gives a sum, in place, without aliases; the ones along the tree give the tree's bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from samestep.backends import find
from samestep.devices import cpu, gpu
from samestep.errors import DevicesDiffer, Invalid, WrongType
from samestep.processes.by_hand import WAYS, allreduce, replicate, split_batch
from samestep.shards import cut

SHAPES = [(1,), (3,), (7,), (23,), (4, 5), (2, 3, 2), (), (0,)]


def floats(k: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """k arrays over eight orders of magnitude, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(k)
    exponent = torch.randint(-4, 5, (k, *shape), generator=generator)
    return list((torch.randn((k, *shape), generator=generator) * 10.0**exponent).unbind())


def bits(array: torch.Tensor) -> bytes:
    return bytes(array.detach().contiguous().numpy().tobytes())


def left_to_right(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def along_the_tree(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    power = 1
    while 2 * power < len(values):
        power *= 2
    return along_the_tree(values[:power]) + along_the_tree(values[power:])


# allreduce


def test_the_ways() -> None:
    assert WAYS == ("tree", "gather", "ring", "sharded")


@pytest.mark.parametrize("how", WAYS)
def test_one_and_two_is_three_on_both(how: str) -> None:
    arrays = [torch.ones((1, 2)), torch.full((1, 2), 2.0)]
    result = allreduce(arrays, how)
    assert [array.tolist() for array in result] == [[[3.0, 3.0]], [[3.0, 3.0]]]


@pytest.mark.parametrize("k", range(1, 10))
@pytest.mark.parametrize("how", WAYS)
def test_integers_are_summed_exactly(how: str, k: int) -> None:
    for shape in SHAPES:
        size = math.prod(shape)
        arrays = [torch.arange(size).reshape(shape) * 10**9 + 10**d for d in range(k)]
        expected = [k * 10**9 * i + sum(10**d for d in range(k)) for i in range(size)]
        for array in allreduce(arrays, how):
            assert array.shape == shape
            assert array.flatten().tolist() == expected


@pytest.mark.parametrize("k", range(1, 10))
def test_tree_and_sharded_add_along_the_tree(k: int) -> None:
    for shape in SHAPES:
        expected = bits(along_the_tree(floats(k, shape)))
        assert [bits(array) for array in allreduce(floats(k, shape), "tree")] == [expected] * k
        assert [bits(array) for array in allreduce(floats(k, shape), "sharded")] == [expected] * k


@pytest.mark.parametrize("k", range(1, 10))
def test_gather_adds_from_left_to_right(k: int) -> None:
    for shape in SHAPES:
        expected = bits(left_to_right(floats(k, shape)))
        assert [bits(array) for array in allreduce(floats(k, shape), "gather")] == [expected] * k


@pytest.mark.parametrize("k", range(1, 10))
def test_ring_adds_each_slice_from_the_device_of_its_number_onward(k: int) -> None:
    for shape in SHAPES:
        flats = [array.flatten() for array in floats(k, shape)]
        slices = [
            left_to_right([flats[(first + hop) % k][lo:hi] for hop in range(k)])
            for first, (lo, hi) in enumerate(cut(len(flats[0]), k))
        ]
        assert [bits(array) for array in allreduce(floats(k, shape), "ring")] == [bits(torch.cat(slices))] * k


@pytest.mark.parametrize("k", range(1, 10))
@pytest.mark.parametrize("how", WAYS)
def test_every_way_is_the_sum_to_rounding(how: str, k: int) -> None:
    values = torch.stack(floats(k, (23,))).double()
    bound = (k - 1) * torch.finfo(torch.float32).eps * values.abs().sum(0)  # k - 1 additions, each rounded once
    for array in allreduce(floats(k, (23,)), how):
        assert ((array.double() - values.sum(0)).abs() <= bound).all()


def test_ring_is_not_the_sum_along_the_tree() -> None:
    def arrays() -> list[torch.Tensor]:
        return [torch.full((3,), value) for value in (1e8, 1.0, -1e8)]

    assert allreduce(arrays(), "tree")[0].tolist() == [0.0, 0.0, 0.0]  # (1e8 + 1) - 1e8
    assert allreduce(arrays(), "ring")[0].tolist() == [0.0, 0.0, 1.0]  # the last slice: (-1e8 + 1e8) + 1
    assert allreduce(arrays(), "sharded")[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("how", WAYS)
def test_arrays_are_changed_in_place_and_stay_apart(how: str, k: int) -> None:
    arrays = [torch.full((2, 3), float(d + 1)) for d in range(k)]
    before, total = [array.data_ptr() for array in arrays], float(sum(range(1, k + 1)))
    result = allreduce(arrays, how)
    assert all(new is old for new, old in zip(result, arrays, strict=True))
    assert [array.data_ptr() for array in arrays] == before
    for changed, array in enumerate(arrays):
        assert [set(other.flatten().tolist()) for other in arrays] == [{-1.0}] * changed + [{total}] * (k - changed)
        array.fill_(-1.0)


@pytest.mark.parametrize("how", WAYS)
def test_views_that_are_not_contiguous_are_changed_in_place(how: str) -> None:
    bases = [torch.arange(6.0).reshape(2, 3) * (d + 1) for d in range(3)]
    allreduce([base.T for base in bases], how)
    assert [base.tolist() for base in bases] == [[[0.0, 6.0, 12.0], [18.0, 24.0, 30.0]]] * 3


@pytest.mark.parametrize("how", WAYS)
def test_arrays_that_require_gradients_can_be_summed(how: str) -> None:
    arrays = [torch.ones(4, requires_grad=True) for _ in range(3)]
    assert [array.tolist() for array in allreduce(arrays, how)] == [[3.0] * 4] * 3
    assert all(array.is_leaf and array.requires_grad for array in arrays)


def test_the_tree_is_the_default() -> None:
    assert bits(allreduce(floats(7, (23,)))[0]) == bits(along_the_tree(floats(7, (23,))))
    assert bits(along_the_tree(floats(7, (23,)))) != bits(left_to_right(floats(7, (23,))))


@pytest.mark.parametrize(
    ("arrays", "how", "kind", "message"),
    [
        ([torch.ones(1)], "sum", Invalid, "allreduce: how must be one of tree, gather, ring, sharded, got how='sum'"),
        ([], "tree", WrongType, "allreduce: expected a list of arrays, one per device, got []"),
        (3, "tree", WrongType, "allreduce: expected a list of arrays, one per device, got 3"),
        (
            torch.tensor([1.0]),
            "tree",
            WrongType,
            "allreduce: expected a list of arrays, one per device, got tensor([1.])",
        ),
        (
            [torch.ones(3), torch.ones(1, 3), torch.ones(3)],
            "tree",
            Invalid,
            "allreduce: arrays must have one shape, got (1, 3) and (3,)",
        ),
        (
            ["a", "b"],
            "tree",
            WrongType,
            f"expected an array of {', '.join(find.FRAMEWORKS)} or NumPy, got builtins.str",
        ),
    ],
)
def test_what_cannot_be_summed_is_refused(arrays: Any, how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        allreduce(arrays, how)
    assert type(error.value) is kind
    assert str(error.value) == message


@pytest.mark.parametrize("arrays", [[1.0, 2.0], [[1.0], [2.0]], [np.ones(2), np.ones(2)]], ids=repr)
def test_what_is_of_no_framework_is_refused(arrays: Any) -> None:
    """They are on no device and cannot be changed in place by a framework."""
    with pytest.raises(WrongType):
        allreduce(arrays)


@pytest.mark.parametrize("how", WAYS)
def test_different_types_are_refused_before_anything_is_written(how: str) -> None:
    """Writing 1 + 1.5 into an array of whole numbers would leave 2 on one device and 2.5 on the other."""
    arrays = [torch.tensor([1]), torch.tensor([1.5])]
    with pytest.raises(WrongType):
        allreduce(arrays, how)
    assert [array.tolist() for array in arrays] == [[1], [1.5]]


@pytest.mark.parametrize("how", WAYS)
def test_different_shapes_leave_the_arrays_as_they_were(how: str) -> None:
    arrays = [torch.ones(2), torch.ones(3)]
    with pytest.raises(Invalid):
        allreduce(arrays, how)
    assert [array.tolist() for array in arrays] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


# split_batch


@pytest.mark.parametrize(("n", "k", "sizes"), [(10, 4, [3, 3, 2, 2]), (8, 2, [4, 4]), (2, 3, [1, 1, 0]), (5, 1, [5])])
def test_split_batch_cuts_evenly_and_keeps_examples_and_labels_together(n: int, k: int, sizes: list[int]) -> None:
    x, y = torch.arange(n * 6).reshape(n, 2, 3), torch.arange(n) * 10
    xs, ys = split_batch(x, y, ["cpu"] * k)
    assert [len(piece) for piece in xs] == [len(piece) for piece in ys] == sizes
    assert torch.cat(xs).tolist() == x.tolist()
    assert torch.cat(ys).tolist() == y.tolist()
    assert all(piece.shape[1:] == (2, 3) for piece in xs)


def test_split_batch_takes_devices_and_numpy() -> None:
    xs, ys = split_batch(np.arange(6.0).reshape(3, 2), np.arange(3), [cpu(), cpu()])
    assert [piece.tolist() for piece in xs] == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]]]
    assert [piece.tolist() for piece in ys] == [[0, 1], [2]]


def test_split_batch_refuses_unequal_lengths() -> None:
    with pytest.raises(Invalid) as error:
        split_batch(torch.ones(4, 2), torch.ones(3), ["cpu"])
    assert str(error.value) == "split_batch: x and y must be of one length, got 4 examples and 3 labels"


def test_split_batch_refuses_no_devices() -> None:
    with pytest.raises(Invalid) as error:
        split_batch(torch.ones(4, 2), torch.ones(4), [])
    assert str(error.value) == "devices is an empty list: name at least one, or write 'auto'"


def test_split_batch_refuses_examples_and_labels_on_different_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(4, 2), torch.ones(4)
    monkeypatch.setattr("samestep.backends.arrays.device_of", lambda array: gpu(1) if array is y else cpu())
    with pytest.raises(DevicesDiffer, match=r"\(x on cpu, y on cuda:1\)"):
        split_batch(x, y, ["cpu"])


# replicate


def test_a_replica_is_equal_apart_and_ready_for_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(2, 3, generator=generator, requires_grad=True), torch.randn(4, generator=generator)]
    before = [bits(parameter) for parameter in parameters]
    first, second = replicate(parameters, "cpu"), replicate(parameters, cpu())
    for copies in (first, second):
        assert [bits(copy) for copy in copies] == before
        assert all(copy.requires_grad and copy.is_leaf for copy in copies)
        assert [copy.grad.tolist() for copy in copies] == [[[0.0] * 3] * 2, [0.0] * 4]
    storages = {array.data_ptr() for copies in (parameters, first, second) for array in copies}
    storages |= {copy.grad.data_ptr() for copy in first + second}
    assert len(storages) == 2 + 4 + 4

    (first[0].sum() + first[1].sum()).backward()
    with torch.no_grad():
        first[0].zero_()
    assert first[1].grad.tolist() == [1.0] * 4
    assert [bits(copy) for copy in second] == before
    assert second[1].grad.tolist() == [0.0] * 4
    assert [bits(parameter) for parameter in parameters] == before
    assert [parameter.requires_grad for parameter in parameters] == [True, False]
    assert [parameter.grad for parameter in parameters] == [None, None]


def test_replicate_refuses_a_device_that_is_not_there() -> None:
    with pytest.raises(Invalid, match=r"^device cuda:99 is not there: torch sees cpu"):
        replicate([torch.ones(2)], "cuda:99")

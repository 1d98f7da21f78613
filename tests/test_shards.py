"""shards: every example in exactly one shard, and one order of additions whatever the devices, threads and arrivals."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import Invalid
from samestep.shards import Fold, Span, cut, cut_pass, middle, parts, sibling, tree_sum, tree_total

properties = settings(max_examples=100, deadline=None, derandomize=True, database=None)
leaves = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def divide(lo: int, hi: int) -> int:
    """lo plus the largest power of two below hi - lo, found by doubling."""
    power = 1
    while 2 * power < hi - lo:
        power *= 2
    return lo + power


def recursion(values: Any, lo: int, hi: int) -> Any:
    """The definition of the sum, word for word."""
    if hi - lo == 1:
        return values[lo]
    mid = divide(lo, hi)
    return recursion(values, lo, mid) + recursion(values, mid, hi)


def nodes(lo: int, hi: int) -> Iterator[Span]:
    yield lo, hi
    if hi - lo > 1:
        mid = divide(lo, hi)
        yield from nodes(lo, mid)
        yield from nodes(mid, hi)


def vectors(seed: int, n: int) -> list[Any]:
    """n vectors of float32 over eight orders of magnitude, so that the order of additions shows in the bits."""
    rng = np.random.default_rng(seed)
    return list((rng.standard_normal((n, 5)) * 10.0 ** rng.integers(-4, 5, (n, 5))).astype(np.float32))


def plus(left: Any, right: Any) -> Any:
    return left + right


# Cutting


@properties
@given(n=st.integers(0, 10_000), pieces=st.integers(1, 200))
def test_cut_is_contiguous_even_and_complete(n: int, pieces: int) -> None:
    spans = cut(n, pieces)
    sizes = [hi - lo for lo, hi in spans]
    assert len(spans) == pieces
    assert [index for lo, hi in spans for index in range(lo, hi)] == list(range(n))
    assert all(hi == lo for (_, hi), (lo, _) in pairwise(spans))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("n", "pieces"), [(-1, 1), (5, 0), (5, -2)])
def test_cut_refuses_what_cannot_be_cut(n: int, pieces: int) -> None:
    with pytest.raises(Invalid) as error:
        cut(n, pieces)
    assert str(error.value) == f"cut: needs n of at least 0 and pieces of at least 1, got n={n}, pieces={pieces}"


@properties
@given(n=st.integers(0, 500), batch_size=st.integers(1, 64), shards=st.integers(1, 16))
def test_cut_pass_takes_every_example_once(n: int, batch_size: int, shards: int) -> None:
    batches = cut_pass(n, batch_size, shards)
    full, rest = divmod(n, batch_size)
    assert [example for batch in batches for lo, hi in batch for example in range(lo, hi)] == list(range(n))
    assert [sum(hi - lo for lo, hi in batch) for batch in batches] == [batch_size] * full + [rest] * (rest > 0)
    assert all(hi > lo for batch in batches for lo, hi in batch)
    assert all(len(batch) == min(shards, batch[-1][1] - batch[0][0]) for batch in batches)


def test_empty_shards_are_left_out_whatever_their_number() -> None:
    assert cut_pass(300, 300, 400) == [[(i, i + 1) for i in range(300)]]


def test_an_uneven_last_batch_is_cut_like_any_other() -> None:
    assert cut_pass(9, 4, 3) == [[(0, 2), (2, 3), (3, 4)], [(4, 6), (6, 7), (7, 8)], [(8, 9)]]


# The tree


@given(lo=st.integers(0, 50), size=st.integers(2, 200))
@properties
def test_middle_is_the_largest_power_of_two_below_the_size(lo: int, size: int) -> None:
    assert middle(lo, lo + size) == divide(lo, lo + size)


@pytest.mark.parametrize("n", range(1, 41))
def test_siblings_are_the_two_sides_of_a_division(n: int) -> None:
    tree = set(nodes(0, n))
    assert sibling(0, n, n) is None
    for lo, hi in tree:
        if hi - lo > 1:
            mid = divide(lo, hi)
            assert sibling(lo, mid, n) == (mid, hi)
            assert sibling(mid, hi, n) == (lo, mid)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 13])
def test_a_span_that_is_not_a_node_is_refused(n: int) -> None:
    tree = set(nodes(0, n))
    others = {(lo, hi) for lo in range(-1, n + 2) for hi in range(-1, n + 2)} - tree
    for lo, hi in others:
        with pytest.raises(Invalid) as error:
            sibling(lo, hi, n)
        assert str(error.value) == f"[{lo}, {hi}) is not a node of the tree over {n} shards"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 12, 16, 21, 40])
def test_parts_are_the_largest_nodes_inside_a_range(n: int) -> None:
    tree = list(nodes(0, n))
    for lo in range(n + 1):
        for hi in range(lo, n + 1):
            found = parts(lo, hi, n)
            assert [shard for a, b in found for shard in range(a, b)] == list(range(lo, hi))
            for a, b in found:
                assert (a, b) in tree
                larger = [(c, d) for c, d in tree if (c, d) != (a, b) and c <= a and b <= d]
                assert not [(c, d) for c, d in larger if lo <= c and d <= hi]


def test_the_parts_of_nothing_are_none() -> None:
    assert parts(0, 0, 0) == []
    assert parts(3, 3, 8) == []


# Adding along it


@properties
@given(n=leaves, seed=seeds, data=st.data())
def test_any_arrival_on_any_number_of_devices_gives_the_same_bits(n: int, seed: int, data: st.DataObject) -> None:
    values, rng = vectors(seed, n), np.random.default_rng(seed)
    devices = data.draw(st.integers(1, n), label="devices")
    final: Fold[Any] = Fold(n, plus)
    handed_on = []
    for lo, hi in cut(n, devices):
        fold: Fold[Any] = Fold(n, plus)
        for shard in rng.permutation(np.arange(lo, hi)).tolist():
            fold.add((shard, shard + 1), values[shard])
        assert sorted(fold.parts) == parts(lo, hi, n)
        handed_on += list(fold.parts.items())
    for index in rng.permutation(len(handed_on)):
        final.add(*handed_on[index])
    assert final.total().tobytes() == recursion(values, 0, n).tobytes()


def test_bite_adding_in_device_order_depends_on_the_number_of_devices() -> None:
    """The property above is not vacuous: left to right on each device, then over devices, changes bits."""

    def in_device_order(values: list[Any], devices: int) -> bytes:
        sums = [sum(values[lo + 1 : hi], start=values[lo]) for lo, hi in cut(len(values), devices)]
        return bytes(sum(sums[1:], start=sums[0]).tobytes())

    values = vectors(0, 8)
    assert len({in_device_order(values, devices) for devices in range(1, 9)}) > 1
    assert in_device_order(values, 1) != recursion(values, 0, 8).tobytes()


def test_left_is_added_to_right_never_the_other_way_round() -> None:
    fold: Fold[str] = Fold(5, lambda left, right: f"({left}{right})")
    for leaf in (4, 3, 2, 1, 0):
        fold.add((leaf, leaf + 1), "abcde"[leaf])
    assert fold.total() == "(((ab)(cd))e)"


def together(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), ..., work(count - 1) in threads that start at one moment; raise what any of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        barrier.wait(timeout=30)
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Slow(dict[Span, Any]):
    """Parts that take their time to answer, so that another thread can come between a look and what follows from it."""

    def __contains__(self, span: object) -> bool:
        found = super().__contains__(span)
        for _ in range(2000):
            pass  # the interpreter changes threads at the end of a loop's turn
        return found


def test_many_threads_at_once_give_the_same_bits() -> None:
    n, threads = 37, 4
    values = vectors(1, n)
    expected = recursion(values, 0, n).tobytes()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places as often as they can
    try:
        for _ in range(20):
            fold: Fold[Any] = Fold(n, plus)
            fold.parts = Slow()

            def bring(i: int, fold: Fold[Any] = fold) -> None:
                for leaf in range(i, n, threads):
                    fold.add((leaf, leaf + 1), values[leaf])

            together(threads, bring)
            assert fold.total().tobytes() == expected
    finally:
        sys.setswitchinterval(before)


def test_additions_run_side_by_side() -> None:
    """Nobody waits for a lock while another adds: two additions meet at a barrier inside `add`."""
    both = threading.Barrier(2)

    def add(left: str, right: str) -> str:
        if len(left) == 1:
            both.wait(timeout=30)  # broken, and an error, if the other addition cannot start
        return left + right

    fold: Fold[str] = Fold(4, add)

    def bring(i: int) -> None:
        for leaf in (2 * i, 2 * i + 1):
            fold.add((leaf, leaf + 1), "abcd"[leaf])

    together(2, bring)
    assert fold.total() == "abcd"


def test_an_incomplete_sum_names_what_it_has() -> None:
    fold: Fold[int] = Fold(5, plus)
    for leaf in (4, 0, 2, 1):
        fold.add((leaf, leaf + 1), leaf)
    with pytest.raises(Invalid) as error:
        fold.total()
    assert str(error.value) == "the sum over 5 shards is not complete: it has parts [(0, 2), (2, 3), (4, 5)]"


@pytest.mark.parametrize("span", [(1, 3), (0, 3), (0, 9), (2, 2), (3, 2), (-1, 0), (8, 9)])
def test_fold_refuses_a_span_that_is_not_a_node(span: Span) -> None:
    fold: Fold[int] = Fold(8, plus)
    with pytest.raises(Invalid, match=r"is not a node of the tree over 8 shards"):
        fold.add(span, 1)
    assert fold.parts == {}


def test_a_shard_that_comes_twice_after_its_sum_is_noticed() -> None:
    fold: Fold[int] = Fold(2, plus)
    for leaf in (0, 1, 0):
        fold.add((leaf, leaf + 1), 1)
    with pytest.raises(Invalid):
        fold.total()


def test_a_shard_that_comes_twice_before_its_sum_is_noticed() -> None:
    fold: Fold[int] = Fold(2, plus)
    fold.add((1, 2), 1)
    with pytest.raises(Invalid, match=r"^shards \[1, 2\) were added twice$"):
        fold.add((1, 2), 10)
    assert fold.parts == {(1, 2): 1}


@properties
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=40))
def test_tree_sum_is_the_recursion(values: list[float]) -> None:
    assert np.float64(tree_sum(values)).tobytes() == np.float64(recursion(values, 0, len(values))).tobytes()


def test_tree_sum_of_known_values() -> None:
    assert tree_sum([]) == 0.0
    assert tree_sum([0.1, 0.2, 0.3]) == (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
    assert tree_sum([1e16, 1.0, 1.0, 1.0]) == (1e16 + 1.0) + (1.0 + 1.0) != sum([1e16, 1.0, 1.0, 1.0])


def test_arrays_are_added_number_by_number() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 7)) * 1e3
    total = tree_total([*rows.T])
    assert total.tolist() == [tree_sum(row) for row in rows.tolist()]
    assert total.tolist() != rows.sum(1).tolist()

"""Cutting a batch into shards, who computes which, and the one order in which their results are added.

This is where the number of devices is kept out of the result. A batch is always cut the same way; a device is handed a
contiguous range of shards; and whatever is summed over shards is summed along one fixed binary tree:

    sum(lo, hi) = sum(lo, mid) + sum(mid, hi),    mid = lo + the largest power of two below hi - lo

A *part* is the sum over shards [lo, hi) where [lo, hi) is a node of that tree. Pure functions: no framework is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

from samestep.errors import Invalid

T = TypeVar("T")
Span = tuple[int, int]  # [lo, hi)


def cut(n: int, pieces: int) -> list[Span]:
    """Cut n things into contiguous pieces whose sizes differ by at most one, the larger ones first.

    >>> cut(10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    >>> cut(2, 3)
    [(0, 1), (1, 2), (2, 2)]
    """
    if n < 0 or pieces < 1:
        raise Invalid(f"cut: needs n of at least 0 and pieces of at least 1, got n={n}, pieces={pieces}")
    size, larger = divmod(n, pieces)
    edges = [i * size + min(i, larger) for i in range(pieces + 1)]
    return list(pairwise(edges))


def cut_pass(n: int, batch_size: int, shards: int) -> list[list[Span]]:
    """Cut one pass over n examples into batches, and each batch into its shards; empty shards are left out.

    >>> cut_pass(7, 4, 2)
    [[(0, 2), (2, 4)], [(4, 6), (6, 7)]]
    """
    batches = [(start, min(batch_size, n - start)) for start in range(0, n, batch_size)]
    return [[(start + lo, start + hi) for lo, hi in cut(size, shards) if hi > lo] for start, size in batches]


def middle(lo: int, hi: int) -> int:
    """Where the tree divides [lo, hi): lo plus the largest power of two below hi - lo.

    >>> middle(0, 8), middle(0, 7), middle(4, 7)
    (4, 4, 6)
    """
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def sibling(lo: int, hi: int, n: int) -> Span | None:
    """The node that [lo, hi) is added to in the tree over n leaves, or None for the root.

    >>> sibling(0, 1, 8), sibling(4, 8, 8), sibling(0, 8, 8), sibling(6, 7, 7)
    ((1, 2), (0, 4), None, (4, 6))
    """
    a, b, other = 0, n, None
    while (a, b) != (lo, hi):
        if not a <= lo < hi <= b:
            raise Invalid(f"[{lo}, {hi}) is not a node of the tree over {n} shards")
        mid = middle(a, b)
        if hi <= mid:
            other, b = (mid, b), mid
        else:
            other, a = (a, mid), mid
    return other


def parts(lo: int, hi: int, n: int) -> list[Span]:
    """The parts that a device holding shards [lo, hi) of n hands on: the largest nodes of the tree inside its range.

    >>> parts(3, 6, 8)
    [(3, 4), (4, 6)]
    """

    def inside(a: int, b: int) -> list[Span]:
        if lo <= a and b <= hi:
            return [(a, b)]
        if b <= lo or hi <= a:
            return []
        return inside(a, middle(a, b)) + inside(middle(a, b), b)

    return inside(0, n) if n else []


class Fold(Generic[T]):
    """Adds values along the tree over n leaves, in whatever order they arrive and from whichever thread.

    A value waits until its sibling is there; then the two are added, left + right, by the thread that brought the second.

    >>> fold = Fold(3, lambda left, right: f"({left}+{right})")
    >>> for leaf in (2, 0, 1): fold.add((leaf, leaf + 1), str(leaf))
    >>> fold.parts
    {(0, 3): '((0+1)+2)'}
    """

    def __init__(self, n: int, add: Callable[[T, T], T]) -> None:
        self.n = n
        self.parts: dict[Span, T] = {}
        self._add = add
        self._lock = threading.Lock()

    def add(self, span: Span, value: T) -> None:
        while True:
            other = sibling(*span, self.n)
            with self._lock:
                if span in self.parts:
                    raise Invalid(f"shards [{span[0]}, {span[1]}) were added twice")
                if other is None or other not in self.parts:
                    self.parts[span] = value
                    return
                waiting = self.parts.pop(other)
            value = self._add(waiting, value) if other < span else self._add(value, waiting)
            span = (min(span[0], other[0]), max(span[1], other[1]))

    def total(self) -> T:
        """The sum over all leaves."""
        if list(self.parts) != [(0, self.n)]:
            raise Invalid(f"the sum over {self.n} shards is not complete: it has parts {sorted(self.parts)}")
        return self.parts[0, self.n]


def tree_total(values: Sequence[T]) -> T:
    """Add values, which know +, along the tree: numbers, or arrays of them."""
    fold: Fold[Any] = Fold(len(values), lambda left, right: left + right)
    for i, value in enumerate(values):
        fold.add((i, i + 1), value)
    total: T = fold.total()
    return total


def tree_sum(values: Sequence[float]) -> float:
    """Sum numbers in float64 along the tree.

    >>> tree_sum([0.1, 0.2, 0.3])
    0.6000000000000001
    """
    return tree_total([*map(float, values)]) if values else 0.0

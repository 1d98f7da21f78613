"""Where the tensors of a model lie in one flat vector, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from samestep.shards import Span

Numbers = np.ndarray[Any, Any]
Tensors = dict[str, Numbers]
LEAST = 1 << 20  # numbers; bands of this size are sent while others are computed, smaller vectors as a whole
INSTEAD = "state must be of real or whole numbers, or true and false: keep real and imaginary parts as two arrays"
ALIGN = 64  # bytes; kernels see each tensor aligned as if it had an allocation of its own


def aligned(itemsize: int) -> int:
    """How many numbers take ALIGN bytes."""
    return ALIGN // itemsize


def aligned_copy(numbers: Numbers) -> Numbers:
    """A copy of a vector that begins at a multiple of ALIGN bytes."""
    memory = np.empty(numbers.nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    vector: Numbers = memory[start : start + numbers.nbytes].view(numbers.dtype)
    vector[:] = numbers
    return vector


@dataclass(frozen=True)
class Layout:
    """Tensors of one type of number in one vector, one after the other, each at a multiple of `unit` numbers.

    >>> layout = Layout(("weight", "bias"), ((4, 5), (3,)), "float32", unit=aligned(4))
    >>> layout.spans, layout.size, layout.padding
    ([(0, 20), (32, 35)], 48, [slice(20, 32, None), slice(35, 48, None)])
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    real: bool = True  # real numbers, not whole ones
    unit: int = 1

    @cached_property
    def spans(self) -> list[Span]:
        """The numbers [lo, hi) of the vector that each tensor has."""
        sizes = [prod(shape) for shape in self.shapes]
        starts = accumulate((-(-size // self.unit) * self.unit for size in sizes), initial=0)
        return [(start, start + size) for start, size in zip(starts, sizes, strict=False)]

    @cached_property
    def size(self) -> int:
        """The length of the vector, padding included."""
        end = self.spans[-1][1] if self.spans else 0
        return -(-end // self.unit) * self.unit

    @cached_property
    def padding(self) -> list[slice]:
        """Where no tensor lies. The numbers there are always zero."""
        starts = [lo for lo, _ in self.spans[1:]]
        return [slice(hi, lo) for (_, hi), lo in zip(self.spans, [*starts, self.size], strict=True)]

    def wide(self, dtype: str) -> str:
        """The type in which such state changes beside weights of a type: 16 bits round, and true and false have no
        difference.
        """
        short = self.real and np.dtype(self.dtype).itemsize < 4
        return dtype if short else "int8" if self.dtype == "bool" else self.dtype

    def cut(self, vector: Any) -> list[Any]:
        """The tensors of such a vector, of the framework or of NumPy, as views of it."""
        return [vector[lo:hi].reshape(shape) for (lo, hi), shape in zip(self.spans, self.shapes, strict=True)]

    def named(self, vector: Numbers) -> Tensors:
        """The tensors of such a vector on the host, by name, as views of it."""
        return dict(zip(self.names, self.cut(vector), strict=True))

    def filled(self, tensors: Tensors) -> Numbers:
        """A new vector on the host that holds these tensors."""
        vector = np.zeros(self.size, self.dtype)
        for name, view in self.named(vector).items():
            view[...] = tensors[name].reshape(view.shape)
        return vector


def bands_of(layout: Layout, size: int) -> list[Span]:
    """A shard's vector in bands: the weights in ranges of at least LEAST numbers, last layers first, then what follows them."""
    if layout.size < 2 * LEAST:
        return [(0, size)]
    edges = [layout.size]
    for start, _ in reversed(layout.spans):
        if edges[-1] - start >= LEAST or not start:
            edges.append(start)
    return [*((lo, hi) for hi, lo in pairwise(edges)), (layout.size, size)]


def on_host(numbers: Numbers) -> Numbers:
    """In types that NumPy and checkpoints know: bfloat16 and the like as float32, which holds these numbers exactly."""
    return numbers.astype(np.float32) if numbers.dtype.kind == "V" else numbers


def by_type(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], types: Sequence[tuple[str, bool]]
) -> tuple[tuple[int, ...], tuple[Layout, ...]]:
    """Tensors of several types of number, as (dtype, real): in which vector each lies, and the layouts of these vectors.

    >>> by_type(["weight", "count", "bias"], [(2, 3), (), (3,)], [("float32", True), ("int32", False), ("float32", True)])[0]
    (0, 1, 0)
    """
    kinds, layouts = list(dict.fromkeys(types)), []
    for kind in kinds:
        group = [i for i, own in enumerate(types) if own == kind]
        layouts.append(Layout(tuple(names[i] for i in group), tuple(shapes[i] for i in group), *kind))
    return tuple(map(kinds.index, types)), tuple(layouts)


def path_name(path: Sequence[Any]) -> str:
    """The name of a leaf of a JAX tree. In nnx every leaf is the attribute `value` of a variable: names leave it out."""
    steps = path[:-1] if path and getattr(path[-1], "name", None) == "value" else path
    return ".".join(str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step)))) for step in steps)

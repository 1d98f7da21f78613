"""Where the tensors of a model lie in one flat vector, in every framework: one after the other, each at a multiple of ALIGN."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.shards import Span

ALIGN = 64  # bytes; every tensor begins where an allocation of its own would, so kernels see nothing unusual


def places(sizes: Sequence[int], itemsize: int) -> tuple[list[Span], int]:
    """The place of each tensor of so many numbers, and the size of the whole vector.

    >>> places([20, 3], 4)
    ([(0, 20), (32, 35)], 48)
    """
    found, start, unit = list[Span](), 0, ALIGN // itemsize
    for size in sizes:
        found.append((start, start + size))
        start += -(-size // unit) * unit
    return found, start

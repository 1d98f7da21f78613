"""Eigen, with which a framework multiplies matrices: its sums depend on the sizes of the CPU's caches.

It cuts a product into blocks by these sizes, and the order of a sum follows from the blocks. It asks the CPU once. A portable
run needs the same sizes on every CPU. Frameworks have no setting for them, so they are written to where Eigen keeps them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from samestep.backends.symbols import address, function
from samestep.errors import Invalid

SIZES = "ZN5Eigen8internal20manage_caching_sizesENS_6ActionEPlS2_S2_E12m_cacheSizes"
QUERY = "_ZN5Eigen8internal15queryCacheSizesERiS1_S1_"
EVERYWHERE: list[Any] = [32 << 10, 1 << 20, 32 << 20]  # bytes of three caches, in a portable run
_fixed: set[Path] = set()


@functools.cache
def caches(library: Path) -> list[int] | None:
    """The sizes in bytes that Eigen has from the CPU, by the question in its library; None if that is hidden."""
    query, sizes = function(library, QUERY), (ctypes.c_int * 3)()
    if query is None and (place := address(library, QUERY)) is not None:
        query = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(place)
    if query is not None:
        query(*(ctypes.byref(sizes, 4 * i) for i in range(3)))
    return list(sizes) if query is not None else None


def fix_caches(library: Path, name: str) -> None:
    """Give Eigen the sizes of portable runs, until the process ends. `name` is the framework's, for the error."""
    if library in _fixed:
        return
    sizes, known = address(library, f"_Z{SIZES}"), address(library, f"_ZGV{SIZES}")
    if sizes is None or known is None:
        order = "sums in an order that depends on the CPU's caches"
        raise Invalid(f"portable: {name} {order}, and this build does not say where it keeps their sizes")
    (ctypes.c_long * 3).from_address(sizes)[:] = EVERYWHERE
    ctypes.c_bool.from_address(known).value = True  # or Eigen would ask the CPU in its first product
    _fixed.add(library)


def has_fixed(library: Path) -> bool:
    """Whether that was done in this process."""
    return library in _fixed

"""What MXNet's engine is told beside operations: how many threads to compute with, and functions of samestep's own.

The engine calls a function of our own when the arrays that it reads and writes are ready. The function works in their memory
with NumPy, which is several times quicker than MXNet's operations on vectors. Python does not wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.context import Context

Array = Any
Numbers = np.ndarray[Any, Any]


# Functions of our own

_numbers = count(1)
_waiting: dict[int, Callable[[], None]] = {}
_failed: list[Exception] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)  # of MXNet's own context, and a number of ours
def _call(run: Any, number: Any) -> None:
    try:
        _waiting.pop(number)()
    except Exception as error:  # nobody above would hear of it
        _failed.append(error)


def soon(function: Callable[[], None], context: Context, reads: Sequence[Array], writes: Sequence[Array]) -> None:
    """Have the thread of a context call a function when all that was asked of these arrays earlier has been done."""
    number = next(_numbers)
    _waiting[number] = function
    where = (ctypes.c_int * 2)(context.device_typeid, context.device_id)  # a context as MXNet's library takes it
    handles = [(ctypes.c_void_p * len(arrays))(*(array.handle.value for array in arrays)) for arrays in (reads, writes)]
    given = _call, ctypes.c_void_p(number), None, where, handles[0], len(reads), handles[1], len(writes)
    check_call(_LIB.MXEnginePushSyncND(*given, None, 0, b"samestep"))


def check_soon() -> None:
    """Raise what such a function raised."""
    if _failed:
        error = _failed[0]
        _failed.clear()
        raise error


def use_threads(context: Context, number: int) -> None:
    """Have the thread of a context compute with so many of OpenMP's: the setting is of the thread that makes it."""
    soon(lambda: check_call(_LIB.MXSetNumOMPThreads(number)), context, [], [])


# The memory of arrays on the CPU


def numpy_view(array: Array) -> Numbers:
    """An array as NumPy, in its own memory, for a function that the engine calls."""
    start = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(start)))
    about = {"version": 3, "typestr": np.dtype(array.dtype).str, "shape": array.shape, "data": (start.value, False)}
    return np.asarray(SimpleNamespace(__array_interface__=about, keeps=array))


def idle_view(array: Array) -> Numbers:
    """The same for everybody else: waits until the engine no longer reads or writes the array."""
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    return numpy_view(array)

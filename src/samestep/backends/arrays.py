"""Arrays and devices of any framework: counting GPUs, moving arrays, asking where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.backends import find
from samestep.backends.base import Array, Backend
from samestep.checks import show, whole
from samestep.devices import Device, cpu, gpu
from samestep.errors import DevicesDiffer, WrongType


def _backend(backend: str | Backend | None) -> Backend:
    if backend is None:
        return find.default()
    return find.load(backend) if isinstance(backend, str) else backend


def num_gpus(backend: str | Backend | None = None) -> int:
    """How many GPUs a framework sees (by default the one in use, else the first one installed)."""
    return sum(device.kind == "cuda" for device in _backend(backend).devices())


def try_gpu(i: int = 0, backend: str | Backend | None = None) -> Device:
    """gpu(i) if it is there, otherwise cpu()."""
    device = gpu(i)
    return device if i < num_gpus(backend) else cpu()


def try_all_gpus(backend: str | Backend | None = None) -> list[Device]:
    """All GPUs, or [cpu()] if there is none."""
    return [gpu(i) for i in range(num_gpus(backend))] or [cpu()]


def put(array: Array, device: Device | str, backend: str | Backend | None = None) -> Array:
    """The array on the device: the same object when it is already there, else a copy.

    A NumPy array becomes an array of the framework (on the CPU without a copy, where the framework can do that).
    """
    return (find.of_array(array) if backend is None else _backend(backend)).put(array, Device.of(device))


def full(
    shape: int | Sequence[int], value: float, device: Device | str, dtype: str = "float32",
    backend: str | Backend | None = None,
) -> Array:  # fmt: skip
    """An array of one value, made on the device, not copied there.

    dtype is a name of NumPy's; backend the framework, by default as in `num_gpus`.

    >>> full((2, 2), 0.5, try_gpu(backend="torch"), backend="torch").tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    sizes = tuple(whole("full", "shape", n) for n in (shape if isinstance(shape, Sequence) else [shape]))
    try:
        kind = np.dtype(dtype)
        number = kind.type(value).item()
    except (TypeError, ValueError, OverflowError):
        kind = np.dtype(object)
    if kind.kind not in "biuf" or dtype is None:
        raise WrongType(f"full: a number is needed, and a type that holds it, got {show(value)} and {show(dtype)}")
    found, there = _backend(backend), Device.of(device)
    found.require(there)
    return found.full(sizes, number, there, kind.name)


def get(array: Array) -> NDArray[Any]:
    """The array as NumPy, in host memory. This waits for the device."""
    return find.of_array(array).get(array)


def device_of(array: Array) -> Device:
    """The device an array is on."""
    return find.of_array(array).device_of(array)


def same_device(**arrays: Array) -> Device:
    """The one device that all of these arrays are on; an error that names them if there are several."""
    devices = {name: device_of(array) for name, array in arrays.items()}
    first, *others = dict.fromkeys(devices.values())
    if others:
        on = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise DevicesDiffer(f"arrays are on different devices ({on}): move them to one with samestep.put(x, device)")
    return first

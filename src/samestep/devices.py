"""Devices: naming them, and how "auto", 4 or "cuda:1" become the devices of a run.

A device is named the same way in every framework: `cpu` (all cores of the machine) or `cuda:i` (one GPU; `gpu:i` and
`cuda` for `cuda:0` are understood as well). Some frameworks can show one CPU as several devices: `cpu`, `cpu:1`, `cpu:2`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.checks import show, whole
from samestep.errors import Invalid, WrongType
from samestep.shards import cut

if TYPE_CHECKING:
    from samestep.backends.base import Backend
    from samestep.processes.place import Place


@dataclass(frozen=True)
class Device:
    """One device: the CPU, or the GPU, of a number. The first CPU is `cpu`, as in most frameworks it is the only one.

    >>> Device.of("cuda") == Device.of("gpu:0") == gpu()
    True
    >>> str(gpu(1)), str(cpu()), str(cpu(2))
    ('cuda:1', 'cpu', 'cpu:2')
    """

    kind: str
    index: int = 0

    @staticmethod
    def of(name: Device | str) -> Device:
        """The device of a name."""
        if isinstance(name, Device):
            return name
        if isinstance(name, str) or type(name).__name__ == "device":  # torch.device prints as its name
            match = re.fullmatch(r"(cpu|cuda|gpu)(?::(\d{1,9}))?", str(name))
            if match:
                return Device("cpu" if match[1] == "cpu" else "cuda", int(match[2] or 0))
            raise Invalid(f"unknown device {str(name)!r}: use 'cpu', 'cuda' or 'cuda:i'")
        raise WrongType(f"a device is a name such as 'cpu' or 'cuda:1', got {show(name)}")

    def __str__(self) -> str:
        return "cpu" if self == Device("cpu") else f"{self.kind}:{self.index}"

    __repr__ = __str__


def cpu(i: int = 0) -> Device:
    """The CPU: all cores of this machine; or number i of the devices that a framework was told to make of it.

    >>> cpu(), cpu(1)
    (cpu, cpu:1)
    """
    return Device("cpu", whole("cpu", "i", i))


def gpu(i: int = 0) -> Device:
    """GPU number i, whether it is there or not.

    >>> gpu(1)
    cuda:1
    """
    return Device("cuda", whole("gpu", "i", i))


def host_memory() -> tuple[int, int]:
    """Bytes in all and bytes in use on the host."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"]
    except OSError:  # not Linux: what is in use is not told
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0


Devices = str | int | Device | Sequence[str | Device]  # "auto", a count, a name, or a list: see resolve


def resolve(asked: Devices, shards: int, backend: Backend, place: Place | None = None) -> list[Device]:
    """The device of every replica, from what a user writes: "auto", a count, a name, or a list of names.

    Several processes on one host share its GPUs: "auto" and a count mean those of this process.
    """
    there = backend.devices()
    gpus = [device for device in there if device.kind == "cuda"]
    if gpus and place:
        lo, hi = cut(len(gpus), place.local_size)[place.local_rank]
        gpus = gpus[lo:hi] or [gpus[place.local_rank % len(gpus)]]
    if isinstance(asked, bool):
        raise WrongType(f"devices must be 'auto', a count, a name or a list of names, got {asked!r}")
    if isinstance(asked, str):
        if asked == "auto":
            return (gpus or [cpu()])[:shards]
        asked = int(asked) if re.fullmatch(r"\d{1,9}", asked) else [name.strip() for name in asked.split(",")]
    if isinstance(asked, int):
        if asked < 1:
            raise Invalid(f"devices must be at least 1, got {show(asked)}")
        pool = gpus or [device for device in there if device.kind == "cpu"]
        chosen = [pool[i % len(pool)] for i in range(min(asked, shards))]
    else:
        chosen = [Device.of(name) for name in (asked if isinstance(asked, Sequence) else [asked])]
    if not chosen:
        raise Invalid("devices is an empty list: name at least one, or write 'auto'")
    for device in chosen:
        backend.require(device)
    if len({device.kind for device in chosen}) > 1:
        names = ", ".join(map(str, chosen))
        raise Invalid(f"devices must be of one kind, got {names}: a CPU and a GPU round differently")
    if (count := asked if isinstance(asked, int) else len(chosen)) > shards:
        need = f"{show(count)} devices need at least {show(count)} shards"
        raise Invalid(f"{need}, got shards={shards}: raise shards or use fewer devices")
    return chosen

"""What lies inside a framework's shared library: its functions, and names that it keeps to itself.

The second are for the few settings of libraries that have no function.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

SYMBOLS = 2  # the kind of ELF's section that lists all names


def function(file: Path, name: str) -> Any:
    """A function of a library; None if there is no such library or function."""
    try:
        return ctypes.CDLL(str(file))[name]
    except (OSError, AttributeError):
        return None


def address(file: Path, name: str) -> int | None:
    """The address of a name in a library that this process has loaded; None if the library does not list it."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = [int(line.split("-")[0], 16) for line in lines if line.endswith(str(file.resolve()))]
    place = offset(file, name.encode()) if loaded else None
    return None if place is None else min(loaded) + place


def offset(file: Path, name: bytes) -> int | None:
    """Where a name lies from the library's start: ELF of 64 bits, as on Linux."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as inside:
        (start,), (count,) = struct.unpack_from("<Q", inside, 40), struct.unpack_from("<H", inside, 60)
        sections = [struct.unpack_from("<IIQQQQIIQQ", inside, start + 64 * i) for i in range(count)]
        for _, kind, _, _, where, size, link, *_ in sections:
            if kind == SYMBOLS:
                _, _, _, _, names, length, *_ = sections[link]
                found = inside.find(b"\0" + name + b"\0", names, names + length) + 1 - names
                symbols = np.frombuffer(inside[where : where + size], "<u4,<u4,<u8,<u8")
                places = symbols["f2"][symbols["f0"] == found] if found > 0 else []
                return int(places[0]) if len(places) else None
    return None

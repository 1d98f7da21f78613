"""What decides numbers and belongs to the machine: the CPU's vendor and instruction sets, and variables of libraries."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import Invalid

# Of those that a CPU can have, the ones by which libraries choose their kernels.
SETS = ("AVX2", "FMA3", "AVX512F", "AVX512_SKX", "AVX512_ICL", "AVX512BF16", "AVX512_SPR")
# Variables by which people choose kernels or a precision, as far as no framework tells what came of them.
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "NPY_DISABLE_CPU_FEATURES",
)  # fmt: skip


def cpu() -> dict[str, str]:
    """Vendor and instruction sets of this CPU, as it tells them now: a virtual machine may get others on another day."""
    core = np._core if hasattr(np, "_core") else np.core  # its name before NumPy 2
    has = core._multiarray_umath.__cpu_features__
    about = Path("/proc/cpuinfo")
    vendor = re.search(r"vendor_id\s*:\s*(\S+)", about.read_text()) if about.exists() else None  # as GenuineIntel
    sets = " ".join(name for name in SETS if has.get(name))
    return {"vendor": vendor[1] if vendor else platform.machine(), "sets": sets}


def require_avx2() -> None:
    if "AVX2" not in cpu()["sets"].split():
        raise Invalid("portable: this CPU has no AVX2, which portable runs need")


def variables(names: Iterable[str] = ()) -> dict[str, str]:
    """Those that are set, of the ones above and these."""
    return {name: os.environ[name] for name in (*VARIABLES, *names) if name in os.environ}


# Libraries that several frameworks bring along, asked for what is in effect; nothing if there is no such library

COMPATIBLE, AVX2 = 3, 7  # MKL's number for the branch that all CPUs have, and oneDNN's for the instruction set


def mkl(library: ctypes.CDLL | None) -> dict[str, Any]:
    """Version and branch of MKL. Branch 1 means the best for this CPU."""
    if library is None:
        return {}
    text = ctypes.create_string_buffer(200)
    library.MKL_Get_Version_String(text, len(text))
    version = " ".join(re.findall(r"(?:Version|Build) (\S+)", text.value.decode()))
    return {"mkl": version, "mkl_branch": library.mkl_serv_cbwr_get(1)}


def onednn(library: ctypes.CDLL | None) -> dict[str, Any]:
    """Version of oneDNN and its number for the instruction set. Asking settles that for the process."""
    if library is None:
        return {}
    library.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)  # more follows, as its commit
    version = ".".join(map(str, library.dnnl_version().contents))
    return {"onednn": version, "onednn_isa": library.dnnl_get_effective_cpu_isa()}


def denormals() -> str:
    """Whether this thread turns very small numbers to zero."""
    return "kept" if np.float32(1e-39) * np.float32(0.5) else "flushed"


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """A variable, set for a while: a library reads it when it starts something."""
    before = {name: os.environ[name]} if name in os.environ else {}
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update(before)

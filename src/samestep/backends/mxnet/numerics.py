"""What decides MXNet's numbers beside the model: its build, libraries, settings and kernels. docs/numerics.md has a list."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import nd

from samestep.backends import numerics
from samestep.devices import Device
from samestep.portable import too_late

VARIABLES = ("MXNET_SAFE_ACCUMULATION", "MXNET_MKLDNN_ENABLED", "MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "MXNET_SUBGRAPH_BACKEND",
             "DNNL_CPU_ISA_HINTS")  # fmt: skip


def found(devices: Sequence[Device], travels: bool) -> dict[str, Any]:
    files = metadata.files("mxnet") or []
    hashes = [file.hash.value[:16] for file in files if file.name == "libmxnet.so" and file.hash]
    openblas, core = openblas_is()
    # amp.init wraps functions of MXNet for good, and keeps no record.
    amp = any(Path(one.__code__.co_filename).name == "amp.py" for one in vars(nd).values() if hasattr(one, "__code__"))
    settings = {"np_array": mx.util.is_np_array(), "np_shape": bool(mx.util.is_np_shape()), "amp": amp,
                "denormals": numerics.denormals()}  # fmt: skip
    about = {"build": " ".join([mx.__version__, *hashes]), "openblas": openblas, "kernels": core, "settings": settings,
             "variables": numerics.variables(VARIABLES)}  # fmt: skip
    return about if travels else {**about, "cpu": numerics.cpu()}


def openblas_is() -> tuple[str, str]:
    """The version of OpenBLAS, and the kind of CPU whose kernels it has chosen."""
    try:
        library = ctypes.CDLL(str(Path(mx.__file__).parent / "libopenblas.so.0"))
    except OSError:  # another build
        return "", ""
    config, core = library.openblas_get_config, library.openblas_get_corename
    config.restype = core.restype = ctypes.c_char_p
    return config().decode().split()[1], core().decode()


def require_portable() -> None:
    """Refuse if the variables were set after MXNet was imported: OpenBLAS reads its own then, oneDNN later."""
    numerics.require_avx2()
    if (core := openblas_is()[1]) not in ("Haswell", ""):
        raise too_late(f"OpenBLAS took kernels for {core} when MXNet was imported. Import samestep before mxnet")

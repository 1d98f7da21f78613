"""What decides Paddle's numbers beside the model: its build, libraries, settings and kernels. docs/numerics.md has a list."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle

from samestep import portable
from samestep.backends import numerics
from samestep.devices import Device

MKL, ONEDNN = (
    next((ctypes.CDLL(str(path)) for path in Path(paddle.__file__).parent.glob(f"libs/{name}")), None)
    for name in ("libmklml_intel.so", "libdnnl.so.*")
)
FLAGS = ["FLAGS_use_mkldnn", "FLAGS_use_onednn", "FLAGS_prim_forward", "FLAGS_prim_backward"]  # for compiled layers


def found(devices: Sequence[Device], travels: bool) -> dict[str, Any]:
    about = {
        "build": f"{paddle.__version__} {paddle.version.commit}"[:24], **numerics.mkl(MKL), **numerics.onednn(ONEDNN),
        "settings": {"default_dtype": paddle.get_default_dtype(), "denormals": numerics.denormals(), **paddle.get_flags(FLAGS)},
        "variables": numerics.variables(["MKL_DOMAIN_NUM_THREADS"]),
    }  # fmt: skip
    return about if travels else {**about, "cpu": numerics.cpu()}


def require_portable() -> None:
    """Refuse if MKL or oneDNN chose their kernels before the variables were set. exact.py is about Paddle's own kernels."""
    numerics.require_avx2()
    if numerics.mkl(MKL).get("mkl_branch") not in (None, numerics.COMPATIBLE):
        raise portable.too_late("MKL has already chosen its kernels by the CPU")
    if numerics.onednn(ONEDNN).get("onednn_isa") not in (None, numerics.AVX2):
        raise portable.too_late("oneDNN has already chosen its kernels by the CPU")

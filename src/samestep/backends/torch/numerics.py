"""What decides PyTorch's numbers beside the model: its build, libraries, settings and kernels. docs/numerics.md has a list."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samestep import portable
from samestep.backends import numerics
from samestep.devices import Device
from samestep.errors import Invalid

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
KERNELS = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
MKL = ctypes.CDLL(str(KERNELS)) if torch.backends.mkl.is_available() else None
# Settings by the names of their getters: on the CPU, and on GPUs.
CPU = ("mkldnn_enabled", "nnpack_enabled")
GPU = ("cudnn_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled",
       "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction")  # fmt: skip


def found(devices: Sequence[Device], travels: bool) -> dict[str, Any]:
    build, gpu = torch.__config__.show(), devices[0].kind == "cuda"
    about: dict[str, Any] = {"build": f"{torch.__version__} {torch.version.git_version or ''}"[:24]}
    about["onednn"] = text[1] if (text := re.search(r"MKL-DNN (v\S+)", build)) else None
    about |= {"settings": settings(gpu), "variables": numerics.variables(VARIABLES)}
    if gpu:
        cards = map(torch.cuda.get_device_properties, {device.index for device in devices})
        about["gpu"] = ", ".join(sorted({f"{card.name}, {card.multi_processor_count} SMs" for card in cards}))
        return {**about, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    about |= {"kernels": torch.backends.cpu.get_cpu_capability(), **numerics.mkl(MKL)}
    return about if travels else {**about, "cpu": numerics.cpu()}


def settings(gpu: bool) -> dict[str, Any]:
    """Settings of the user's that change numbers. A run does not touch them: it may be about them."""
    einsum = torch.backends.opt_einsum
    about = {
        "default_dtype": str(torch.get_default_dtype()), "denormals": numerics.denormals(),
        "einsum": str(einsum.strategy) if einsum.enabled and einsum.is_available() else "as written",
        "mha_fastpath": torch.backends.mha.get_fastpath_enabled(),
    }  # fmt: skip
    about |= {name: repr(getattr(torch._C, f"_get_{name}")()) for name in (GPU if gpu else CPU)}
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:  # before PyTorch 2.9
        return about | {"matmul": torch.get_float32_matmul_precision(), "tf32": torch.backends.cudnn.allow_tf32}
    # How float32 is multiplied. "none" takes what holds for all, which is "ieee" where nothing was said.
    return about | {k: read("cuda" if gpu else "mkldnn", k).replace("none", "ieee") for k in ("matmul", "conv", "rnn")}


def modes_around() -> str:
    """Modes of the caller's thread that other threads do not have, by name."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    return ", ".join(names + [f"autocast ({kind})" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)])


def require_portable() -> None:
    """Refuse if PyTorch computed before the variables were set: then ATen has chosen its kernels, and maybe oneDNN, too."""
    if not hasattr(torch.library, "get_kernel"):
        raise Invalid(f"portable: needs PyTorch 2.9 or later, got {torch.__version__}")
    numerics.require_avx2()
    kernels, branch = torch.backends.cpu.get_cpu_capability(), numerics.mkl(MKL).get("mkl_branch")
    if kernels != "AVX2":
        raise portable.too_late(f"PyTorch already computes with {kernels}")
    if branch not in (None, numerics.COMPATIBLE):
        raise portable.too_late("MKL has already chosen its kernels by the CPU")

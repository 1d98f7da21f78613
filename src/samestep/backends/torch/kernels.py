"""Kernels for portable runs in place of MKL's, which differ from CPU to CPU. docs/numerics.md tells where it was shown.

Square roots by NumPy, which are exact everywhere: many of MKL's are one bit off, and others on each kind of CPU. Products of
float32 matrices by oneDNN at AVX2: MKL has a branch for all CPUs, but that is slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def of_every_cpu() -> Iterator[None]:
    """While this lasts, sqrt, the power 0.5, mm and addmm of PyTorch on the CPU have the same bits on every one."""
    aten, library = torch.ops.aten, torch.library.Library("aten", "IMPL")
    ops = (aten.sqrt.default, aten.pow.Tensor_Scalar, aten.mm.default, aten.addmm.default)
    usual_sqrt, usual_pow, usual_mm, usual_addmm = (torch.library.get_kernel(op, "CPU") for op in ops)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def sqrt(x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64):
            return usual_sqrt.call_boxed(keys, x)
        out = torch.empty_like(x)
        with np.errstate(invalid="ignore"):  # of a negative number it is NaN, as PyTorch's
            np.sqrt(x.detach().numpy(), out=out.numpy())
        return out

    def power(x: Tensor, exponent: Any) -> Tensor:
        return sqrt(x) if exponent == 0.5 else usual_pow.call_boxed(keys, x, exponent)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b) if _is_ours(a, b) else usual_mm.call_boxed(keys, a, b)

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if beta == alpha == 1 and bias.shape == b.shape[1:] and bias.dtype == a.dtype and _is_ours(a, b):
            return _product(a, b, bias)
        return usual_addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    kernels = {
        "sqrt": sqrt, "sqrt_": lambda x: x.copy_(sqrt(x)), "sqrt.out": lambda x, *, out: out.resize_(x.shape).copy_(sqrt(x)),
        "pow.Tensor_Scalar": power, "pow_.Scalar": lambda x, exponent: x.copy_(power(x, exponent)), "mm": mm, "addmm": addmm,
        "mm.out": lambda a, b, *, out: out.resize_((result := mm(a, b)).shape).copy_(result),
    }  # fmt: skip
    with warnings.catch_warnings(action="ignore"):  # PyTorch tells that it has kernels for these
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _is_ours(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is to multiply. All other products are left to MKL's branch."""
    return a.dtype == b.dtype == torch.float32 and a.shape[-1:] == b.shape[:1] and a.numel() * b.numel() > 0


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    dense = (x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous() for x in (a, b.t()))
    result: Tensor = torch.ops.mkldnn._linear_pointwise(*dense, bias, "none", [], "")
    return result

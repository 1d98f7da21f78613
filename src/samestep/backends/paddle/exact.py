"""Portable runs: kernels of Paddle that are not the same on every CPU are replaced for the time of the run, or refused.

In float32 these kernels take square roots from the CPU's own estimate (the instruction rsqrtps), which Intel and AMD round
differently; in float64 they do not. Adam and AdamW have kernels of their own for CPUs with AVX512. No variable or flag chooses
other ones. docs/numerics.md tells how this was found, by computing some 500 operations on several CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import paddle
from paddle import _C_ops

from samestep.backends.replacing import replaced
from samestep.errors import Invalid

REPLACED = ("sqrt", "rsqrt", "erfinv", "asin", "acos", "asinh", "acosh", "instance_norm", "batch_norm")
REFUSED = ("Adam", "AdamW", "Adagrad", "Adadelta", "RMSProp", "NAdam")  # optimizers with such kernels


def exact() -> AbstractContextManager[None]:
    """Compute these operations in float64. The type of their results is as before."""
    twins = {id(kernel): (kernel, _in_float64(kernel)) for kernel in (getattr(_C_ops, name) for name in REPLACED)}
    # Paddle's modules call a kernel as _C_ops.sqrt, or have it as their own.
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "paddle" and module]
    return replaced([(module, name, twins[id(value)][1]) for module in modules for name, value in vars(module).items()
                     if id(value) in twins])  # fmt: skip


def check_optimizer(optimizer: Any, portable: bool) -> None:
    """Refuse an optimizer that would make other updates on another CPU."""
    for kind in type(optimizer).__mro__ if portable else ():
        if kind.__module__.startswith("paddle.optimizer") and kind.__name__ in REFUSED:
            raise Invalid(f"portable: Paddle's {kind.__name__} has other bits on other CPUs: use samestep's: ss.adam()")


def _in_float64(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*given: Any, **named: Any) -> Any:
        if not any(map(_is_narrow, (*given, *named.values()))):
            return kernel(*given, **named)
        out, wide = named.pop("out", None), [_wide(value) for value in given]
        result = kernel(*wide, **{name: _wide(value) for name, value in named.items()})
        if not isinstance(result, (list, tuple)):
            return result.astype("float32") if out is None else paddle.assign(result.astype("float32"), out)
        # Batch norm, with its mean and variance second and third; the last two: do not touch them, or touch them nevertheless.
        if not given[9] and (given[10] or not given[5]):
            with paddle.no_grad():
                for own, new in zip(given[1:3], wide[1:3], strict=True):
                    paddle.assign(new.astype(own.dtype), own)
        return result[0].astype("float32"), *result[1:]

    return computed


def _is_narrow(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and value.dtype == paddle.float32


def _wide(value: Any) -> Any:
    return value.astype("float64") if _is_narrow(value) else value

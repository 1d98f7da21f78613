"""Settings of PyTorch that a run needs for its precision, and for compiling."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch

PLACES = [(by, what) for by in ("cuda", "mkldnn") for what in ("matmul", "conv", "rnn")]
DYNAMO = {"recompile_limit": 1 << 10, "accumulated_recompile_limit": 1 << 14, "fail_on_recompile_limit_hit": True}
REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextmanager
def of(precision: str) -> Iterator[None]:
    """While this lasts, float32 is multiplied as float32 or, on GPUs, as TF32, and no sum of a product is rounded to 16 bits.

    What the user had set comes back. bfloat16 is autocast in the lanes: what stays float32 there is multiplied as such.
    """
    read, write = (getattr(torch._C, f"_{way}_fp32_precision_{way}ter", None) for way in ("get", "set"))
    before = {place: read(*place) for place in PLACES} if read else {}
    products, usual, reduced = torch.backends.cuda.matmul, dict[str, Any](), dict[str, Any]()
    with suppress(RuntimeError):  # of somebody who has used PyTorch's old names and its new ones
        usual = {"matmul": torch.get_float32_matmul_precision(), "conv": torch.backends.cudnn.allow_tf32}
    for name in REDUCED:
        reduced[name] = getattr(products, name)
        setattr(products, name, False)
    tf32 = precision == "tf32"
    _old_names("high" if tf32 else "highest", tf32)
    for by, what in before:
        write(by, what, "tf32" if tf32 and by == "cuda" else "ieee")
    try:
        yield
    finally:
        for name, value in reduced.items():
            setattr(products, name, value)
        if usual:
            _old_names(usual["matmul"], usual["conv"])
        for place, value in before.items():
            write(*place, value)


@contextmanager
def compiling(precision: str) -> Iterator[None]:
    """While this lasts, torch.compile chooses nothing by a stopwatch, and never computes without compiling in silence.

    So it would not widen matrices to whole multiples of what tensor cores take, either, unless it always does.
    """
    from torch._dynamo import config as dynamo  # slow to import
    from torch._inductor import config as inductor

    wanted = {"deterministic": True, "force_shape_pad": precision != "float32"}
    with dynamo.patch(DYNAMO), inductor.patch({name: wanted[name] for name in wanted if hasattr(inductor, name)}):
        yield


def compile_in_thread() -> None:
    """The same in another thread, which has settings of its own."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    for name, value in DYNAMO.items():
        setattr(dynamo, name, value)
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True


@functools.lru_cache(maxsize=64)
def compiled(function: Callable[..., Any]) -> Any:
    """A function, compiled; equal ones are compiled once, and what was compiled for one caller fits the others."""
    plain = isinstance(function, FunctionType)  # lambdas share their code, by which PyTorch skips what it refuses
    return torch.compile(function if plain else lambda *given: function(*given), dynamic=False)


def _old_names(matmul: str, conv: bool) -> None:
    """Other parts of PyTorch still read these, and complain where they disagree with the new names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv

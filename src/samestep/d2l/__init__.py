"""The chapters' names: `samestep.d2l.torch`, `.jax`, `.tensorflow`, `.paddle` and `.mxnet` are what the book calls `d2l`."""

from __future__ import annotations

from typing import Any

from samestep.backends import find


def __getattr__(name: str) -> Any:  # `from samestep.d2l import torch` says what to install, if it is not there
    if name in find.FRAMEWORKS:
        return find.imported(f"samestep.d2l.{name}", name)
    raise AttributeError(f"module 'samestep.d2l' has no attribute {name!r}")

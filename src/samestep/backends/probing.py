"""Checks of a model and one example before a run begins, the same in every framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samestep.backends.base import Backend, Shape
from samestep.backends.layout import Numbers
from samestep.errors import Invalid, WrongType


def check_weights(model: str, dtypes: Iterable[str]) -> str:
    """The one type of the trained weights, from the types of all of them."""
    found = sorted(set(dtypes))
    if not found:
        raise Invalid(f"the model {model} has no parameters to train")
    if found not in (["float32"], ["float64"]):
        raise WrongType(f"the trained parameters must all be float32 or all float64, got {', '.join(found)}")
    return found[0]


def check_examples(name: str, x: Numbers, dtype: str) -> None:
    if x.dtype.kind == "f" and str(x.dtype) != dtype:
        raise convert(name, x, dtype)


def convert(name: str, x: Numbers, dtype: str) -> WrongType:
    """The error for examples that are not of the weights' type."""
    return WrongType(f"{name} is {x.dtype} and the model {dtype}: convert one, for example with x.astype('{dtype}')")


def check_output(backend: Backend, output: Any, y: Numbers, loss: Any, dtype: str) -> Shape:
    """Check the output for one example, and describe it."""
    shape = tuple(output.shape) if backend.is_array(output) else None
    whole, rank = y.dtype.kind in "iu", -1 if shape is None else len(shape)
    if loss is None and not (rank > 1 and whole):
        got = type(output).__name__ if shape is None else f"{backend.a_word} of shape {shape}"
        raise WrongType(
            f"the default loss, softmax cross-entropy, needs {backend.a_word} of scores per class and whole-number labels, "
            f"got {got} and labels of {y.dtype}: pass loss=f(output, y)"
        )
    if loss is None and rank == 2 and y.ndim != 1:
        raise Invalid(f"labels must be of shape (n,), got (n, {', '.join(map(str, y.shape[1:]))}): use y.reshape(-1)")
    return Shape(shape[1] if shape is not None and rank == 2 and y.ndim == 1 and whole else None, dtype)

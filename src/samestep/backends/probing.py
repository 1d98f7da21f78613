"""What is said of a model and one example before a run begins, alike in every framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from samestep.backends import Shape
from samestep.errors import Invalid, WrongType


def check_weights(model: str, dtypes: Iterable[str]) -> str:
    """The one type of the trained weights, from the types of all of them."""
    found = sorted(set(dtypes))
    if not found:
        raise Invalid(f"the model {model} has no parameters to train")
    if found not in (["float32"], ["float64"]):
        raise WrongType(f"the trained parameters must all be float32 or all float64, got {', '.join(found)}")
    return found[0]


def convert(name: str, x: np.ndarray[Any, Any], dtype: str) -> WrongType:
    """The error for examples that are not of the weights' type."""
    return WrongType(f"{name} is {x.dtype} and the model {dtype}: convert one, for example with x.astype('{dtype}')")


def check_examples(name: str, x: np.ndarray[Any, Any], dtype: str) -> None:
    if x.dtype.kind == "f" and str(x.dtype) != dtype:
        raise convert(name, x, dtype)


def check_output(
    word: str, shape: tuple[int, ...] | None, kind: str, y: np.ndarray[Any, Any], loss: Any, dtype: str
) -> Shape:
    """What one example gave: an array of a shape (`word` is the framework's for it), or a `kind` of thing."""
    whole, rank = y.dtype.kind in "iu", -1 if shape is None else len(shape)
    if loss is None and not (rank > 1 and whole):
        article = "an" if word[0] in "aeiou" else "a"
        got = kind if shape is None else f"{article} {word} of shape {tuple(shape)}"
        raise WrongType(
            f"the default loss, softmax cross-entropy, needs {article} {word} of scores per class and whole-number labels, got "
            f"{got} and labels of {y.dtype}: pass loss=f(output, y)"
        )
    if loss is None and rank == 2 and y.ndim != 1:
        raise Invalid(f"labels must be of shape (n,), got (n, {', '.join(map(str, y.shape[1:]))}): use y.reshape(-1)")
    return Shape(shape[1] if shape is not None and rank == 2 and y.ndim == 1 and whole else None, dtype)

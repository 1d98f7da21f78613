"""What a model gives, the same in every framework: its losses and hits, and checks with one example before a run begins."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from samestep.backends.layout import Numbers
from samestep.errors import Invalid, WrongType

Array = Any  # an array of the framework


@dataclass(frozen=True)
class Shape:
    """What a model makes of one example, found before training starts."""

    classes: int | None  # the length of the output if it is one score per class, else None
    dtype: str  # of the weights, as NumPy names it


def wants_labels_first(loss: Any) -> bool:
    """Keras's own losses are functions of (y_true, y_pred)."""
    try:
        return next(iter(inspect.signature(loss).parameters), "") == "y_true"
    except (TypeError, ValueError):  # it has no signature
        return False


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


def leaves(root: Any) -> list[Any]:
    """The variables at the ends of a graph of PyTorch's gradient functions."""
    found, waiting = {root: None}, [root]
    while waiting:
        new = [node for node, _ in getattr(waiting.pop(), "next_functions", ()) if node not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return [node.variable for node in found if hasattr(node, "variable")]


def not_trained(parameter: str) -> Invalid:
    """The error for a parameter that is used and that no replica has."""
    return Invalid(
        f"the loss depends on a parameter ({parameter}) that is not part of what is trained, a copy of the model: does a "
        "closure hold it (self.f = lambda x: self.layer(x))? Write a method, make it a part of the model, or freeze it"
    )


class Losses(ABC):
    """The part of a Backend that computes losses. It also says what a user's loss may return, and what counts as a hit."""

    an_array = "a tensor"  # the framework's word for an array
    before_loss: Callable[[], None] = staticmethod(lambda: None)  # called between a forward pass and its loss

    @abstractmethod
    def is_array(self, thing: object) -> bool:
        """Whether it is an array of this framework."""

    def sum_of_losses(self, loss: Any, output: Any, y: Array) -> Array:
        """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
        self.before_loss()
        if loss is None:
            return self.cross_entropy(output, y)
        value = self.call_loss(loss, output, y)
        if not self.is_array(value):
            raise WrongType(
                f"loss must return {self.an_array} (a loss per example, or their mean), got {type(value).__name__}"
            )
        if self.is_single(value):
            return value if getattr(loss, "reduction", "mean") == "sum" else value * self.count(y, value)
        if value.shape[0] != y.shape[0]:
            raise Invalid(
                f"loss must return one value per example ({y.shape[0]}) or their mean, got shape {tuple(value.shape)}"
            )
        return self.sum_of_means(value)

    @abstractmethod
    def cross_entropy(self, output: Array, y: Array) -> Array:
        """The default loss: softmax cross-entropy, summed over the examples."""

    def is_single(self, value: Array) -> bool:
        """Whether a loss is one number for all examples."""
        return len(value.shape) == 0

    def call_loss(self, loss: Any, output: Any, y: Array) -> Any:
        return loss(output, y)

    def count(self, y: Array, like: Array) -> Any:
        """The number of examples, as something to multiply an array with."""
        return len(y)

    def sum_of_means(self, value: Array) -> Array:
        """The sum over the examples of the mean over the values of each."""
        return value.reshape((len(value), -1)).mean(1).sum() if len(value.shape) > 1 else value.sum()

    def has_scores(self, output: Any, y: Array) -> bool:
        """Whether the output is one score per class, for labels."""
        return self.is_array(output) and len(output.shape) == 2 and len(y.shape) == 1 and "int" in str(y.dtype)

    def hits(self, output: Any, y: Array) -> Array:
        """How many examples have their highest score at their label; 0 where the output is not one score per class."""
        return self.count_hits(output, y) if self.has_scores(output, y) else self.zero(y)

    @abstractmethod
    def count_hits(self, output: Array, y: Array) -> Array: ...
    @abstractmethod
    def zero(self, like: Array) -> Array:
        """The number 0, on the device of this array."""

    def check_output(self, output: Any, y: Numbers, loss: Any, dtype: str) -> Shape:
        """Check the output for one example, and describe it."""
        shape = tuple(output.shape) if self.is_array(output) else ()
        whole, rank = y.dtype.kind in "iu", len(shape)
        if loss is None and not (rank > 1 and whole):
            got = f"{self.an_array} of shape {shape}" if self.is_array(output) else type(output).__name__
            raise WrongType(
                f"the default loss, softmax cross-entropy, needs {self.an_array} of scores per class and whole-number labels, "
                f"got {got} and labels of {y.dtype}: pass loss=f(output, y)"
            )
        if loss is None and rank == 2 and y.ndim != 1:
            raise Invalid(
                f"labels must be of shape (n,), got (n, {', '.join(map(str, y.shape[1:]))}): use y.reshape(-1)"
            )
        return Shape(shape[1] if rank == 2 and y.ndim == 1 and whole else None, dtype)

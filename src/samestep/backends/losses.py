"""What a model gives, the same in every framework: losses, hits, metrics, and checks with one example before a run begins."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep.backends.calling import Style
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree, first, paths

Array = Any  # an array of the framework
IGNORED = -100  # a label that does not count, as PyTorch and Hugging Face have it
# Whose losses are over examples.
KNOWN = {"torch", "jax", "optax", "keras", "tensorflow", "paddle", "mxnet", "samestep"}
# Some are not: these couple examples, are sums, or means over the labels that are not ignored.
BUT = {
    "ntxent", "circle", "Circle", "CircleLoss", "dice", "Dice", "tversky", "Tversky", "SDMLLoss", "sigmoid_focal_loss",
    "LinearCrossEntropyLoss", "multiclass_generalized_dice_loss",
}  # fmt: skip
MEAN, SUM, WEIGHTED = "mean", "sum", "weighted"


@dataclass(frozen=True)
class Measure:
    """What is computed from a model's output."""

    loss: Any = None
    kind: str = MEAN  # of the loss: over examples; a sum; or one over a weight that the loss gives, too
    metrics: tuple[tuple[str, Any], ...] = ()  # by name: functions of (output, y) that give (sum, weight)
    style: Style = False  # how the model takes x

    @staticmethod
    def of(given: Any) -> Measure:
        """What was given, or one for a loss."""
        return given if isinstance(given, Measure) else Measure(given)

    @property
    def function(self) -> Any:
        """The loss itself, also if it is meant for a shard."""
        return self.loss.function if isinstance(self.loss, PerShard) else self.loss

    @property
    def more(self) -> int:
        """How many numbers a shard gives beside its loss and its hits."""
        return (self.kind == WEIGHTED) + 2 * len(self.metrics)


@dataclass(frozen=True)
class Shape:
    """What a model makes of one example, found before training starts."""

    classes: int | None  # the length of the output if it is one score per class, else None
    dtype: str  # of the weights, as NumPy names it
    kind: str = MEAN  # of the loss
    foreign: bool = False  # the loss is one that neither samestep nor the framework has written
    labels: int | None = None  # the number of classes, if the default loss is to check labels
    unlike: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shapes of one output and one y that may broadcast


@dataclass(frozen=True)
class PerShard:
    """A loss that is meant for a shard, not for a batch; see `per_shard`."""

    function: Any


def per_shard(loss: Callable[[Any, Any], Any]) -> PerShard:
    """A loss that couples the examples of a shard, such as a contrastive one: a step follows the mean over the shards.

    Such a loss is another one for another number of shards. Without this word it is refused.

    >>> per_shard(max).function
    <built-in function max>
    """
    if not callable(loss):
        raise WrongType(f"per_shard needs a function of (output, y), got {type(loss).__name__}")
    return PerShard(loss)


def wants_labels_first(loss: Any) -> bool:
    """Keras's own losses are functions of (y_true, y_pred)."""
    try:
        return next(iter(inspect.signature(loss).parameters), "") == "y_true"
    except (TypeError, ValueError):  # it has no signature
        return False


def setting(loss: Any, name: str) -> Any:
    """A setting of a loss that is an object or a function with some arguments given; None if it has no such."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def foreign(loss: Any) -> bool:
    """Whether somebody else than a framework has written a loss, or it must be tried as those are: if wrapped, for example."""
    home = str(getattr(loss, "__module__", None) or type(loss).__module__).split(".")  # of a partial: functools
    wrapped = hasattr(loss, "__wrapped__") or {"jit", "_dynamo"} & {*home}
    known = home[0] in KNOWN and not wrapped and getattr(loss, "__name__", type(loss).__name__) not in BUT
    return not isinstance(loss, PerShard) and not known


def check_weights(model: str, dtypes: Iterable[str]) -> str:
    """The one type of the trained weights, from the types of all of them."""
    found = sorted(set(dtypes))
    if not found:
        raise Invalid(f"the model {model} has no parameters to train")
    if found not in (["float32"], ["float64"]):
        raise WrongType(f"the trained parameters must all be float32 or all float64, got {', '.join(found)}")
    return found[0]


class Wide(WrongType):
    """Examples of float64 for a model of float32: these are converted, and the message is a warning."""


def check_examples(name: str, x: Tree, dtype: str, y: Tree) -> None:
    """Refuse examples x of another precision than the weights. `name` is that of x, and tells the name of y."""
    for path, array in paths(x, name):
        if array.dtype.kind == "f" and str(array.dtype) not in (dtype, "float64"):
            raise convert(path, array, dtype)
    both = [*paths(x, name), *(paths(y, f"{name[:-1]}y") if y is not x else ())]
    wide = [path for path, array in both if str(array.dtype) == "float64"]
    if wide and dtype == "float32":
        who = f"{' and '.join(wide)} {'is' if len(wide) == 1 else 'are'} float64 and the model float32"
        what = "x" if wide[0].startswith(name) else "y"
        raise Wide(f"{who}: converted to float32; pass {what}.astype('float32') to be silent")


def convert(name: str, x: Tree, dtype: str) -> WrongType:
    """The error for examples that are not of the weights' type."""
    kinds = " and ".join(dict.fromkeys(str(array.dtype) for _, array in paths(x)))
    return WrongType(f"{name} is {kinds} and the model {dtype}: convert one, for example with x.astype('{dtype}')")


def not_floats(x: Tree) -> bool:
    """Whether an error about types may come from examples of whole numbers."""
    return any(array.dtype.kind != "f" for _, array in paths(x))


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


def part(thing: Any, *names: str) -> Any:
    """The first of these that a dictionary or an object (a ModelOutput) has and that is not None."""
    inside = thing.get if isinstance(thing, Mapping) else functools.partial(getattr, thing)
    for name in names:  # no generator: older compilers of PyTorch cannot read one with := in it
        if (found := inside(name, None)) is not None:
            return found
    return None


def class_axis(scores: tuple[int, ...], labels: tuple[int, ...]) -> int:
    """Where the classes lie in scores for every position: last, as in (B, L, V), or at 1, as in (B, V, L)."""
    places = [axis for axis in (1, len(scores) - 1) if scores[:axis] + scores[axis + 1 :] == labels]
    if len(set(places)) != 1:
        raise Invalid(
            f"the default loss needs scores of shape (B, L, V) or (B, V, L) for labels of shape (B, L), "
            f"got {scores} for {labels}{', which could be either' if places else ''}: pass loss=f(output, y)"
        )
    return places[0]


class Losses(ABC):
    """The part of a Backend that computes losses. It also says what a user's loss may return, and what counts as a hit."""

    an_array = "a tensor"  # the framework's word for an array
    before_loss: Callable[[], None] = staticmethod(lambda: None)  # called between a forward pass and its loss

    @abstractmethod
    def is_array(self, thing: object) -> bool:
        """Whether it is an array of this framework."""

    def measured(self, measure: Measure, output: Any, y: Tree) -> list[Array]:
        """[loss, hits, the loss's weight if it has one, sum and weight of every metric], summed over the examples."""
        self.before_loss()
        loss, weight = self.loss_of(measure, output, y)
        numbers = [loss, self.hits(output, y)]
        if (weight is not None) != (measure.kind == WEIGHTED):
            raise WrongType("loss must give (sum, weight) for every batch, or for none")
        if weight is not None:
            numbers.append(self.number(weight, loss))
        for name, metric in measure.metrics:
            numbers += [self.number(one, loss) for one in self._pair(f"metric {name!r}", metric(output, y))]
        return numbers

    def loss_of(self, measure: Measure, output: Any, y: Tree) -> tuple[Array, Any]:
        """The sum over examples of the loss, and its weight, if it is one over a weight and not over the examples."""
        loss = measure.function
        value = part(output, "loss") if loss is None else self.call_loss(loss, output, y)
        if value is None and loss is None:
            scores, labels = self.scores(output), self.labels(y)
            if len(labels.shape) > 1:
                return self.by_position(scores, labels)
            return self.cross_entropy(scores, labels), None
        if isinstance(value, (tuple, list)):
            return self._pair("loss", value)
        if not self.is_array(value):
            raise WrongType(
                f"loss must return {self.an_array} (a loss per example, or their mean) or (sum, weight), "
                f"got {type(value).__name__}"
            )
        if self.is_single(value):
            return value if measure.kind == SUM else value * self.count(y, value), None
        if value.shape[0] != (n := first(y).shape[0]):
            raise Invalid(f"loss must return one value per example ({n}) or their mean, got shape {tuple(value.shape)}")
        return self.sum_of_means(value), None

    def _pair(self, what: str, value: Any) -> tuple[Array, Any]:
        numbers = isinstance(value, (tuple, list)) and len(value) == 2 and [
            isinstance(n, (int, float, np.generic)) or (self.is_array(n) and self.is_single(n)) for n in value]  # fmt: skip
        if not numbers or not all(numbers) or (what == "loss" and not self.is_array(value[0])):
            got = tuple(value.shape) if self.is_array(value) else type(value).__name__
            inside = f" of {', '.join(str(getattr(one, 'shape', one)) for one in value)}" if numbers else ""
            raise WrongType(f"{what} must return (sum, weight), two single numbers, got {got}{inside}")
        return value[0], value[1]

    def scores(self, output: Any) -> Any:
        """The scores for every class in an output, which may be an object or a dictionary with `logits`."""
        return output if self.is_array(output) else part(output, "logits")

    def labels(self, y: Tree) -> Any:
        """The labels in y, which may be a whole batch."""
        return part(y, "labels", "label") if isinstance(y, Mapping) else y

    @abstractmethod
    def cross_entropy(self, output: Array, y: Array) -> Array:
        """The default loss: softmax cross-entropy, summed over the examples."""

    @abstractmethod
    def by_position(self, output: Array, y: Array) -> tuple[Array, Array]:
        """The default loss for labels at every position: summed over those that are not IGNORED, and how many these are."""

    def is_single(self, value: Array) -> bool:
        """Whether a loss is one number for all examples."""
        return len(value.shape) == 0

    def call_loss(self, loss: Any, output: Any, y: Tree) -> Any:
        return loss(output, y)

    def count(self, y: Tree, like: Array) -> Any:
        """The number of examples, as something to multiply an array with."""
        return first(y).shape[0]

    @abstractmethod
    def number(self, value: Any, like: Array) -> Array:
        """One number, the framework's or Python's, of the type and on the device of a loss, without a gradient."""

    def sum_of_means(self, value: Array) -> Array:
        """The sum over the examples of the mean over the values of each."""
        return value.reshape((len(value), -1)).mean(1).sum() if len(value.shape) > 1 else value.sum()

    def has_scores(self, output: Any, y: Any) -> bool:
        """Whether the output is one score per class, for labels."""
        arrays = self.is_array(output) and hasattr(y, "shape")
        return arrays and len(output.shape) == 2 and len(y.shape) == 1 and "int" in str(y.dtype)

    def hits(self, output: Any, y: Tree) -> Array:
        """How many examples have their highest score at their label; 0 where the output is not one score per class."""
        scores, labels = self.scores(output), self.labels(y)
        if self.has_scores(scores, labels):
            return self.count_hits(scores, labels)
        return self.zero(first(y))

    @abstractmethod
    def count_hits(self, output: Array, y: Array) -> Array: ...
    @abstractmethod
    def zero(self, like: Array) -> Array:
        """The number 0, on the device of this array."""

    def described(self, measure: Measure, output: Any, y: Tree, given: Tree, dtype: str) -> Shape:
        """Check what comes out for one example, and describe it; `given` is y on the host."""
        scores, labels = self.scores(output), self.labels(given)
        shape = tuple(scores.shape) if self.is_array(scores) else ()
        whole, rank = hasattr(labels, "dtype") and labels.dtype.kind in "iu", len(shape)
        classes = None
        if measure.loss is None and part(output, "loss") is None:
            shown = output if scores is None else scores, given if labels is None else labels
            kind, classes = self._check_default(*shown, shape, whole)
        else:
            _, weight = self.loss_of(measure, output, y)
            kind = WEIGHTED if weight is not None else MEAN
            if setting(measure.loss, "reduction") == "sum" and self.is_single(self.call_loss(measure.loss, output, y)):
                kind = SUM  # and not over the classes of each example
        for name, metric in measure.metrics:
            self._pair(f"metric {name!r}", metric(output, y))
        own = part(output, "loss") is not None if measure.loss is None else foreign(measure.loss)
        tried = measure.loss is not None and not isinstance(measure.loss, PerShard)
        shapes = shape[1:], tuple(getattr(given, "shape", ()))[1:]
        tried = tried and self.is_array(output) and hasattr(given, "dtype") and shapes[0] != shapes[1]
        tried = tried and (given.dtype.kind == "f" or sorted(shapes) == [(), (1,)])  # other whole numbers are labels
        by_class = rank == 2 and shape[1] > 1 and whole and labels.ndim == 1  # a single score is not one of a class
        return Shape(shape[1] if by_class else None, dtype, kind, own, classes, shapes if tried else None)

    def _check_default(self, scores: Any, labels: Any, shape: tuple[int, ...], whole: bool) -> tuple[str, int]:
        """Whether the default loss will do; returns its kind, and the number of classes."""
        if not (len(shape) > 1 and whole):
            got = f"{self.an_array} of shape {shape}" if self.is_array(scores) else type(scores).__name__
            of = getattr(labels, "dtype", type(labels).__name__)
            raise WrongType(
                f"the default loss, softmax cross-entropy, needs {self.an_array} of scores per class and whole-number labels, "
                f"got {got} and labels of {of}: pass loss=f(output, y)"
            )
        if len(shape) == 2 and labels.ndim != 1:
            how = "y.argmax(1)" if tuple(labels.shape[1:]) == shape[1:] else "y.reshape(-1)"  # one-hot, or a column
            raise Invalid(f"labels must be of shape (n,), got (n, {', '.join(map(str, labels.shape[1:]))}): use {how}")
        if labels.ndim > 1:
            return WEIGHTED, shape[class_axis(shape, labels.shape)]
        return MEAN, shape[1]

"""Losses and hits of a shard, the same in every framework: what a user's loss may return, and what is counted as a hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from samestep.errors import Invalid, WrongType

Array = Any  # an array of the framework


class Losses(ABC):
    """The part of a Backend that computes losses."""

    word = "tensor"  # the framework's word for an array

    @property
    def a_word(self) -> str:
        return f"{'an' if self.word[0] in 'aeiou' else 'a'} {self.word}"

    @abstractmethod
    def is_array(self, thing: object) -> bool:
        """Whether it is an array of this framework."""

    def sum_of_losses(self, loss: Any, output: Any, y: Array) -> Array:
        """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
        if loss is None:
            return self.cross_entropy(output, y)
        value = self.call_loss(loss, output, y)
        if not self.is_array(value):
            raise WrongType(
                f"loss must return {self.a_word} (a loss per example, or their mean), got {type(value).__name__}"
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

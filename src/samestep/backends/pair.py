"""`Pair`: a function with its parameters, as a model of JAX. Public as samestep.models.jax.Pair."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.errors import Invalid, WrongType

Given = tuple[Sequence[Any], dict[str, Any]]  # what a model is called with


@dataclass(frozen=True, eq=False)
class Pair:
    """A function and what it is a function of: any JAX model.

    apply    apply(params, x) -> output; where it names them, it is also given `train` (a bool) and `key` (a key of
             jax.random in training, None in evaluation). With a state: apply(params, state, x) -> (output, state)
    params   the parameters to train, a pytree; or a function init(key, x) that makes them from the first example
    state    a pytree of what the forward pass itself changes, such as running statistics; None if there is none

    >>> import jax.numpy as jnp
    >>> line = Pair(lambda params, x: x @ params["slope"], {"slope": jnp.ones((2, 1))})
    >>> line(jnp.ones((1, 2)))
    Array([[2.]], dtype=float32)
    """

    apply: Callable[..., Any]
    params: Any
    state: Any = None

    def __post_init__(self) -> None:
        if not callable(self.apply):
            raise WrongType(f"Pair: apply must be a function of (params, x), got {self.apply!r}")
        if callable(self.params) and self.state is not None:
            raise Invalid("Pair: init(key, x) makes parameters only: with a state, call it and pass what it gives")

    def __call__(self, *x: Any, **named: Any) -> Any:
        """The output in evaluation."""
        output, _ = call(self.apply, self.params, self.state, (x, named), None, False)
        return output


Pair.__module__ = "samestep.models.jax"  # its public name, by which models of JAX are known


def call(apply: Any, params: Any, state: Any, given: Given, key: Any, train: bool) -> tuple[Any, Any]:
    """(output, state) of a pair's function."""
    (x, more), named = given, inspect.signature(apply).parameters
    options = {name: value for name, value in (("key", key if train else None), ("train", train)) if name in named}
    if state is None:
        return apply(params, *x, **more, **options), None
    output, new = apply(params, state, *x, **more, **options)
    return output, new


def told(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """The arguments that tell a function whether it trains: there are different names for them."""
    named = inspect.signature(call).parameters
    words = {"train": train, "training": train, "is_training": train,
             "deterministic": not train, "use_running_average": not train}  # fmt: skip
    return {word: value for word, value in words.items() if word in named}

"""Models in single and in double precision, in the framework under test."""

from collections.abc import Iterator
from contextlib import contextmanager

from conformance import suite

PRECISIONS = ("float32", "float64")


@contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """JAX must be told that there are 64 bits."""
    if suite.BACKEND != "jax" or precision == "float32":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def double(given, *arguments):
    """A model of samestep.models with weights of 64 bits; `arguments` are those it was made from."""
    if suite.BACKEND == "torch":
        return given.double()
    if suite.BACKEND == "jax":
        return type(given)(given.apply, {name: weight.astype("float64") for name, weight in given.params.items()})
    if suite.BACKEND == "tensorflow":
        return type(given)(*arguments, dtype="float64")
    if suite.BACKEND == "paddle":
        return given.to(dtype="float64")
    given.cast("float64")
    return given

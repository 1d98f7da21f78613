"""How a framework is found: by name, or from a model or an array. It is imported only when it is needed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib import metadata
from typing import Any

import numpy as np

from samestep.backends.base import Backend
from samestep.errors import BackendMissing, WrongType, install

# Packages whose models, arrays, optimizers and schedules are a framework's.
ALSO = {"flax": "jax", "jaxlib": "jax", "optax": "jax", "keras": "tensorflow"}
# Framework → what its models are, in the order in which a default is looked for.
FRAMEWORKS = {
    "torch": "a torch.nn.Module",
    "jax": "a flax module, or a samestep.models.jax.Pair of a function and its parameters",
    "tensorflow": "a keras.Model or a tf.Module",
    "paddle": "a paddle.nn.Layer",
    "mxnet": "a gluon.Block",
}


def installed(name: str) -> str | None:
    """The installed version of a framework, without importing it; None if there is none."""
    try:
        return metadata.version("paddlepaddle" if name == "paddle" else name)
    except metadata.PackageNotFoundError:
        module = sys.modules.get(name)
        if module is None and importlib.util.find_spec(name) is None:
            return None
        others = [] if module else metadata.packages_distributions().get(name, [])  # such as tensorflow-cpu
        return metadata.version(others[0]) if others else str(getattr(module, "__version__", "?"))


def check(name: str) -> None:
    """Refuse a framework that samestep does not know, or that is not installed, without importing it."""
    if name not in FRAMEWORKS:
        raise WrongType(f"no backend {name!r}: samestep has {', '.join(FRAMEWORKS)}")
    if not installed(name):
        raise BackendMissing(f"{name!r} is not installed; {install(name)}")


def load(name: str) -> Backend:
    """The backend of a name."""
    if f"samestep.backends.{name}.backend" not in sys.modules:
        check(name)
    backend: Backend = imported(f"samestep.backends.{name}.backend", name).backend
    return backend


def imported(module: str, extra: str) -> Any:
    """A module that may need a package which is not installed, but comes with an extra of samestep."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "samestep":
            raise
        raise BackendMissing(f"{package!r} is not installed; {install(extra)}") from None


def default() -> Backend:
    """The framework already imported in this process, else the first one installed."""
    names = [name for name in FRAMEWORKS if name in sys.modules] or [name for name in FRAMEWORKS if installed(name)]
    if not names:
        raise BackendMissing(f"no framework is installed; {install(next(iter(FRAMEWORKS)))}")
    return load(names[0])


def frameworks_of(thing: Any) -> set[str]:
    """The frameworks that an object belongs to, found from its classes; for a function, from its module."""
    if isinstance(thing, functools.partial):
        return frameworks_of(thing.func)
    kinds = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    found = set()
    for module in [*(kind.__module__ for kind in kinds), getattr(thing, "__module__", None)]:
        root, *rest = str(module).split(".")
        found |= set(rest) if root == "samestep" else {ALSO.get(root, root)}  # samestep.models.jax is JAX's
    return found & FRAMEWORKS.keys()


def check_mixed(backend: Backend, model: object, **others: Any) -> None:
    """Refuse objects of another framework than the model's. The error names them."""
    for name, thing in others.items():
        found = frameworks_of(thing)
        if found and backend.name not in found:
            theirs, ours = f"{' and '.join(sorted(found))} ({_kind(thing)})", f"{backend.name} ({_kind(model)})"
            takes = "a fit takes objects of one framework, NumPy arrays, and what samestep has itself"
            raise WrongType(f"{name.replace('_', ' ')} is of {theirs} and the model of {ours}: {takes}")


def _kind(thing: Any) -> str:
    thing = thing.func if isinstance(thing, functools.partial) else thing
    thing = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"


def of_model(model: object) -> Backend:
    """The backend of a model, found from its classes."""
    found = frameworks_of(model)
    for name in FRAMEWORKS:
        if name in found and load(name).owns(model):
            return load(name)
    known = ", ".join(f"{name} ({models})" for name, models in FRAMEWORKS.items())
    raise WrongType(f"model must be a model of {known}; got {_kind(type(model))}")


def of_array(array: object) -> Backend:
    """The backend of an array; NumPy arrays, which are on the host, go with the default one."""
    for name in frameworks_of(array):
        return load(name)
    if isinstance(array, (np.ndarray, np.generic, list, tuple, int, float)):
        return default()
    raise WrongType(f"expected an array of {', '.join(FRAMEWORKS)} or NumPy, got {_kind(type(array))}")

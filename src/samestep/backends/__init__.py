"""The frameworks: what one must provide (base.py), and how one is found (find.py). Each has a folder of its own."""

from samestep.backends.base import Array, Backend, Deliver, Replica, Shape, Tensors, Updater, Vector
from samestep.backends.find import (
    FRAMEWORKS,
    available,
    check,
    check_mixed,
    default,
    installed,
    load,
    of_array,
    of_model,
)

__all__ = [
    "FRAMEWORKS", "Array", "Backend", "Deliver", "Replica", "Shape", "Tensors", "Updater", "Vector", "available", "check",
    "check_mixed", "default", "installed", "load", "of_array", "of_model",
]  # fmt: skip

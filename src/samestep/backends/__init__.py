"""The frameworks: what one must provide (base.py), and how one is found (find.py). Each has a folder of its own."""

from samestep.backends.base import Array, Backend, Replica, Shape, Updater, Vector
from samestep.backends.find import (
    FRAMEWORKS,
    check,
    check_mixed,
    default,
    frameworks_of,
    installed,
    load,
    of_array,
    of_model,
)
from samestep.backends.layout import Tensors

__all__ = [
    "FRAMEWORKS", "Array", "Backend", "Replica", "Shape", "Tensors", "Updater", "Vector", "check",
    "check_mixed", "default", "frameworks_of", "installed", "load", "of_array", "of_model",
]  # fmt: skip

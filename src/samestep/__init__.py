"""The same training step, on any number of devices, in any framework.

Names are loaded when they are first used, so that `import samestep` is quick and imports no framework.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# TensorFlow reads this when its first tensor is made, usually before samestep's backend is loaded (backends/tensorflow.py).
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")

_WHERE = {
    "exchange": ["allreduce", "replicate", "split_batch"],
    "algebra": ["Schedule"],
    "averaging": ["path_average", "swa"],
    "data": ["Data"],
    "devices": ["Device", "cpu", "device_of", "get", "gpu", "num_gpus", "put", "try_all_gpus", "try_gpu"],
    "fashion": ["fashion_mnist"],
    "optimizers": ["adagrad", "adam", "adamw", "sgd", "sgld"],
    "plateau": ["Plateau"],
    "run": ["Run"],
    "schedules": [
        "constant",
        "cosine",
        "drops",
        "exponential",
        "geometric",
        "inverse_power",
        "natural_exp",
        "one_cycle",
        "piecewise",
        "poly",
        "table",
        "triangle",
    ],
    "trainer": ["Trainer"],
    "errors": ["SamestepError"],
}
_NAMES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Data", "Device", "Plateau", "Run", "SamestepError", "Schedule", "Trainer", "adagrad", "adam", "adamw", "allreduce",
    "constant", "cosine", "cpu", "device_of", "drops", "exponential", "fashion_mnist", "geometric", "get", "gpu",
    "inverse_power", "natural_exp", "num_gpus", "one_cycle", "path_average", "piecewise", "poly", "put", "replicate", "sgd",
    "sgld", "split_batch", "swa", "table", "triangle", "try_all_gpus", "try_gpu",
]  # fmt: skip

if TYPE_CHECKING:
    from samestep.algebra import Schedule
    from samestep.averaging import path_average, swa
    from samestep.data import Data
    from samestep.devices import Device, cpu, device_of, get, gpu, num_gpus, put, try_all_gpus, try_gpu
    from samestep.errors import SamestepError
    from samestep.exchange import allreduce, replicate, split_batch
    from samestep.fashion import fashion_mnist
    from samestep.optimizers import adagrad, adam, adamw, sgd, sgld
    from samestep.plateau import Plateau
    from samestep.run import Run
    from samestep.schedules import (
        constant,
        cosine,
        drops,
        exponential,
        geometric,
        inverse_power,
        natural_exp,
        one_cycle,
        piecewise,
        poly,
        table,
        triangle,
    )
    from samestep.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"samestep.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

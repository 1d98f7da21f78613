"""The same training step, on any number of devices, in any framework.

Names are loaded when they are first used, so that `import samestep` is quick and imports no framework.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from samestep import portable

__version__ = "0.1.0"

# TensorFlow reads these when it starts or makes a tensor, usually before samestep's backend is loaded (backends/tensorflow).
os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # its news, but not its warnings, are kept from standard error
if portable.wanted():  # before a framework computes
    portable.set_up()

__all__ = [  # noqa: F405
    "Data", "Device", "Group", "Plateau", "Run", "SamestepError", "Schedule", "Trainer", "adagrad", "adam", "adamw",
    "allreduce", "constant", "cosine", "cpu", "device_of", "drops", "ema", "exponential", "fashion_mnist", "full",
    "geometric", "get", "gpu", "group", "inverse_power", "natural_exp", "num_gpus", "one_cycle", "path_average",
    "per_shard", "piecewise", "poly", "put", "replicate", "same_device", "sgd", "sgld", "split_batch", "swa", "table",
    "triangle", "try_all_gpus", "try_gpu",
]  # fmt: skip

_WHERE = {
    "backends.arrays": ["device_of", "full", "get", "num_gpus", "put", "same_device", "try_all_gpus", "try_gpu"],
    "backends.losses": ["per_shard"],
    "data.examples": ["Data"],
    "data.fashion": ["fashion_mnist"],
    "devices": ["Device", "cpu", "gpu"],
    "errors": ["SamestepError"],
    "optimizers.averaging": ["ema", "path_average", "swa"],
    "optimizers.grouping": ["group"],
    "optimizers.rules": ["adagrad", "adam", "adamw", "sgd", "sgld"],
    "processes.by_hand": ["allreduce", "replicate", "split_batch"],
    "runs.run": ["Run"],
    "training.group": ["Group"],
    "training.trainer": ["Trainer"],
}  # all other names are schedules
_NAMES = dict.fromkeys(__all__, "schedules") | {name: module for module, names in _WHERE.items() for name in names}

if TYPE_CHECKING:
    from samestep.backends.arrays import device_of, full, get, num_gpus, put, same_device, try_all_gpus, try_gpu
    from samestep.backends.losses import per_shard
    from samestep.data.examples import Data
    from samestep.data.fashion import fashion_mnist
    from samestep.devices import Device, cpu, gpu
    from samestep.errors import SamestepError
    from samestep.optimizers.averaging import ema, path_average, swa
    from samestep.optimizers.grouping import group
    from samestep.optimizers.rules import adagrad, adam, adamw, sgd, sgld
    from samestep.processes.by_hand import allreduce, replicate, split_batch
    from samestep.runs.run import Run
    from samestep.schedules.algebra import Schedule
    from samestep.schedules.kinds import *  # noqa: F403
    from samestep.schedules.plateau import Plateau
    from samestep.training.group import Group
    from samestep.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"samestep.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""The public face: its names, and that importing it is light."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import samestep

PACKAGE = Path(samestep.__file__).parent
FRAMEWORKS = ("torch", "jax", "tensorflow", "paddle", "mxnet")

NAMES = [
    "Data", "Device", "Group", "Plateau", "Run", "SamestepError", "Schedule", "Trainer", "adagrad", "adam", "adamw",
    "allreduce", "constant", "cosine", "cpu", "device_of", "drops", "ema", "exponential", "fashion_mnist", "full",
    "geometric", "get", "gpu", "group", "inverse_power", "natural_exp", "num_gpus", "one_cycle", "path_average",
    "per_shard", "piecewise", "poly", "put", "replicate", "same_device", "sgd", "sgld", "split_batch", "swa", "table",
    "triangle", "try_all_gpus", "try_gpu",
]  # fmt: skip


def test_the_names_are_frozen() -> None:
    assert sorted(samestep.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_explained(name: str) -> None:
    thing = getattr(samestep, name)
    assert thing.__name__ == name
    assert thing.__module__.startswith("samestep.")
    assert thing.__doc__


def test_dir_shows_the_names_and_nothing_else() -> None:
    assert dir(samestep) == sorted([*NAMES, "__version__"])


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'samestep' has no attribute 'Trainor'$"):
        samestep.Trainor  # noqa: B018
    assert not hasattr(samestep, "torch")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: samestep.sgd(momentum=0.9), "momentum"),
        (lambda: samestep.adagrad(), "eps"),
        (lambda: samestep.adam(), "beta1"),
        (lambda: samestep.sgld(), "temperature"),
        (lambda: samestep.swa(2), "start"),
        (lambda: samestep.ema(), "decay"),
        (lambda: samestep.group(lr_scale=0.1), "lr_scale"),
        (lambda: samestep.cosine(0.3, 20).warmup(5), "op"),
        (lambda: samestep.gpu(1), "index"),
    ],
)
def test_what_a_recipe_is_made_of_is_a_value(make: Callable[[], Any], field: str) -> None:
    """It cannot be changed after the recipe was written, and it is equal to another one that was made alike."""
    value = make()
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, getattr(value, field))
    assert (value, hash(value)) == (make(), hash(make()))
    assert value is not make()


def imported_by(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a fresh Python has loaded after running the code."""
    code += f"\nimport sys; print(*(name for name in {names!r} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_import_is_light() -> None:
    assert imported_by("import samestep", (*FRAMEWORKS, "numpy", "rich", "samestep")) == ["samestep"]


def test_the_trainer_needs_no_framework() -> None:
    code = "import samestep; samestep.Trainer(optimizer=samestep.sgd(momentum=0.9)); samestep.cpu()"
    assert imported_by(code, (*FRAMEWORKS, "samestep.training.trainer")) == ["samestep.training.trainer"]

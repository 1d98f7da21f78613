"""Models that others have written: one family per process, each model trained in a few small steps.

SAMESTEP_WILD names the family; `make wild` does so. Without it the framework of the tests decides, and only the models that
are marked as quick are trained: `make test` does so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import samestep as ss

# family → the framework, and what must be installed
FAMILIES = {
    "torchvision": ("torch", "torchvision"),
    "timm": ("torch", "timm"),
    "transformers": ("torch", "transformers"),
    "keras": ("tensorflow", "keras"),
    "paddle": ("paddle", "paddle"),
    "gluon": ("mxnet", "mxnet"),
    "flax": ("jax", "flax"),
}
OWN = {"tensorflow": "keras", "paddle": "paddle", "mxnet": "gluon", "jax": "flax"}  # they need no other package
ASKED = os.environ.get("SAMESTEP_WILD", "")
FAMILY = ASKED or OWN.get(os.environ.get("SAMESTEP_TEST_BACKEND", ""), "")
STEPS = 3


@dataclass(frozen=True)
class Entry:
    """A model of others, and what to train it on."""

    make: Callable[[], Any]
    data: tuple[Any, Any]
    settings: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    refused: str = ""  # what samestep says about it, if it cannot be trained: a regular expression
    quick: bool = False  # `make test` trains it, too


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def labels(classes: int = 4) -> np.ndarray:
    return draw().integers(0, classes, 20)


def images(side: int, channels: int = 3, last: bool = False) -> tuple[Any, Any]:
    """Batches of 7, 7 and 6: shards of three and two, as some models norm over the examples of a shard alone."""
    shape = (20, side, side, channels) if last else (20, channels, side, side)
    return draw().standard_normal(shape, np.float32), labels()


def tokens(length: int = 9) -> tuple[Any, Any]:
    return draw().integers(3, 50, (20, length)), labels()


def text(length: int = 9) -> tuple[Any, Any]:
    """Each token is to be told from those before it."""
    x = tokens(length + 1)[0]
    return x[:, :-1], x[:, 1:]


@cache
def entries() -> dict[str, Entry]:
    """The models of this family that are to be trained, by name."""
    if not FAMILY or not importlib.util.find_spec(FAMILIES[FAMILY][1]):
        return {}
    models: dict[str, Entry] = importlib.import_module(f"wild.zoo_{FAMILY}").MODELS
    return {name: entry for name, entry in models.items() if ASKED or entry.quick}


def fit(name: str, devices: list[str], **settings: Any) -> ss.Run:
    """Three steps, each with a spot check, and an evaluation."""
    entry = entries()[name]
    given = {"shards": 3, "optimizer": ss.sgd(momentum=0.9), "schedule": 0.01, "check_every": 1, "gradient_clip_val": 1.0,
             "progress": False}  # fmt: skip
    x, y = entry.data
    trainer = ss.Trainer(1, 7, devices=devices, **given | entry.settings | settings)
    return trainer.fit(entry.make(), ss.Data((x, y), (x[:5], y[:5])))


def outcome(run: ss.Run) -> dict[str, Any]:
    """All of a run that must be the same, whoever has computed it."""
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in run.history]
    return {"prints": run.fingerprints, "fingerprint": run.fingerprint, "rows": rows, "recipe": run.recipe}


def no_network(*_: Any, **__: Any) -> Any:
    raise OSError("these tests use no network: a model has asked for something to download")


def offline() -> None:
    """For the rest of this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    socket.getaddrinfo = no_network  # type: ignore[assignment]

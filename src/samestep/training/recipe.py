"""The recipe of a fit: all that decides its result. Processes of one run must have one recipe."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from samestep import __version__, fingerprint
from samestep.backends import find
from samestep.errors import Invalid
from samestep.runs.run import differences

if TYPE_CHECKING:
    from samestep.backends.base import Backend, Shape
    from samestep.data.examples import Data
    from samestep.processes.world import World
    from samestep.schedules.rates import Rates
    from samestep.training.group import Group
    from samestep.training.trainer import Trainer

SETTINGS = ("max_epochs", "batch_size", "shards", "seed", "sampling", "gradient_clip_val", "threads_per_shard",
            "deterministic")  # fmt: skip


def recipe(settings: Trainer, model: Any, data: Data, shape: Shape, group: Group, rates: Rates) -> dict[str, Any]:
    """All that decides the result of a fit. It has the kind of the devices, not their number."""
    backend: Backend = group.backend
    tensors, updater = group.replicas[0].tensors(), group.updaters[0]
    return {
        "samestep": __version__, "framework": backend.name, "version": find.installed(backend.name),
        "device": group.replicas[0].device.kind, "model": backend.describe(model),
        "parameters": {name: list(t.shape) for name, t in tensors.items()},
        "initial": fingerprint.of_weights(tensors), "precision": shape.dtype,
        "train": data.train.identity(), "test": data.test.identity() if data.test else None,
        **{name: getattr(settings, name) for name in SETTINGS},
        "average": repr(settings.average), "loss": _name(settings.loss),
        "optimizer": repr(updater), "schedule": repr(rates),
    }  # fmt: skip


def _name(loss: Any) -> str:
    """The name of a function, or the repr of anything else, without its address in memory."""
    return getattr(loss, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(loss))


def agree(mine: dict[str, Any], world: World) -> dict[str, Any]:
    """The recipe of all processes. Only the starting weights may differ: rank 0's are used."""
    everybody = [json.loads(text) for text in world.collect(json.dumps(mine).encode())]
    for rank, other in enumerate(everybody):
        found = differences(other, everybody[0], ("initial",), "not")
        if found:
            raise Invalid(f"rank {rank} has another recipe than rank 0: {'; '.join(found.values())}")
    return {**mine, "initial": everybody[0]["initial"]}

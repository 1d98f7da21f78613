"""The recipe of a fit: all that decides its result. Processes of one run must have one recipe."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import samestep
from samestep import fingerprint
from samestep.backends import find
from samestep.errors import Invalid
from samestep.runs.run import differences

if TYPE_CHECKING:
    from samestep.training.fit import Fit

SETTINGS = ("max_epochs", "batch_size", "shards", "seed", "sampling", "gradient_clip_val", "threads_per_shard",
            "deterministic")  # fmt: skip


def recipe(fit: Fit, model: Any) -> dict[str, Any]:
    """The recipe of all processes. Only the starting weights may differ: rank 0's are used."""
    everybody = [json.loads(text) for text in fit.world.collect(json.dumps(_own(fit, model)).encode())]
    for rank, other in enumerate(everybody):
        found = differences(other, everybody[0], ("initial",), "not")
        if found:
            raise Invalid(f"rank {rank} has another recipe than rank 0: {'; '.join(found.values())}")
    return dict(everybody[0])


def _own(fit: Fit, model: Any) -> dict[str, Any]:
    """All that decides the result of a fit. It has the kind of the devices, not their number."""
    settings, backend, data, first = fit.settings, fit.backend, fit.data, fit.group.replicas[0]
    tensors = first.tensors()
    return {
        "samestep": samestep.__version__, "framework": backend.name, "version": find.installed(backend.name),
        "device": first.device.kind, "model": backend.describe(model),
        "parameters": {name: list(t.shape) for name, t in tensors.items()},
        "initial": fingerprint.of_weights(tensors), "precision": fit.shape.dtype,
        "train": data.train.identity(), "test": data.test.identity() if data.test else None,
        **{name: getattr(settings, name) for name in SETTINGS},
        "average": repr(settings.average), "loss": _name(settings.loss),
        "optimizer": repr(fit.group.updaters[0]), "schedule": repr(fit.rates),
    }  # fmt: skip


def _name(loss: Any) -> str:
    """The name of a function, or the repr of anything else, without its address in memory."""
    return getattr(loss, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(loss))

"""The recipe of a fit: all that decides its result. Processes of one run must have one recipe."""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

import samestep
from samestep import fingerprint
from samestep.backends import find
from samestep.backends.losses import MEAN, PerShard
from samestep.content import Content
from samestep.errors import Invalid
from samestep.optimizers.rules import Optimizer
from samestep.runs.recipe import ACCEPT, differences, in_words
from samestep.schedules.algebra import Schedule
from samestep.schedules.plateau import Plateau

if TYPE_CHECKING:
    from samestep.processes.world import World
    from samestep.training.fit import Fit

SETTINGS = ("max_epochs", "batch_size", "shards", "seed", "sampling", "gradient_clip_val", "threads_per_shard",
            "deterministic", "portable")  # fmt: skip


def recipe(fit: Fit, model: Any) -> dict[str, Any]:
    """The recipe of all processes. Only the starting weights may differ: rank 0's are used."""
    accepted = {name for kind in fit.settings.accept for name in ACCEPT[kind]}
    return agreed(fit.world, _own(fit, model), "recipe", {"initial", *accepted})


def agreed(world: World, own: dict[str, Any], what: str, besides: Iterable[str] = ()) -> dict[str, Any]:
    """What rank 0 has, if all processes have the same."""
    everybody = [json.loads(text) for text in world.collect(json.dumps(own).encode())]
    for rank, other in enumerate(everybody):
        found = differences(other, everybody[0], besides, "not")
        if found:
            raise Invalid(f"rank {rank} has another {what} than rank 0: {in_words(found)}")
    return dict(everybody[0])


def _own(fit: Fit, model: Any) -> dict[str, Any]:
    """All that decides the result of a fit. It has the kind of the devices, not their number."""
    settings, backend, data, first = fit.settings, fit.backend, fit.data, fit.group.replicas[0]
    varies = not settings.deterministic
    train, test = data.train.identity(varies), data.test.identity(varies) if data.test else None
    tensors, (code, unchecked) = first.tensors(), _content(fit, model)
    given = {"train": train, "test": test}.items()
    vary = [name for name, about in given if about and about.get("sample", "") is None]
    unchecked += [f"{name}, which gives other examples each time" for name in vary]
    numerics = {"python": ".".join(platform.python_version_tuple()[:2]), "numpy": np.__version__,
                "libc": " ".join(platform.libc_ver())}  # fmt: skip
    return {
        "samestep": samestep.__version__, "framework": backend.name, "version": find.installed(backend.name),
        "device": first.device.kind, "model": backend.describe(model),
        "parameters": {name: list(t.shape) for name, t in tensors.items()},
        "initial": fingerprint.of_weights(tensors),
        "precision": fit.shape.dtype if settings.precision == "float32" else settings.precision, **backend.making.recipe(),
        "train": train, "test": test,
        **{name: getattr(settings, name) for name in SETTINGS},
        **({} if settings.rehearse else {"rehearse": False}), **({"state": list(settings.state)} if settings.state else {}),
        **({} if settings.gradient_clip_algorithm == "norm" else {"gradient_clip_algorithm": "value"}),
        **({"groups": [f"{pattern}: {one}" for pattern, one in settings.groups.items()]} if settings.groups else {}),
        "average": repr(settings.average), "loss": _name(settings.loss),
        **({"metrics": list(settings.metrics)} if settings.metrics else {}),
        **({"monitor": f"{settings.mode} {settings.monitor}"} if settings.monitor else {}),
        **({"patience": settings.patience} if settings.patience else {}),
        **({"loss_over": fit.measure.kind} if fit.measure.kind != MEAN else {}),
        "optimizer": repr(fit.group.updaters[0]), "schedule": repr(fit.rates),
        **({} if fit.rates.unit == "step" else {"unit": fit.rates.unit}),
        "numerics": numerics | backend.numerics(fit.devices, bool(settings.portable)),
        "code": code, "unchecked": unchecked,
    }  # fmt: skip


def _content(fit: Fit, model: Any) -> tuple[dict[str, str], list[str]]:
    """Code and content of all that was given, as hashes by name; and what cannot be looked into."""
    found = Content(fit.backend.content)
    given = {"model": model, **{name: getattr(fit.settings, name) for name in ("loss", "optimizer", "schedule")}}
    if isinstance(fit.settings.loss, PerShard):
        given["loss"] = fit.settings.loss.function
    given |= {f"metric {name}": metric for name, metric in fit.settings.metrics.items()}
    given = {name: thing for name, thing in given.items() if not _tells_all(thing)}
    for examples in (fit.data.train, fit.data.test):
        given |= examples.code() if examples else {}
    for name, thing in given.items():
        found.add(name, thing, weights=name != "model")  # those of the model are `initial`
    return found.told(), found.unchecked


def _tells_all(thing: Any) -> bool:
    """Whether the repr of a thing says all of it: samestep's own optimizers and schedules."""
    ours = isinstance(thing, (Optimizer, Schedule, Plateau)) and type(thing).__module__.startswith("samestep.")
    return thing is None or ours


def _name(loss: Any) -> str:
    """The name of a function, also of one with some arguments given; or the repr of anything else, without its address."""
    if isinstance(loss, PerShard):
        return f"per_shard({_name(loss.function)})"
    function = loss.func if isinstance(loss, functools.partial) else loss
    return getattr(function, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(function))

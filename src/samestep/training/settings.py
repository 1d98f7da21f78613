"""What a user decides about a fit, checked at once. The docstring of Trainer explains each setting."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from samestep import backends, draws
from samestep.checks import whole
from samestep.errors import Invalid, WrongType
from samestep.optimizers.averaging import Average
from samestep.optimizers.rules import Optimizer, adagrad, adam, adamw, sgd, sgld
from samestep.processes.place import OVERRIDES
from samestep.runs.checkpoint import parse
from samestep.schedules.rates import check_schedule, rate


@dataclass
class Settings:
    """What a user decides about a fit."""

    max_epochs: int = 10
    batch_size: int = 256
    _: KW_ONLY
    shards: int = 8
    devices: Any = "auto"
    optimizer: Any = field(default_factory=sgd)
    schedule: Any = None
    gradient_clip_val: float = 0.0
    seed: int = 0
    average: Average | None = None
    run_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | str | None = "1 epoch"
    keep_checkpoints: int = 3
    resume: str | os.PathLike[str] | bool = "auto"
    progress: bool | None = None
    threads_per_shard: int = 1
    loss: Callable[[Any, Any], Any] | None = None
    sampling: str = "without_replacement"
    capture: bool = True
    deterministic: bool = True
    timeout: float = 300.0
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)}
        overrides = json.loads(os.environ.get(OVERRIDES, "{}"))
        for name, value in overrides.items():
            if name not in names:
                raise Invalid(f"{OVERRIDES}: Trainer has no {name!r}")
            setattr(self, name, value)
        if "devices" in overrides:
            self.num_gpus = None  # another name for it, which the script may use
        if self.num_gpus is not None:
            self.num_gpus = whole("", "num_gpus", self.num_gpus)
            self.devices = self.num_gpus or "cpu"
        for name in ("max_epochs", "batch_size", "shards", "threads_per_shard", "keep_checkpoints"):
            setattr(self, name, whole("", name, getattr(self, name), 1))
        self.seed = whole("", "seed", self.seed, most=2**64 - 1)
        uncalled = self.optimizer in (sgd, adam, adamw, adagrad, sgld)  # samestep.sgd without its ()
        theirs = backends.frameworks_of(self.optimizer) or callable(self.optimizer)
        if not isinstance(self.optimizer, Optimizer) and (uncalled or not theirs):
            raise WrongType(
                "optimizer must be one of samestep's, such as samestep.sgd(), or the framework's own, or a function that "
                f"makes one from parameters, got {self.optimizer!r}"
            )
        self.schedule = check_schedule(self.schedule)
        if not isinstance(self.average, (Average, type(None))):
            raise WrongType(f"average must be samestep.swa(...) or samestep.path_average(), got {self.average!r}")
        self.gradient_clip_val = rate("gradient_clip_val", self.gradient_clip_val)
        if not isinstance(self.run_dir, (str, os.PathLike, type(None))):
            raise WrongType(f"run_dir must be a path or None, got run_dir={self.run_dir!r}")
        if self.checkpoint_every is not None:
            parse(self.checkpoint_every)
        if self.resume is True or not isinstance(self.resume, (str, os.PathLike, bool)):
            raise WrongType(f"resume must be 'auto', False or a path, got resume={self.resume!r}")
        if self.resume not in ("auto", False) and not os.path.exists(self.resume):
            raise Invalid(f"resume: {self.resume} is not there")
        if self.resume not in ("auto", False) and self.run_dir is None:
            raise Invalid("resume needs a run_dir to go on in: the folder of the run, or a new one")
        self.timeout = rate("timeout", self.timeout)
        if not self.timeout:
            raise Invalid("timeout must be above 0, got timeout=0")
        if self.loss is not None and not callable(self.loss):
            raise WrongType(f"loss must be a function of (output, y), got {self.loss!r}")
        if self.sampling not in draws.SAMPLINGS:
            raise Invalid(f"sampling must be one of {', '.join(draws.SAMPLINGS)}, got sampling={self.sampling!r}")

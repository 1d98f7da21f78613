"""For tests that count checkpoints, none of which may take the place of another, or steps, each of which is a call."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from samestep.runs.folder import RunFolder
from samestep.training.stretch import Threads


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is on the disk before the next step begins, so that none takes the place of another."""
    save = RunFolder.save

    def wait(self: RunFolder, about: dict[str, Any], tensors: Any) -> None:
        save(self, about, tensors)
        self.writer.flush()

    patch.setattr(RunFolder, "save", wait)


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The threads do not go on from step to step by themselves, and no recording hides the loss from Python."""
    patch.setattr(Threads, "of", staticmethod(lambda group: None))
    if "torch" in sys.modules:
        from samestep.backends.torch import traced

        patch.setattr(traced, "AFTER", math.inf)

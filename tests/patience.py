"""For tests that count checkpoints: none may take the place of another."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.runs.folder import RunFolder


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is on the disk before the next step begins, so that none takes the place of another."""
    save = RunFolder.save

    def wait(self: RunFolder, about: dict[str, Any], tensors: Any) -> None:
        save(self, about, tensors)
        self.writer.flush()

    patch.setattr(RunFolder, "save", wait)

"""What all tests need, however they were started."""

from __future__ import annotations

import contextlib
import signal

import pytest

from samestep.processes.place import COMMAND
from samestep.signals import Signals

# Started in the background, a process ignores SIGINT, and so do those that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def first_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one command leaves behind in its process is not there when the next test gives another."""
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.setattr(Signals, "came", 0)


with contextlib.suppress(ImportError):  # a machine with GPUs may not have it
    from hypothesis import settings

    settings.register_profile("samestep", database=None)  # the checkout may belong to somebody else
    settings.load_profile("samestep")

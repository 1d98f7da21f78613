"""What all tests need, however they were started."""

from __future__ import annotations

import contextlib
import signal

# Started in the background, a process ignores SIGINT, and so do those that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # a machine with GPUs may not have it
    from hypothesis import settings

    settings.register_profile("samestep", database=None)  # the checkout may belong to somebody else
    settings.load_profile("samestep")

"""world: what all engines do alike."""

from __future__ import annotations

import pytest

from samestep.errors import ProcessFailed
from samestep.processes.world import Alone


def test_alone_there_is_nobody_to_talk_to() -> None:
    alone = Alone()
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.collect(b"x") == [b"x"]
    assert (alone.broadcast(b"x"), alone.broadcast(None)) == (b"x", b"")
    assert alone.agreed(alone.vote(True))
    assert not alone.agreed(alone.vote(False))
    alone.wait(alone.swap([], []))
    with pytest.raises(AssertionError, match="^there is nobody else$"):
        alone.swap([(1, b"")], [])


def test_why_a_process_ends_is_one_line() -> None:
    alone = Alone()
    assert alone.reason(ValueError("boom\nand more of it")) == "rank 0 failed: ValueError: boom"
    assert alone.reason(KeyboardInterrupt()) == "rank 0 failed: KeyboardInterrupt"
    assert (
        alone.reason(ProcessFailed("rank 2 failed: OSError")) == "rank 2 failed: OSError"
    )  # the first cause is handed on
    assert alone.lost(-1, late=False) == "a process is gone: it was killed, or its host was lost"

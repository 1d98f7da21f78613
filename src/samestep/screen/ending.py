"""How the command ends when something goes wrong: with one line, or with the user's own lines that led there."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType

from samestep.errors import ProcessFailed, SamestepError, lines, place
from samestep.processes.launch import leave, numbered

LATER = 2.0  # seconds that a process waits for torchrun to end it, before it says what another says better
EVERYTHING = "SAMESTEP_TRACEBACK"  # set: show every line that led to an error


def report(error: BaseException) -> int:
    """Say what went wrong, once for all processes of a run; the exit status."""
    heard, rank = isinstance(error, ProcessFailed), numbered()
    text = _text(error)
    if not leave(text, heard):
        # torchrun ends the others when one has ended: so an error of rank 0 is the only one, and then that of another rank.
        time.sleep(LATER * (2 * (" failed: " in str(error)) if heard else rank > 0))
        speaks = 1 if str(error).startswith("rank 0 ") else 0  # of what all have heard: rank 0, unless it is lost
        if not heard or rank == speaks:
            sys.stderr.write(f"rank {rank}: {text}" if rank and not heard else text)  # in one piece: others print, too
    return 2 if isinstance(error, SamestepError) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"{error.code}\n"
    if os.environ.get(EVERYTHING, "0") in ("", "0"):
        if isinstance(error, SamestepError):
            where = place(error)
            return f"samestep: {where}{': ' if where else ''}{error}\n"
        chain, one = list[BaseException](), error
        while one is not None and one not in chain:  # which may go in circles
            one.__traceback__ = _linked(_shown(one))
            chain.append(one)
            one = one.__cause__ or one.__context__  # type: ignore[assignment]
    return "".join(traceback.format_exception(error))


def _shown(error: BaseException) -> list[TracebackType]:
    """The user's own lines; where there are none, all below those of the command line."""
    own, at, below = lines(error), error.__traceback__, list[TracebackType]()
    while at and not own and not isinstance(error, SyntaxError):  # which names the line itself
        module = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        below = [] if module in ("typer", "click") else [*below, at]
        at = at.tb_next
    return own or below


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    made: TracebackType | None = None
    for at in reversed(frames):
        made = TracebackType(made, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return made

"""Every error a user can meet.

Each message says what was asked, what was got and what to do, in one line. The command line prints that line and ends
with status 2; in Python the classes are also the built-in ones a caller would expect (ValueError, TypeError, ...).
An error that explains another stands alone (`from None`): what matters of the other one, it says itself.
"""

import os
import re
import types

PYTHON = os.path.dirname(os.__file__)  # the standard library
# What frameworks say when memory has run out, and of how much was asked for.
FULL = re.compile("(?i)out of memory|resource_?exhausted|can't allocate memory|allocate .*memory|OOM when allocating")
ASKED = re.compile(r"(?<=allocate |locating )[\d.]+ ?\w+|(?<=shape)\[.*?\]")
# TensorFlow runs a copy of a user's function, from a file that is gone.
INSTALLED = ("site-packages", "dist-packages", "__autograph_generated_file")


def lines(error: BaseException) -> list[types.TracebackType]:
    """The user's own lines that led to an error: not samestep's, Python's, nor those of installed packages."""
    found, at = list[types.TracebackType](), error.__traceback__
    while at:
        file, module = at.tb_frame.f_code.co_filename, str(at.tb_frame.f_globals.get("__name__"))
        others = file.startswith((PYTHON, "<frozen")) or any(name in file for name in INSTALLED)
        found += [] if others or module.partition(".")[0] in ("samestep", "typer", "click") else [at]
        at = at.tb_next
    return found


def place(error: BaseException) -> str:
    """The last of the user's own lines that led to an error: `my.py, line 12`; nothing if there is none."""
    return "".join(
        f"{os.path.basename(at.tb_frame.f_code.co_filename)}, line {at.tb_lineno}" for at in lines(error)[-1:]
    )


def told(error: BaseException) -> str:
    """An error of a user's code, for a message of ours: `KeyError: 'x' (my.py, line 12)`."""
    said, where = str(error).strip().splitlines()[:1], place(error)
    return ": ".join([type(error).__name__, *said]) + (f" ({where})" if where else "")


def install(extra: str) -> str:
    """How to install what an extra of samestep brings. samestep is on no package index, so this is for a clone of it.

    mpi and plot come without pins: beside MXNet, constraints.txt would put another NumPy into its environment.
    """
    if extra == "mxnet":
        make = "python -m venv .venv-mxnet && .venv-mxnet/bin/pip install -c constraints-mxnet.txt '.[mxnet]'"
        return f"it needs an environment of its own; in a clone of samestep: {make}"
    pins = "" if extra in ("mpi", "plot") else "-c constraints.txt "
    return f"in a clone of samestep: pip install {pins}'.[{extra}]'"


class SamestepError(Exception):
    """The base of all errors that samestep raises on purpose: one line, and maybe what another program `said`."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(" ".join(message.splitlines()) + said)  # a name or a value that it quotes may have several


class Invalid(SamestepError, ValueError):
    """An argument, a file or an array has a value that cannot be used."""


class NotBuilt(Invalid):
    """A model has no weights yet: they are made when it meets its first example."""


class WrongType(SamestepError, TypeError):
    """An argument is of a kind that cannot be used."""


class Written(Invalid):
    """A forward pass wrote to a tensor that it shares with other shards."""

    def __init__(self, name: str, hint: str) -> None:
        why = "so its value would depend on who computed which shard"
        super().__init__(f"{name} was written to in the forward pass, {why}: {hint}")


class DataUnavailable(SamestepError, OSError):
    """A data file is missing, damaged or cannot be fetched."""


class DevicesDiffer(Invalid):
    """Arrays that must be on one device are on several."""


class NotFinite(Invalid):
    """The loss is NaN or infinite."""


class BackendMissing(SamestepError, ImportError):
    """A framework that is needed is not installed."""


class NotDeterministic(SamestepError, RuntimeError):
    """The model uses an operation for which the framework has no deterministic kernel."""


class OutOfMemory(SamestepError, MemoryError):
    """A device has no memory left."""


def out_of_memory(error: Exception) -> OutOfMemory | None:
    """samestep's error for one of a framework's, if that says that memory has run out."""
    text = str(error)
    if not (isinstance(error, MemoryError) or FULL.search(text)):
        return None
    asked, gpu = ASKED.search(text), re.search(r"GPU (\d+)", text)
    where, when = f"cuda:{gpu[1]}" if gpu else "the device", f" when {asked[0]} were asked for" if asked else ""
    how = "raise shards (smaller shards need less), or lower the batch size"
    return OutOfMemory(f"{where} ran out of memory{when}: {how}")


class ReplicasDiffer(SamestepError, RuntimeError):
    """Replicas that must be equal to the bit are not: the guarantee of samestep is broken."""


class NotRepeatable(SamestepError, RuntimeError):
    """A shard that was computed again gave other bits: something decides them that samestep does not know."""


class ProcessFailed(SamestepError, RuntimeError):
    """Another process of the run failed, was lost or does not answer."""

"""Every error a user can meet.

Each message says what was asked, what was got and what to do, in one line. The command line prints that line and ends
with status 2; in Python the classes are also the built-in ones a caller would expect (ValueError, TypeError, ...).
"""


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


class ReplicasDiffer(SamestepError, RuntimeError):
    """Replicas that must be equal to the bit are not: the guarantee of samestep is broken."""


class NotRepeatable(SamestepError, RuntimeError):
    """A shard that was computed again gave other bits: something decides them that samestep does not know."""


class ProcessFailed(SamestepError, RuntimeError):
    """Another process of the run failed, was lost or does not answer."""

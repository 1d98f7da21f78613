"""Every error a user can meet.

Each message says what was asked, what was got and what to do, in one line. The command line prints that line and ends
with status 2; in Python the classes are also the built-in ones a caller would expect (ValueError, TypeError, ...).
"""


class SamestepError(Exception):
    """The base of all errors that samestep raises on purpose."""


class Invalid(SamestepError, ValueError):
    """An argument, a file or an array has a value that cannot be used."""


class WrongType(SamestepError, TypeError):
    """An argument is of a kind that cannot be used."""


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


class ProcessFailed(SamestepError, RuntimeError):
    """Another process of the run failed, was lost or does not answer."""

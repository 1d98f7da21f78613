"""Sources for workers: in a module that imports no framework, so that a worker starts in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((50, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 50)
BAD = 33  # the example at which something happens


def in_worker() -> bool:
    return multiprocessing.parent_process() is not None


class Table:
    """A source that can be pickled."""

    def __init__(self, x: Any = X, y: Any = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, indices: Any) -> Any:
        return self.x[indices], self.y[indices]


class File(Table):
    """A source with an open file, read by seek and read. It cannot be pickled."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(X.tobytes())
        self.path, self.file = path, path.open("rb", buffering=0)

    def between(self) -> None:
        """What happens between seek and read."""

    def row(self, i: int) -> Any:
        self.file.seek(int(i) * X[0].nbytes)
        self.between()
        return np.frombuffer(self.file.read(X[0].nbytes), np.float32)

    def __getitem__(self, indices: Any) -> Any:
        return np.stack([self.row(i) for i in indices]), Y[indices]


class Reopened(File):
    """Opens its file anew where it is unpickled."""

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "file"}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self.file = self.path.open("rb", buffering=0)


class Odd(Exception):
    """An error that cannot be made again from what is pickled of it."""

    def __init__(self, disk: int, why: str) -> None:
        super().__init__(f"disk {disk}: {why}")


class Failing(Table):
    def __init__(self, error: type[Exception], *given: Any) -> None:
        super().__init__()
        self.error, self.given = error, given

    def __getitem__(self, indices: Any) -> Any:
        if BAD in indices:
            raise self.error(*self.given)
        return super().__getitem__(indices)


class Killed(Table):
    """Ends a worker while it reads."""

    def __getitem__(self, indices: Any) -> Any:
        if BAD in indices and in_worker():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(indices)


class Ended(Table):
    """Ends a worker with an exit code of its own."""

    def __getitem__(self, indices: Any) -> Any:
        os._exit(99)


class NotMadeAgain(Table):
    """Can be pickled, but not be made again from it in a worker."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no licence for this process")


class Telling(Table):
    """x is what can be told about the process that reads."""

    def __getitem__(self, indices: Any) -> Any:
        told = [os.getpid(), os.getsid(0), "torch" in sys.modules]
        return np.array([told] * len(indices)), Y[indices]


class WithTorch(Table):
    """x is how many threads PyTorch takes."""

    def __getitem__(self, indices: Any) -> Any:
        import torch

        return np.full((len(indices), 1), torch.get_num_threads()), Y[indices]


def cut(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """A transform: an example of a random length, scaled."""
    n = int(rng.integers(1, len(x) + 1))
    return x[:n] * rng.normal(), y[:n]


def jitter(x: Any, y: Any, rng: np.random.Generator) -> Any:
    """A transform."""
    return x + rng.standard_normal(x.shape).astype(np.float32), y

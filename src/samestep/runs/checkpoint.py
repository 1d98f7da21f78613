"""Checkpoints: all that a fit needs to go on from a step, in one file that is whole or not there.

checkpoints/step-000001234.safetensors holds tensors by name ("model:...", "optimizer:...", "average:...", "log:...") and, in
its header, a JSON text with the step, the recipe, the history and the hash of the file. There is no rank in it, no generator
and no place in the data: those follow from the step. It stands alone: of the log it has the fingerprints, the losses and hits
of an unfinished epoch, and how much of events.jsonl belongs to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.backends.times import timed_as
from samestep.checks import MOST, show, whole
from samestep.errors import Invalid, WrongType

Tensors = dict[str, NDArray[Any]]
FOLDER, KIND, NO_HASH = "checkpoints", "samestep", "0" * 64
TYPES = {"f4": "F32", "f8": "F64", "f2": "F16", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64",
         "u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64", "b1": "BOOL"}  # fmt: skip
UNITS = {"": ("steps", 1), "step": ("steps", 1), "epoch": ("epochs", 1), "s": ("seconds", 1), "second": ("seconds", 1),
         "min": ("seconds", 60), "minute": ("seconds", 60), "h": ("seconds", 3600), "hour": ("seconds", 3600)}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds."""

    about: dict[str, Any]
    tensors: Tensors

    @property
    def step(self) -> int:
        """How many updates had been made."""
        return int(self.about["step"])

    def group(self, prefix: str) -> Tensors:
        """The tensors of one kind (model, optimizer or average), by their own names."""
        return {name.removeprefix(f"{prefix}:"): t for name, t in self.tensors.items() if name.startswith(f"{prefix}:")}


def pack(about: Mapping[str, Any], tensors: Tensors) -> list[Any]:
    """A checkpoint as pieces of memory to be written one after the other: a safetensors file with its hash inside.

    Not by safetensors' own writer, which copies everything once more and holds the interpreter's lock meanwhile, so that
    training would wait for it.
    """
    header: dict[str, Any] = {"__metadata__": {"sha256": NO_HASH, KIND: json.dumps(about)}}
    offset, memories = 0, []
    for name, tensor in tensors.items():
        # a copy only where the memory is in another order
        array = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1)
        kind = TYPES.get(array.dtype.str[1:])
        if not kind:
            raise WrongType(f"{name} is of type {tensor.dtype}, which a checkpoint cannot hold: convert it")
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
        memories.append(array.view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(text)
    for memory in memories:
        digest.update(memory)  # the interpreter is free meanwhile
    text = text.replace(NO_HASH.encode(), digest.hexdigest().encode(), 1)
    return [len(text).to_bytes(8, "little") + text, *memories]


def unpack(content: bytes, name: str) -> Checkpoint:
    """Read a checkpoint back; one bit that is not as it was written is an error."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(content[:8], "little")
        text = content[8 : 8 + size]
        kept = json.loads(text)["__metadata__"]["sha256"]
        digest = hashlib.sha256(text.replace(kept.encode(), NO_HASH.encode(), 1))
        digest.update(memoryview(content)[8 + size :])
        if digest.hexdigest() != kept:
            raise ValueError("its hash does not hold")
        return Checkpoint(_about(text), load(content))
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError, RecursionError) as error:
        raise Invalid(f"{name} is damaged, or not a checkpoint: {error}") from None


def _about(header: bytes) -> dict[str, Any]:
    return dict(json.loads(json.loads(header)["__metadata__"][KIND]))


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint file, verifying its hash."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror or error}") from None
    return unpack(content, str(path))


def paths(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoint files of a run folder, oldest first."""
    found = (Path(folder) / FOLDER).glob("step-*.safetensors")
    return sorted(path for path in found if path.stem.removeprefix("step-").isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step-{step:09d}.safetensors"


def metric(path: Path) -> float | None:
    """What the checkpoint is judged by, from its header alone: the test loss if it was taken at the end of an epoch."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size < os.path.getsize(path):
            value = _about(file.read(size))["metric"]
            return None if value is None else float(value)
    return None


def best(metrics: Mapping[Path, float | None]) -> Path | None:
    """The first of the checkpoints with the least metric."""
    judged = [(value, path) for path, value in metrics.items() if value is not None]
    return min(judged)[1] if judged else None


def write(path: Path, pieces: list[Any]) -> None:
    """Write a file whole or not at all, and so that it is still there after a loss of power."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # where something went wrong
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Writer:
    """Writes checkpoints in a thread of its own, keeping the last few and the best.

    A checkpoint that falls due while another one waits takes its place, unless that is the best so far: training never waits
    for the disk.
    """

    def __init__(self, folder: Path, keep: int, before: Callable[[], None]) -> None:
        self.folder, self.keep, self._before = folder, keep, before
        self.written = 0
        self._metrics = {path: metric(path) for path in paths(folder)}
        self._thread = ThreadPoolExecutor(1, "samestep-checkpoint")
        # The one that is written, and those that wait → by what each is judged.
        self._tasks: dict[Future[None], float] = {}

    def submit(self, about: dict[str, Any], tensors: Tensors) -> None:
        """Take a copy of the tensors, and have it written: this is all that a step waits for."""
        for task in [task for task in self._tasks if task.done()]:
            del self._tasks[task]
            task.result()  # raises what went wrong
        judged = math.inf if about["metric"] is None else float(about["metric"])
        least = min([judged, *self._tasks.values(), *(one for one in self._metrics.copy().values() if one is not None)])
        for task, one in list(self._tasks.items()):
            if (one > least or one == math.inf) and task.cancel():  # it still waits, and is not the best
                del self._tasks[task]
        copies = {name: np.array(tensor) for name, tensor in tensors.items()}
        self._tasks[self._thread.submit(self._write, about, copies)] = judged

    @timed_as("checkpoints")
    def flush(self) -> None:
        """Wait until everything is on the disk."""
        for task in self._tasks:
            task.result()

    def close(self) -> None:
        self._thread.shutdown()  # it first writes what waits

    @timed_as("checkpoints")
    def _write(self, about: dict[str, Any], tensors: Tensors) -> None:
        path = path_of(self.folder, about["step"])
        try:
            path.parent.mkdir(exist_ok=True)
            self._before()  # the log must reach the disk before the checkpoint that counts on it
            write(path, pack(about, tensors))
            self.written += 1
            self._metrics[path] = about["metric"]
            self._tidy()
        except OSError as error:
            last = max((p for p in self._metrics if p != path), default=None)
            kept = f"{last.name} is kept" if last else "there is none before it"
            why = f"{path.name} could not be written ({error.strerror or error})"
            warnings.warn(f"{why}; {kept}, and training goes on", stacklevel=1)

    def _tidy(self) -> None:
        """Delete all but the last few checkpoints and the best one."""
        kept = best(self._metrics)
        for path in sorted(self._metrics)[: -self.keep]:
            if path != kept:
                del self._metrics[path]
                path.unlink(missing_ok=True)


class Cadence:
    """When a checkpoint is due: every so many steps, epochs or seconds.

    >>> Cadence("2 epochs", steps_per_epoch=235).every, Cadence(50, 235).every, Cadence("30 s", 235).seconds
    (470, 50, 30.0)
    """

    def __init__(self, every: int | str | None, steps_per_epoch: int) -> None:
        count, unit = parse(every) if every is not None else (0, "steps")
        self.every = int(count) * (steps_per_epoch if unit == "epochs" else 1) if unit != "seconds" else 0
        self.seconds = float(count) if unit == "seconds" else 0.0
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` updates."""
        if self.seconds and time.monotonic() - self._last >= self.seconds:
            self._last = time.monotonic()
            return True
        return bool(self.every) and step % self.every == 0

    def left(self, step: int) -> int:
        """How many updates may be made after `step` of them before a checkpoint may be due by their number."""
        return self.every - step % self.every if self.every else MOST


def parse(every: Any, name: str = "checkpoint_every") -> tuple[float, str]:
    """What a user writes as `checkpoint_every`, as a number of steps, epochs or seconds.

    >>> parse(100), parse("1 epoch"), parse("5 min")
    ((100, 'steps'), (1, 'epochs'), (300.0, 'seconds'))
    """
    if isinstance(every, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", every)
        number, word = found.groups() if found else ("0", "")
        unit, factor = UNITS.get(word) or UNITS.get(word.removesuffix("s"), ("", 0))
        count = float(number) * factor
        if unit == "seconds" and count > 0:
            return count, unit
        if unit in ("steps", "epochs") and number.isdecimal() and 1 <= count <= MOST:
            return int(count), unit
        raise Invalid(f"{name} must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got {every!r}")
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
        raise WrongType(f"{name} must be a number of steps, or such as '1 epoch' or '30 s', or None, got {show(every)}")
    return whole("", name, every, 1), "steps"

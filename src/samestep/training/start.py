"""Weights to start a fit from, instead of those that the model came with: all of them, or some."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep.backends.base import Replica
from samestep.backends.layout import Numbers
from samestep.errors import Invalid, WrongType
from samestep.runs.checkpoint import TYPES
from samestep.runs.run import Run

KINDS = {name: f"<{kind}" for kind, name in TYPES.items()}  # of safetensors → of NumPy


def put_into(replicas: Sequence[Replica], weights: Any) -> None:
    """Put weights by name into replicas."""
    first = replicas[0]
    own, taken = first.tensors(), dict[str, Any]()
    for name, value in read(weights).items():
        if name not in own:
            near = ", ".join(difflib.get_close_matches(str(name), own, cutoff=0))
            raise Invalid(f"weights: the model has no {name!r}; there are, among others, {near}")
        try:
            array, mine, known = first.backend.get(value), own[name], first.names[name]
        except (TypeError, ValueError) as error:
            raise WrongType(f"weights: {name!r} cannot be read as an array: {error}") from None
        fits = array.shape == mine.shape or array.size == mine.size == 1  # MXNet has no arrays without a dimension
        if not fits or not np.can_cast(array.dtype, mine.dtype, "same_kind"):
            what = f"{array.dtype} of shape {array.shape}, and that of the model {mine.dtype} of shape {mine.shape}"
            raise Invalid(f"weights: {name!r} is {what}: leave it out, or give one that fits")
        array = array.astype(mine.dtype).reshape(mine.shape)
        if known in taken and not np.array_equal(taken[known], array):
            raise Invalid(f"weights: {name!r} and {known!r} are one tensor of the model, and have two values here")
        taken[known] = array
    for replica in replicas:
        replica.load(own | taken)


def read(weights: Any) -> Mapping[str, Any]:
    """Weights by name from whatever a user gave."""
    if isinstance(weights, Mapping):
        return weights
    if isinstance(weights, Run):
        return weights.weights()
    if not isinstance(weights, (str, os.PathLike)):
        kinds = "a dictionary of arrays, a Run, the folder of a run or a safetensors file"
        raise WrongType(f"weights must be {kinds}, got {type(weights).__name__}")
    if os.path.isdir(weights):
        return Run.load(Path(weights)).weights()
    import safetensors

    deserialize: Any = safetensors.deserialize  # without types
    try:
        return {name: _array(**about) for name, about in deserialize(Path(weights).read_bytes())}
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise Invalid(f"weights: {weights} is not a safetensors file that can be read: {error}") from None


def _array(dtype: str, shape: list[int], data: bytes) -> Numbers:
    """A tensor of a safetensors file. bfloat16, which NumPy does not know, as float32: that holds these numbers exactly."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return np.frombuffer(data, KINDS[dtype]).reshape(shape)

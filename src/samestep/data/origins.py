"""What can be given as examples, beside arrays: NumPy files, loaders of PyTorch, datasets of Hugging Face and TensorFlow.

No framework is imported here: whoever gives an object of one has imported it, and its classes tell what it is.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from samestep import trees
from samestep.errors import DataUnavailable, Invalid, SamestepError, WrongType

HUGGING_FACE = "datasets.arrow_dataset"  # a package that many projects have of their own, but not with this module
ORDER = "pass its dataset: the Trainer draws the order of examples"


def of(thing: Any, package: str, name: str = "") -> bool:
    """Whether an object is of a class of a package, of any or of one name."""
    kinds = type(thing).__mro__
    return any(kind.__module__.startswith(package) and name in ("", kind.__name__) for kind in kinds)


def by_item(source: Any) -> bool:
    """Whether a source gives one example for one index."""
    return isinstance(source, TensorFlow) or of(source, "torch.utils.data") or of(source, HUGGING_FACE)


# Files


def opened(name: str, given: Any) -> Any:
    """Arrays in place of the names of NumPy files; anything else as it is."""
    if isinstance(given, (str, os.PathLike)):
        found = _load(name, given)
        return (found["x"], found["y"]) if isinstance(found, dict) and found.keys() == {"x", "y"} else found
    if isinstance(given, (Mapping, tuple, list)):
        return trees.mapped(lambda leaf: _load(name, leaf) if isinstance(leaf, (str, os.PathLike)) else leaf, given)
    return given


def _load(name: str, path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"PK":  # .npz: a zip of arrays
                file.seek(0)
                return dict(np.load(file, allow_pickle=False))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        wanted = "must be a NumPy file (.npy or .npz) without Python objects"
        raise DataUnavailable(f"{name}: {os.fspath(path)} {wanted}, but: {error}") from None


# PyTorch


def unloaded(name: str, given: Any) -> tuple[Any, Any, dict[str, Any] | None]:
    """Of a DataLoader: its dataset, its collate_fn unless it is PyTorch's, and its settings. Of anything else: itself."""
    if of(given, "torch.utils.data", "IterableDataset"):
        raise WrongType(f"{name} must be read by index, not an IterableDataset: pass a map-style dataset or arrays")
    if not of(given, "torch.utils.data", "DataLoader"):
        return given, None, None
    unloaded(name, given.dataset)
    if given.batch_size is None:
        raise WrongType(f"{name}: this DataLoader has a batch_sampler, or batch_size=None: {ORDER}")
    sampler, theirs = type(given.sampler).__name__, type(given.sampler).__module__.startswith("torch.utils.data")
    if sampler not in ("RandomSampler", "SequentialSampler") or not theirs:
        raise WrongType(f"{name}: this DataLoader has an order of its own ({sampler}): {ORDER}")
    if len(given.sampler) != len(given.dataset):
        drawn = f"{len(given.sampler)} of {len(given.dataset)} examples"
        raise WrongType(f"{name}: this DataLoader draws {drawn} in an epoch: {ORDER}")
    sampling = "in_order"
    if sampler == "RandomSampler":
        sampling = "with_replacement" if given.sampler.replacement else "without_replacement"
    settings = {"batch_size": given.batch_size, "sampling": sampling, "drop_last": given.drop_last}
    collate = given.collate_fn
    theirs = getattr(collate, "__module__", "").startswith("torch.utils.data")
    return given.dataset, None if theirs else collate, settings


def check_loader(name: str, loader: dict[str, Any], batch_size: int, sampling: str) -> None:
    """Refuse a loader that would train on other batches than the Trainer."""
    has, instead = f"{name}: the DataLoader has", "or pass its dataset instead of it"
    if loader["drop_last"]:
        raise Invalid(f"{has} drop_last=True, and samestep drops no example: make it with drop_last=False, {instead}")
    if loader["batch_size"] != batch_size:
        size = f"batch_size={loader['batch_size']}"
        raise Invalid(f"{has} {size} and the Trainer {batch_size}: use Trainer({size}), {instead}")
    if name == "train" and loader["sampling"] != sampling:
        draws = loader["sampling"]
        raise Invalid(f"{has} sampling {draws} and the Trainer {sampling}: use Trainer(sampling={draws!r}), {instead}")


# TensorFlow


class TensorFlow:
    """A tf.data.Dataset, read by index."""

    __slots__ = ("__dict__", "dataset", "length", "name")  # in __dict__, for the recipe, are the functions that it maps

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        self.functions = [getattr(made, "_func", None) for below in _below(dataset) for made in below._functions()]
        for below in _below(dataset):
            for word, what in (("Batch", "cuts batches"), ("Shuffle", "draws the order")):
                if word in type(below).__name__:
                    told = f"pass the tf.data.Dataset from before {word.lower()}(): the Trainer {what}"
                    raise WrongType(f"{name}: {told}")
        self.length = int(dataset.cardinality())
        if self.length < 0:
            raise self._cannot("its length is not known")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        tf = sys.modules["tensorflow"]
        try:
            with tf.device("cpu"):
                return tf.data.experimental.at(self.dataset, i)
        except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError):
            raise self._cannot("it has no elements by index") from None
        except tf.errors.InvalidArgumentError as error:  # of a function that it maps
            raise WrongType(f"{self.name}[{i}]: it raised InvalidArgumentError: {error.message}") from None

    def _cannot(self, why: str) -> SamestepError:
        return WrongType(f"{self.name}: TensorFlow cannot index this tf.data.Dataset ({why}): pass arrays or a source")


def _below(dataset: Any) -> list[Any]:
    """A tf.data.Dataset and all that it is made from."""
    return [dataset, *(deep for one in dataset._inputs() for deep in _below(one))]

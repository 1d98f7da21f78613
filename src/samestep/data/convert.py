"""From what people have to NumPy: single examples and whole batches, as trees of arrays.

A batch, or one example, is a pair (x, y) of trees, or one dictionary that holds the labels too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep import trees
from samestep.backends import arrays
from samestep.backends.find import frameworks_of
from samestep.errors import Invalid, WrongType
from samestep.trees import Tree

Numbers = NDArray[Any]
Pad = float | Mapping[str, float] | None  # what shorter arrays are filled up with: for all, or by key
PADDING = "Data(pad=...) fills up the shorter ones"
PLAIN = (int, float, np.number, np.bool_)


def numbers(array: Any) -> Numbers:
    """The array as NumPy; a tensor of a framework is read from its device."""
    ours = isinstance(array, (np.ndarray, np.generic, int, float))
    picture = not ours and hasattr(array, "__array_interface__") and not frameworks_of(array)
    return np.asarray(array if ours or picture else arrays.get(array))


def labels(y: Numbers) -> Numbers:
    """Whole numbers as int64, whatever they came as."""
    return y.astype(np.int64) if y.dtype.kind in "iu" else y


def narrowed(x: Tree, y: Tree) -> tuple[Tree, Tree]:
    """x and y with float32 in place of float64."""
    return both(lambda array: array.astype(np.float32) if array.dtype == np.float64 else array, x, y)


def real(label: str, array: Any) -> Any:
    """Refuse texts, dates, objects and records. A type that NumPy does not know itself, such as bfloat16, is of numbers."""
    if isinstance(array, np.ndarray) and (array.dtype.kind in "USOMm" or array.dtype.type is np.void):
        raise WrongType(f"{label} must be numbers, got an array of {array.dtype}: convert it, or encode it as numbers")
    return array


def named(name: str, batch: Tree) -> Iterator[tuple[str, Any]]:
    """The arrays of a batch, each with its name.

    >>> [label for label, _ in named("train", ({"ids": 1}, 2))], [label for label, _ in named("train", {"ids": 1})]
    (["train x['ids']", 'train y'], ["train['ids']"])
    """
    if isinstance(batch, Mapping):
        yield from trees.paths(batch, name)
    else:
        for part, tree in zip("xy", batch, strict=True):
            yield from trees.paths(tree, f"{name} {part}")


def halves(batch: Tree) -> tuple[Tree, Tree]:
    """(x, y) of a batch; of a dictionary, both are the dictionary."""
    if isinstance(batch, Mapping):
        return batch, batch
    x, y = batch
    return x, y


def both(function: Any, x: Tree, y: Tree) -> tuple[Tree, Tree]:
    """x and y with a function applied to every array; if they are one object, they stay one."""
    new = trees.mapped(function, x)
    return new, new if y is x else trees.mapped(function, y)


def as_batch(name: str, given: Any, short: bool = False) -> Tree:
    """A batch or an example with NumPy arrays as leaves. Lists of numbers are arrays; short: their fractions are float32."""
    if isinstance(given, Mapping):
        return _as_numpy(name, given, short)
    x, y = given
    return _as_numpy(f"{name} x", x, short), _as_numpy(f"{name} y", y, short, labels)


def _as_numpy(name: str, tree: Tree, short: bool, then: Callable[[Numbers], Numbers] = np.asarray) -> Tree:
    if isinstance(tree, np.ndarray):  # at once, as most are
        return then(real(name, tree))
    if isinstance(tree, (Mapping, tuple)) and not tree:
        raise WrongType(f"{name} must be an array, or hold arrays, got {tree}")
    if isinstance(tree, Mapping):
        return {key: _as_numpy(f"{name}[{key!r}]", inner, short, then) for key, inner in tree.items()}
    if isinstance(tree, (tuple, list)) and not _lists_numbers(tree):
        inside = [_as_numpy(f"{name}[{i}]", inner, short, then) for i, inner in enumerate(tree)]
        return inside if isinstance(tree, list) else tuple(inside)
    if isinstance(tree, (str, bytes)) and not isinstance(tree, np.generic):
        raise WrongType(f"{name} must be numbers, got text: remove it, or encode it as numbers")
    try:
        array = np.asarray(tree) if isinstance(tree, list) else numbers(tree)
    except WrongType:
        raise WrongType(f"{name} must be an array or a number, got {type(tree).__name__}") from None
    except ValueError:
        raise WrongType(f"{name} has lists of unequal lengths in one example: make them of one length") from None
    if short and isinstance(tree, (float, list)) and array.dtype == np.float64:
        array = array.astype(np.float32)
    return then(real(name, array))


def _lists_numbers(tree: Any) -> bool:
    return isinstance(tree, list) and all(isinstance(one, PLAIN) or _lists_numbers(one) for one in tree)


def rows(batch: Tree, n: int) -> list[Tree]:
    """The examples of a batch, one by one."""
    return [trees.mapped(lambda array, i=i: array[i], batch) for i in range(n)]


def stack(name: str, items: Sequence[Tree], pad: Pad = None, pad_to: int = 1) -> Tree:
    """A batch of single examples, each with arrays of NumPy."""
    columns: list[tuple[Any, ...]] = []  # of each array, those of all examples
    with suppress(LookupError, ValueError, TypeError):  # of examples with other parts
        trees.mapped(lambda *parts: columns.append(parts), *items)
    places = [label for label, _ in named(name, items[0])]
    alike = all(len(trees.leaves(item)) == len(columns) for item in items)
    if not alike or not all(isinstance(part, np.ndarray) for parts in columns for part in parts):
        others = ([label for label, _ in named(name, item)] for item in items)
        told = [", ".join(parts) or "nothing" for parts in (places, next((o for o in others if o != places), places))]
        raise WrongType(f"{name}: all examples must have the same parts, got {told[0]} in one and {told[1]} in another")
    stacked = iter([_stacked(label, list(parts), pad, pad_to) for label, parts in zip(places, columns, strict=True)])
    return trees.mapped(lambda _: next(stacked), items[0])


def _stacked(label: str, parts: list[Numbers], pad: Pad, pad_to: int) -> Numbers:
    shapes = list(dict.fromkeys(part.shape for part in parts))
    if len({len(shape) for shape in shapes}) > 1:
        raise WrongType(f"{label} must have as many axes in all examples, got shapes {shapes[0]} and {shapes[1]}")
    filling = pad.get(key_of(label)) if isinstance(pad, Mapping) else pad
    if filling is not None:
        sizes = [set(sizes) for sizes in zip(*shapes, strict=True)]
        step = [pad_to if axis == 0 or len(found) > 1 else 1 for axis, found in enumerate(sizes)]
        full = tuple(-(-max(found) // by) * by for found, by in zip(sizes, step, strict=True))
        kind = next((part.dtype for part in parts if part.size), parts[0].dtype)
        parts = [_filled(label, part if part.size else part.astype(kind), full, filling) for part in parts]
    elif len(shapes) > 1:
        raise WrongType(f"{label} must be of one shape in all examples, got {shapes[0]} and {shapes[1]}: {PADDING}")
    return np.concatenate([part[None] for part in parts], casting="no")


def _filled(label: str, part: Numbers, shape: tuple[int, ...], filling: float) -> Numbers:
    if part.shape == shape:
        return part
    if part.dtype.kind in "biu" and not (float(filling).is_integer() and _holds(part.dtype, int(filling))):
        raise Invalid(f"{label} is of {part.dtype}, which cannot hold pad={filling}: use another one, or convert it")
    new = np.full(shape, filling, part.dtype)
    new[tuple(map(slice, part.shape))] = part
    return new


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(least <= value <= most)


def key_of(label: str) -> str:
    """The key of an array in the innermost dictionary that it lies in; x or y if it lies in none.

    >>> key_of("train x['pair']['ids'][0]"), key_of("train y[1]")
    ('ids', 'y')
    """
    inner = re.sub(r"(\[\d+\])+$", "", label)
    found = re.search(r"\[['\"]([^\]]*)['\"]\]$", inner)
    return found[1] if found else inner.rpartition(" ")[2]

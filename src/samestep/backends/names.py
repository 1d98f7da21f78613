"""Names of weights that depend on the model alone, where a framework numbers the layers that nobody named.

Keras goes on counting from model to model: dense_7, variable_3. Here each model counts from the beginning, so that a second
model of the same kind has weights of the same names. Names that a user chose stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from samestep.errors import Invalid

T = TypeVar("T")

NUMBER = re.compile(r"_\d+$")
UNNAMED = re.compile(r"(?:.*/)?variable(?:_(\d+))?")


def anew(paths: Sequence[str], layers: Mapping[str, str], model: str = "") -> list[str]:
    """Paths of weights, without the model's own name. `layers` has the name of each layer without its number.

    >>> anew(["m/dense_4/kernel", "m/dense_5/kernel", "m/scale_1/variable_9"], {"dense_4": "dense", "dense_5": "dense"}, "m")
    ['dense/kernel', 'dense_1/kernel', 'scale/variable']
    """
    renamed: dict[tuple[str, ...], tuple[str, str]] = {}  # a path → its last name without a number, and with a new one
    counts = [int(found[1] or 0) if (found := UNNAMED.fullmatch(path)) else -1 for path in paths]
    order = sorted(count for count in counts if count >= 0)  # that in which they were made
    names: dict[str, None] = {}
    for text, count in zip(paths, counts, strict=True):
        *steps, last = text.split("/")
        steps, own = steps[1:] if steps[:1] == [model] else steps, []
        for i, step in enumerate(steps):
            path = tuple(steps[: i + 1])
            if path not in renamed:
                base = layers.get(step) or NUMBER.sub("", step)  # of another model, in which the layer was used first
                same = sum(old[:-1] == path[:-1] and like == base for old, (like, _) in renamed.items())
                renamed[path] = base, f"{base}_{same}" if same else base
            own.append(renamed[path][1])
        wanted = "/".join([*own, last if count < 0 else f"variable_{order.index(count)}".removesuffix("_0")])
        others = (f"{wanted}_{i}" for i in range(1, len(paths)))
        names[wanted if wanted not in names else next(other for other in others if other not in names)] = None
    return list(names)


def kept_among(named: Sequence[tuple[str, T]], kept: Mapping[str, Any]) -> dict[str, T]:
    """Those of some tensors that are kept, by the names under which they are. What is kept may be copies of them."""
    own = dict(named)
    if len(own) < len(named):
        raise Invalid(
            "a tensor of the model has the name of one of the loss: call that part of the model something else"
        )
    ids = {id(tensor): tensor for tensor in own.values()}
    found = {name: ids.get(id(tensor), own.get(name)) for name, tensor in kept.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def unnumbered(name: str, kind: str) -> str:
    """The name of a layer without the number that it has from Keras. Bidirectional names two layers after a third.

    >>> unnumbered("conv2d_3", "Conv2D"), unnumbered("backward_lstm_1", "LSTM"), unnumbered("block_2", "Dense")
    ('conv2d', 'backward_lstm', 'block_2')
    """
    kind = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", kind))
    kind = re.sub(r"([a-z])([A-Z])", r"\1_\2", kind).lower()  # Conv2DTranspose → conv2d_transpose, as Keras has it
    return NUMBER.sub("", name) if re.fullmatch(rf"(forward_|backward_)?{kind}(_\d+)?", name) else name

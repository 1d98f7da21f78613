"""Recipes: as files, with a hash of themselves; and what tells one from another. training/recipe.py makes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

# What a resume may accept to be different → the entries of the recipe that it means.
ACCEPT = {
    "numerics": ("numerics", "version", "samestep", "portable"), "code": ("code", "model", "loss", "schedule"),
    "data": ("train", "test"),
}  # fmt: skip
MEAN_CODE = {"model", "parameters", "loss", "optimizer", "schedule"}  # if one of these differs, so does code, of course
SAID = 6  # differences that are told


def recipe_text(recipe: dict[str, Any]) -> bytes:
    """The content of recipe.json."""
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    return json.dumps({**recipe, "sha256": digest}, indent=2).encode() + b"\n"


def read_recipe(text: bytes) -> dict[str, Any]:
    """The inverse of `recipe_text`; ValueError if it is damaged."""
    recipe = json.loads(text)
    if not isinstance(recipe, dict):
        raise ValueError("it is not a recipe")
    told = recipe.pop("sha256", None)
    if told != hashlib.sha256(json.dumps(recipe).encode()).hexdigest():
        raise ValueError("it was changed after it was written")
    return recipe


def differences(
    ours: dict[str, Any], theirs: dict[str, Any], besides: Iterable[str] = (), verb: str = "was"
) -> dict[str, str]:
    """What tells one recipe from another, in words, by name.

    >>> differences({"seed": 0, "shards": 8}, {"seed": 1, "shards": 8})
    {'seed': 'seed is 0, was 1'}
    """
    found: dict[str, str] = {}
    for name in {**theirs, **ours}:
        one, other = ours.get(name), theirs.get(name)
        if name in besides or repr(one) == repr(other) or (name == "parameters" and one == other):  # in any order
            continue
        if not isinstance(one, dict) or not isinstance(other, dict) or name == "parameters":
            here, there = shown(repr(one), repr(other))
            found[name] = f"{name} is {here}, {verb} {there}"
        elif name != "code":
            found |= differences(flat(one, name), flat(other, name), verb=verb)
        elif not found.keys() & MEAN_CODE:
            names = [part for part in {**other, **one} if one.get(part) != other.get(part)]
            found |= {f"code.{part}": f"{part} has other code or content" for part in names}
    return found


def shown(one: str, other: str, width: int = 77) -> tuple[str, ...]:
    """Two texts of bearable length; long ones from shortly before they differ.

    >>> shown("_" * 90 + ", alpha=0.1", "_" * 90 + ", alpha=0.2", width=40)
    ('..., alpha=0.1', '..., alpha=0.2')
    """
    texts = [" ".join(text.split()) for text in (one, other)]
    alike = len(os.path.commonprefix(texts))  # noqa: RUF071 - of any two texts
    starts = [alike - width // 4 if alike > width // 2 and len(text) > width else 0 for text in texts]
    cut = zip(texts, starts, strict=True)
    return tuple("..." * (at > 0) + text[at : at + width] + "..." * (len(text) > at + width) for text, at in cut)


def in_words(found: dict[str, str]) -> str:
    told = list(found.values())
    return "; ".join(told[:SAID] + [f"and {len(told) - SAID} more"] * (len(told) > SAID))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted names.

    >>> flat({"seed": 0, "train": {"examples": 40, "x": [40, 5]}})
    {'seed': 0, 'train.examples': 40, 'train.x': [40, 5]}
    """
    if not isinstance(value, dict):
        return {name: value}
    inner = [flat(below, f"{name}.{key}" if name else key) for key, below in value.items()]
    return {key: leaf for part in inner for key, leaf in part.items()}

"""The log of a run, one event a line, and how two recipes are told apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from samestep.checks import show

Event = dict[str, Any]
Recipe = dict[str, Any]


def events(log: bytes) -> Iterator[Event]:
    """The events of a log. A last line without an end, on which the run was killed, is left out."""
    lines = log.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            yield dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error


def chain(prints: Iterable[str]) -> str:
    """One hash for the fingerprints of all steps up to now."""
    return hashlib.sha256("".join(prints).encode()).hexdigest()


IMMATERIAL = ("max_epochs",)  # what comes later does not change the steps before it


@dataclass(frozen=True)
class Difference:
    """A value of a recipe that another recipe has otherwise."""

    name: str
    ours: Any
    theirs: Any

    def words(self, theirs: str = "was") -> str:
        return f"{self.name} is {show(self.ours)}, {theirs} {show(self.theirs)}"


def differences(ours: Recipe, theirs: Recipe, besides: Iterable[str] = IMMATERIAL) -> list[Difference]:
    """What tells one recipe from another.

    >>> differences({"seed": 0, "shards": 8}, {"seed": 1, "shards": 8})
    [Difference(name='seed', ours=0, theirs=1)]
    """
    names = [name for name in {**theirs, **ours} if name not in besides]
    pairs = [Difference(name, ours.get(name), theirs.get(name)) for name in names]
    return [pair for pair in pairs if pair.ours != pair.theirs]

"""The public signatures: every parameter has a type that says something, and every docstring begins with a sentence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import samestep

INSIDE = {"session", "replay"}  # for the rooms of samestep alone


def doors() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and class, and every public method."""
    for name in samestep.__all__:
        thing = getattr(samestep, name)
        yield name, thing
        for method, what in vars(thing).items() if isinstance(thing, type) else ():
            found = (
                what.__func__ if isinstance(what, staticmethod) else what.fget if isinstance(what, property) else what
            )
            if inspect.isfunction(found) and not method.startswith("_") and method not in INSIDE:
                yield f"{name}.{method}", found


def text(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def faults(name: str, thing: Callable[..., Any]) -> list[str]:
    """What a signature leaves open."""
    signature, found = inspect.signature(thing), []
    method = "." in name
    for one in list(signature.parameters.values()):
        if one.name.startswith("_") or (method and one.name in ("self", "cls")):
            continue
        if one.annotation is inspect.Parameter.empty:
            found.append(f"{name}: {one.name} has no type")
        elif "Any" in re.split(r"\W*\|\W*", text(one.annotation)):
            found.append(f"{name}: {one.name} is Any")
    returns = signature.return_annotation
    if not isinstance(thing, type) and (returns is inspect.Signature.empty or text(returns) == "Any"):
        found.append(f"{name}: it returns anything")
    return found


def begins_with_a_sentence(thing: Callable[..., Any]) -> bool:
    first = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return bool(re.fullmatch(r"(?s)([A-Z`]|\w+\().*[.:]", first))


@pytest.mark.parametrize(("name", "thing"), list(doors()), ids=[name for name, _ in doors()])
def test_a_signature_says_what_it_takes(name: str, thing: Callable[..., Any]) -> None:
    assert not set(faults(name, thing))
    assert begins_with_a_sentence(thing)


def test_what_is_left_open_is_seen() -> None:
    def broken(x, y: Any, z: Any | None = None, *, w: Callable[[Any], Any] | None = None) -> Any: ...  # type: ignore

    assert faults("broken", broken) == [
        "broken: x has no type", "broken: y is Any", "broken: z is Any", "broken: it returns anything",
    ]  # fmt: skip
    assert not begins_with_a_sentence(broken)
    broken.__doc__ = "so many of the last ones stay"
    assert not begins_with_a_sentence(broken)


def test_help_of_the_trainer_reads_well() -> None:
    told = str(inspect.signature(samestep.Trainer))
    assert "max_epochs: 'int' = 10, batch_size: 'int' = 256, *, shards: 'int' = 8, devices: 'Devices' = 'auto'" in told
    fields = list(inspect.signature(samestep.Trainer).parameters)
    doc = inspect.getdoc(samestep.Trainer) or ""  # from Python 3.13 on, __doc__ is not indented
    listed = [name for line in re.findall(r"^(\w+(?:, \w+)*) {2,}\S", doc, re.M) for name in line.split(", ")]
    assert sorted(listed) == sorted(fields)

"""Other values for attributes of a framework, for the time of a `with`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """In each of these places, an object and the name of an attribute, another value."""
    before = [(home, name, getattr(home, name)) for home, name, _ in places]
    try:
        for home, name, value in places:
            setattr(home, name, value)
        yield
    finally:
        for home, name, value in before:
            setattr(home, name, value)


@contextmanager
def noted(places: Sequence[tuple[Any, str]]) -> Iterator[list[str]]:
    """Notes the names of those functions in these places that are called."""
    called: list[str] = []

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            called.append(name)
            return original(*args, **named)

        return call

    with replaced([(home, name, noting(name, getattr(home, name))) for home, name in places]):
        yield called

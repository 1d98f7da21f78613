"""The log of a run: one JSON object a line, each with a seal, a hash of the line and of the seal before it.

So no line can be changed unseen. A last line without an end, on which the run was killed, does not count.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
SEAL = re.compile(rb', "seal": "([0-9a-f]{16})"}$')


def sealed(event: Event, before: str) -> tuple[bytes, str]:
    """The line of an event in the log, and its seal."""
    text = json.dumps(event)
    seal = hashlib.sha256(f"{before}{text}".encode()).hexdigest()[:16]
    return f'{text[:-1]}, "seal": "{seal}"}}\n'.encode(), seal


def last_seal(log: bytes) -> str:
    found = SEAL.search(log.rstrip(b"\n"))
    return found[1].decode() if found else ""


def events(log: bytes) -> Iterator[Event]:
    """The events of a log. A last line without an end, on which the run was killed, is left out.

    A log without any seal is one of an older samestep.
    """
    before = ""
    for number, line in enumerate(log.split(b"\n")[:-1], 1):
        try:
            event = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} is not an event") from error
        told = event.pop("seal", None)
        if told or before:
            again, before = sealed(event, before)
            if told != before or again != line + b"\n":
                raise ValueError(f"line {number} was changed after it was written")
        yield event


def chain(prints: Iterable[str]) -> str:
    """One hash for the fingerprints of all steps up to now."""
    return hashlib.sha256("".join(prints).encode()).hexdigest()

"""The log of a run: one JSON object a line, each with a seal, a hash of the line and of the seal before it.

So no line can be changed unseen. A last line without an end, on which the run was killed, does not count. A damaged log is
mended: what is intact in it is kept, and an event "lost" has the fingerprints of the steps of which nothing else is known.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from samestep.errors import Invalid

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


def events(log: bytes, damaged: bool = False) -> Iterator[Event]:
    """The events of a log; of a damaged one, those that are as they were written.

    A last line without an end, on which the run was killed, is left out.
    """
    before = ""
    for number, line in enumerate(log.split(b"\n")[:-1], 1):
        try:
            event = dict(json.loads(line))
            event.pop("seal", None)
            if "event" not in event or sealed(event, before)[0] != line + b"\n":
                raise ValueError
            yield event
        except (ValueError, TypeError):
            if not damaged:
                raise Invalid(f"line {number} is not an event, or was changed after it was written") from None
        before = last_seal(line)


def mended(log: bytes, prints: list[str], history: list[Event]) -> bytes:
    """A damaged log up to a checkpoint, which knows these fingerprints and this history."""
    told, at, lines, seal = [{"event": "epoch", **row} for row in history], 0, list[bytes](), ""
    for event in [*events(log, damaged=True), {"first": len(prints), "fingerprint": []}]:
        first, own = event.get("first", -1), event.get("fingerprint", [])
        if at <= first <= len(prints) and prints[first : first + len(own)] == own:
            gap = {"event": "lost", "first": at, "last": first - 1, "fingerprint": prints[at:first]}
            told += [gap] * (at < first) + [event] * bool(own)
            at = first + len(own)
    for event in sorted(told, key=lambda event: event.get("step") or event["first"] + 0.5):
        line, seal = sealed(event, seal)
        lines.append(line)
    return b"".join(lines)

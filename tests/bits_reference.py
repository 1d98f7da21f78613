"""What fingerprint.py computes, written with Python's whole numbers."""

from __future__ import annotations

from samestep.fingerprint import odd as odd_numbers


def of_bytes(raw: bytes) -> int:
    raw += b"\0" * (-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little", signed=True) for i in range(0, len(raw), 8)]
    rows = [words[i : i + 1023] for i in range(0, len(words) // 1023 * 1023, 1023)]
    sums = words[len(rows) * 1023 :] + [sum(row) for row in rows] + [sum(column) for column in zip(*rows, strict=True)]
    words = [wrapped(number) for number in sums]
    both = words + [word >> 32 for word in words]
    return sum(word * int(odd) for word, odd in zip(both, odd_numbers(len(both)), strict=True)) % (1 << 64)


def wrapped(number: int) -> int:
    """As 64 bits with a sign."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)

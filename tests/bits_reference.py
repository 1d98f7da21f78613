"""What backends/bits.py computes, written with Python's whole numbers."""

from __future__ import annotations

from samestep.backends import bits


def of_bytes(raw: bytes) -> int:
    raw += b"\0" * (-len(raw) % 8)
    words = [int.from_bytes(raw[i : i + 8], "little", signed=True) for i in range(0, len(raw), 8)]
    columns = list(map(int, bits.odd(4096)))
    rows = [words[i : i + 4096] for i in range(0, len(words) // 4096 * 4096, 4096)]
    sums = words[len(rows) * 4096 :]
    sums += [sum(word * column for word, column in zip(row, columns, strict=True)) for row in rows]
    sums += [sum(column) for column in zip(*rows, strict=True)]
    words = [wrapped(number) for number in sums]
    both = words + [word >> 32 for word in words]
    return sum(word * int(odd) for word, odd in zip(both, bits.odd(len(both)), strict=True)) % (1 << 64)


def wrapped(number: int) -> int:
    """As 64 bits with a sign."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)

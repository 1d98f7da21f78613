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
    return of_sums(sums)


def of_sums(sums: list[int]) -> int:
    """The last step: halves of 32 bits, with a sign, each times an odd number; without a sign."""
    raw = b"".join((number % (1 << 64)).to_bytes(8, "little") for number in sums)
    halves = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    return sum(half * int(odd) for half, odd in zip(halves, bits.odd(len(halves)), strict=True)) % (1 << 64)

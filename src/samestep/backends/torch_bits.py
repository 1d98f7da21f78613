"""The fingerprints of PyTorch's vectors: on the CPU by NumPy in their own memory (bits.py), which is quicker;
on a GPU they stay there. Both give the same number."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from samestep.backends import bits

ROWS_AT_ONCE = 2048  # that a GPU takes at a time: their 64-bit products are 128 MiB


def fingerprint(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number of 64 bits for all these vectors, on their device."""
    device = vectors[0].device
    if device.type == "cpu":
        return torch.from_numpy(bits.fingerprint([numbers(vector).numpy() for vector in vectors]))
    return (torch.cat([on_gpu(vector) for vector in vectors]) * odd_on(device)[1][: len(vectors)]).sum().view(1)


@functools.cache
def odd_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    of_columns, of_rows = (torch.from_numpy(odd).to(device) for odd in bits.odd())
    return of_columns, of_rows


def numbers(vector: torch.Tensor) -> torch.Tensor:
    """The bits of a vector as whole numbers."""
    return vector.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[vector.element_size()])


def on_gpu(vector: torch.Tensor) -> torch.Tensor:
    found, (of_columns, of_rows) = numbers(vector), odd_on(vector.device)
    whole = len(found) // bits.COLUMNS
    rows, rest = found[: whole * bits.COLUMNS].view(-1, bits.COLUMNS), found[whole * bits.COLUMNS :]
    sums = [(some * of_columns).sum(1) for some in rows.split(ROWS_AT_ONCE)] if whole else []
    sums.append((rest * of_columns[: len(rest)]).sum().view(1))
    total = torch.cat(sums)
    return (total * of_rows[torch.arange(len(total), device=total.device) % bits.ROWS]).sum().view(1)

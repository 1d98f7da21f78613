"""The fingerprints of PyTorch's vectors: on a CPU by NumPy in their own memory (bits.py), which is quicker; on a GPU they stay
there. Both give the same number."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from samestep.backends import bits

ROWS_AT_ONCE = 4096  # their products are 128 MiB


class Print:
    """The fingerprint of vectors that stay where they are: one number of 64 bits for all of them, on their device."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        raw = [vector.view(torch.uint8) for vector in vectors]
        self._on_host = [each.numpy() for each in raw] if vectors[0].device.type == "cpu" else []
        self._on_gpu = [] if self._on_host else raw

    def __call__(self) -> torch.Tensor:
        if self._on_host:
            return torch.from_numpy(bits.fingerprint(self._on_host))
        return of_sums([on_gpu(raw) for raw in self._on_gpu])


def fingerprint(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    return Print(vectors)()


@functools.cache
def odd_on(device: torch.device, count: int) -> torch.Tensor:
    return torch.from_numpy(bits.odd(count)).to(device)


def on_gpu(raw: torch.Tensor) -> torch.Tensor:
    """What bits.bits gives for these bytes, computed by PyTorch."""
    whole = len(raw) // (bits.COLUMNS * bits.WORD) * bits.COLUMNS * bits.WORD
    rest = raw[whole:]
    if len(rest) % bits.WORD:
        rest = torch.nn.functional.pad(rest, (0, -len(rest) % bits.WORD))
    sums = [rest.view(torch.int64)]
    if whole:
        rows, of_columns = raw[:whole].view(torch.int64).view(-1, bits.COLUMNS), odd_on(raw.device, bits.COLUMNS)
        sums += [(some * of_columns).sum(1) for some in rows.split(ROWS_AT_ONCE)]
        sums.append(rows.sum(0))
    return of_sums(sums)


def of_sums(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    halves = torch.cat(list(sums)).view(torch.int32)
    return (halves * odd_on(halves.device, len(halves))).sum().view(1)

"""The fingerprint of PyTorch's vectors after a step, computed where they are. CPU and GPU give the same number."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from samestep.fingerprint import COLUMNS, WORD, Fingerprint, odd


class VectorFingerprint:
    """The fingerprint of vectors that stay where they are: one number of 64 bits for all of them, on their device."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        raw = [vector.view(torch.uint8) for vector in vectors]
        self._on_host = Fingerprint([one.numpy() for one in raw]) if raw[0].device.type == "cpu" else None
        self._on_gpu = [] if self._on_host else [laid_out(one) for one in raw]

    def __call__(self) -> torch.Tensor:
        return torch.from_numpy(self._on_host()) if self._on_host else on_gpu(self._on_gpu)


Rows = tuple[torch.Tensor, torch.Tensor]  # the words of a vector in rows of COLUMNS, and the bytes of what is left over


def laid_out(raw: torch.Tensor) -> Rows:
    whole = len(raw) // (COLUMNS * WORD) * COLUMNS * WORD
    return raw[:whole].view(torch.int64).view(-1, COLUMNS), raw[whole:]


@functools.cache
def odd_on(device: torch.device, count: int) -> torch.Tensor:
    return torch.from_numpy(odd(count)).to(device)


def on_gpu(vectors: Sequence[Rows]) -> torch.Tensor:
    """The number that fingerprint.of_vectors gives, computed by PyTorch where the vectors are."""
    words = torch.cat([part for vector in vectors for part in sums(*vector)])
    both = torch.cat([words, words >> 32])
    return (both * odd_on(both.device, len(both))).sum().view(1)


def sums(rows: torch.Tensor, rest: torch.Tensor) -> list[torch.Tensor]:
    if fill := -len(rest) % WORD:
        rest = torch.nn.functional.pad(rest, (0, fill))
    if not len(rows):
        return [rest.view(torch.int64)]
    return [rest.view(torch.int64), rows.sum(1), rows.sum(0)]

"""The fingerprint of PyTorch's vectors after a step, computed where they are. CPU and GPU give the same number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from samestep.backends.torch.precision import compiled
from samestep.fingerprint import COLUMNS, WORD, Fingerprint, odd


class VectorFingerprint:
    """The fingerprint of vectors that stay where they are: one number of 64 bits for all of them, on their device."""

    def __init__(self, vectors: Sequence[torch.Tensor], compiles: bool = False) -> None:
        raw = [vector.view(torch.uint8) for vector in vectors]
        self._on_host = Fingerprint([one.numpy() for one in raw]) if raw[0].device.type == "cpu" else None
        self._on_gpu = [] if self._on_host else [laid_out(one) for one in raw]
        self._compute = compiled(of_rows) if compiles else of_rows  # fewer kernels, and sums of whole numbers are exact

    def __call__(self) -> torch.Tensor:
        return torch.from_numpy(self._on_host()) if self._on_host else on_gpu(self._on_gpu, self._compute)


Rows = tuple[torch.Tensor, torch.Tensor]  # the words of a vector in rows of COLUMNS, and what is left over


def laid_out(raw: torch.Tensor) -> Rows:
    whole = len(raw) // (COLUMNS * WORD) * COLUMNS * WORD
    rest = raw[whole:]
    return raw[:whole].view(torch.int64).view(-1, COLUMNS), rest if len(rest) % WORD else rest.view(torch.int64)


@functools.cache
def odd_on(device: torch.device, count: int) -> torch.Tensor:
    return torch.from_numpy(odd(count)).to(device)


def on_gpu(vectors: Sequence[Rows], compute: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The number that fingerprint.of_vectors gives, computed by PyTorch where the vectors are."""
    sizes = (-(-rest.nbytes // WORD) + bool(len(rows)) * (len(rows) + COLUMNS) for rows, rest in vectors)
    return compute(vectors, odd_on(vectors[0][0].device, 2 * sum(sizes)))


def of_rows(vectors: Sequence[Rows], odd: torch.Tensor) -> torch.Tensor:
    words = torch.cat([part for vector in vectors for part in sums(*vector)])
    return (torch.cat([words, words >> 32]) * odd).sum().view(1)


def sums(rows: torch.Tensor, rest: torch.Tensor) -> list[torch.Tensor]:
    if rest.dtype != torch.int64:
        rest = torch.nn.functional.pad(rest, (0, -len(rest) % WORD)).view(torch.int64)
    return [rest, rows.sum(1), rows.sum(0)] if len(rows) else [rest]

"""A shard's vector in bands, each handed on as soon as the backward pass has computed it, so that it can be sent meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from samestep.backends import Deliver

if TYPE_CHECKING:
    from samestep.backends.torch.replica import TorchReplica


class Bands:
    """Hands on the bands of one shard's vector while the backward pass goes on."""

    def __init__(self, replica: TorchReplica, deliver: Deliver) -> None:
        self.replica, self.deliver = replica, deliver
        self.vector = torch.empty(replica.size, dtype=replica.parameters.dtype, device=replica.parameters.device)
        self._band = [next(i for i, (lo, hi) in enumerate(replica.bands) if lo <= piece.start < hi)
                      for piece in replica.weights.pieces]  # fmt: skip
        self._missing = set(range(len(self._band)))

    def take(self, i: int, gradient: torch.Tensor | None) -> None:
        """The gradient of parameter i is there (None: it has none)."""
        piece, band = self.replica.weights.pieces[i], self._band[i]
        if i in self._missing:
            with torch.no_grad():
                self.vector[piece.stop : piece.stop + piece.pad].zero_()
                if gradient is None:
                    self.vector[piece.start : piece.stop].zero_()
                else:
                    self.vector[piece.start : piece.stop].copy_(piece.flatten(gradient))
            self._missing.remove(i)
            if not any(self._band[j] == band for j in self._missing):
                self.deliver(band, self.vector[slice(*self.replica.bands[band])])

    def close(self) -> None:
        """The backward pass is over: parameters that it did not come to have no gradient."""
        for i in sorted(self._missing, reverse=True):
            self.take(i, None)

    def finish(self, rest: list[torch.Tensor]) -> torch.Tensor:
        """The band after the weights."""
        last = len(self.replica.bands) - 1
        tail = self.vector[slice(*self.replica.bands[last])]
        torch.cat(rest, out=tail)
        self.deliver(last, tail)
        return self.vector


@contextmanager
def watched(parameters: Sequence[torch.nn.Parameter], bands: Bands | None) -> Iterator[None]:
    """Tell `bands` of every gradient as soon as it has been computed."""
    hooks = [p.register_hook(partial(bands.take, i)) for i, p in enumerate(parameters)] if bands else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

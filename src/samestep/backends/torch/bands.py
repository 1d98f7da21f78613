"""A shard's vector in bands. Each is handed on once it is computed, and can be sent while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from samestep.backends.torch.flat import TorchLayout
from samestep.shards import Span


class Bands:
    """Hands on the bands of one shard's vector while the backward pass goes on."""

    def __init__(
        self, layout: TorchLayout, bands: Sequence[Span], vector: Tensor, deliver: Callable[[Tensor, int], None]
    ) -> None:
        self.layout, self.bands, self.vector, self.deliver = layout, bands, vector, deliver
        self._band = [next(i for i, (lo, hi) in enumerate(bands) if lo <= start < hi) for start, _ in layout.spans]
        self._missing = set(range(len(self._band)))

    def take(self, i: int, gradient: Tensor | None) -> None:
        """The gradient of parameter i is there (None: it has none)."""
        (lo, hi), band = self.layout.spans[i], self._band[i]
        if i in self._missing:
            with torch.no_grad():
                self.vector[self.layout.padding[i]].zero_()
                if gradient is None:
                    self.vector[lo:hi].zero_()
                else:
                    self.vector[lo:hi].copy_(self.layout.flatten(i, gradient))
            self._missing.remove(i)
            if not any(self._band[j] == band for j in self._missing):
                self.deliver(self.vector[slice(*self.bands[band])], band)

    def close(self) -> None:
        """The backward pass is over: parameters that it did not reach have no gradient."""
        for i in sorted(self._missing, reverse=True):
            self.take(i, None)

    def finish(self, rest: list[Tensor]) -> None:
        """Deliver the band after the weights."""
        last = len(self.bands) - 1
        tail = self.vector[slice(*self.bands[last])]
        torch.cat(rest, out=tail)
        self.deliver(tail, last)


@contextmanager
def watched(parameters: Sequence[torch.nn.Parameter], bands: Bands | None) -> Iterator[None]:
    """Tell `bands` of every gradient as soon as it has been computed."""
    hooks = [p.register_hook(partial(bands.take, i)) for i, p in enumerate(parameters)] if bands else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

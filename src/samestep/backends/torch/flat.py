"""Tensors of a PyTorch model as views of one flat vector: where each lies in it, and in which order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.backends.layout import places


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies in a flat vector, in the order of its own memory (channels-last stays channels-last)."""

    start: int
    stop: int
    pad: int
    order: tuple[int, ...]  # of dimensions, from the slowest to the fastest
    shape: tuple[int, ...]  # in that order

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat[self.start : self.stop].view(self.shape).permute(back)

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        return strided(tensor).permute(self.order).reshape(-1)


def pieces(tensors: Sequence[torch.Tensor]) -> list[Piece]:
    spans, size = places([tensor.numel() for tensor in tensors], tensors[0].element_size())
    found = []
    for tensor, (start, stop), (end, _) in zip(tensors, spans, [*spans[1:], (size, size)], strict=True):
        order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        if not tensor.permute(order).is_contiguous():
            order = tuple(range(tensor.ndim))
        found.append(Piece(start, stop, end - stop, order, tuple(tensor.shape[d] for d in order)))
    return found


class Flat:
    """Tensors of one type as views of one flat vector."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.pieces = pieces(tensors)
        end = self.pieces[-1]
        self.vector = torch.zeros(end.stop + end.pad, dtype=tensors[0].dtype, device=device)
        self.views = [piece.view(self.vector) for piece in self.pieces]
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    def move(self, delta: torch.Tensor) -> None:
        """Add the mean over the examples of the changes that the shards have seen."""
        if self.vector.is_floating_point():
            self.vector.add_(delta.to(self.vector.dtype))
        else:  # a counter changes alike in every shard, so the mean is the change
            self.vector.copy_(self.vector.long() + delta.round().long())

    def twin(self) -> Flat:
        """The same places in a vector of its own."""
        new = copy.copy(self)
        new.vector = self.vector.clone()
        new.views = [piece.view(new.vector) for piece in new.pieces]
        return new


def strided(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return now - before if now.is_floating_point() else now.long() - before.long()

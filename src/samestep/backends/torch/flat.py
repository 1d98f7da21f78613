"""Tensors of a PyTorch model as views of one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.backends.layout import Layout, aligned


@dataclass(frozen=True)
class TorchLayout(Layout):
    """A layout in which each tensor keeps the order of its own memory: channels-last stays channels-last."""

    orders: tuple[tuple[int, ...], ...] = ()  # of the dimensions of each tensor, from the slowest to the fastest

    @staticmethod
    def of(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> TorchLayout:
        orders = []
        for tensor in tensors:
            order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
            orders.append(order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim)))
        first, shapes = tensors[0], tuple(tuple(tensor.shape) for tensor in tensors)
        real, unit = first.is_floating_point(), aligned(first.element_size())
        return TorchLayout(tuple(names), shapes, str(first.dtype).removeprefix("torch."), real, unit, tuple(orders))

    def cut(self, vector: Any) -> list[Any]:
        views = []
        for (lo, hi), shape, order in zip(self.spans, self.shapes, self.orders, strict=True):
            inner = vector[lo:hi].reshape([shape[d] for d in order])
            back = sorted(range(len(order)), key=order.__getitem__)
            views.append(inner.permute(back) if isinstance(inner, torch.Tensor) else inner.transpose(back))
        return views

    def flatten(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        """Tensor i as its part of the vector."""
        return dense(tensor).permute(self.orders[i]).reshape(-1)


class Flat:
    """A vector of tensors, and views of each."""

    def __init__(self, layout: TorchLayout, vector: torch.Tensor) -> None:
        self.layout, self.vector = layout, vector
        self.views: list[torch.Tensor] = layout.cut(vector)

    @staticmethod
    def of(names: Sequence[str], tensors: Sequence[torch.Tensor], device: torch.device) -> Flat:
        layout = TorchLayout.of(names, tensors)
        flat = Flat(layout, torch.zeros(layout.size, dtype=tensors[0].dtype, device=device))
        for view, tensor in zip(flat.views, tensors, strict=True):
            view.copy_(tensor)
        return flat

    def move(self, delta: torch.Tensor) -> None:
        """Add the mean over the examples of the changes that the shards have seen."""
        if self.vector.is_floating_point():
            self.vector.add_(delta.to(self.vector.dtype))
        else:  # a counter changes alike in every shard, so the mean is the change
            self.vector.copy_(self.vector.long() + delta.round().long())

    def change_from(self, start: torch.Tensor) -> torch.Tensor:
        if self.vector.is_floating_point():
            return self.vector - start
        return self.vector.long() - start.long()

    def twin(self) -> Flat:
        """The same tensors in a vector of its own."""
        return Flat(self.layout, self.vector.clone())


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor. That of a sparse embedding is sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()

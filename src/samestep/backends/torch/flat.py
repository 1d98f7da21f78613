"""Tensors of a PyTorch model as views of one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.backends.layout import Layout, Numbers, aligned


@dataclass(frozen=True)
class TorchLayout(Layout):
    """A layout in which each tensor keeps the order of its own memory: channels-last stays channels-last."""

    orders: tuple[tuple[int, ...], ...] = ()  # of the dimensions of each tensor, from the slowest to the fastest

    @staticmethod
    def of(names: Sequence[str], tensors: Sequence[Tensor], channels_last: bool = False) -> TorchLayout:
        orders = []
        for tensor in tensors:
            if channels_last and tensor.ndim == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
            order = tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
            orders.append(order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim)))
        first, shapes = tensors[0], tuple(tuple(tensor.shape) for tensor in tensors)
        real, unit = first.is_floating_point(), aligned(first.element_size())
        return TorchLayout(tuple(names), shapes, str(on_host(first).dtype), real, unit, tuple(orders))

    def cut(self, vector: Any) -> list[Any]:
        views = []
        for (lo, hi), shape, order in zip(self.spans, self.shapes, self.orders, strict=True):
            inner = vector[lo:hi].reshape([shape[d] for d in order])
            back = sorted(range(len(order)), key=order.__getitem__)
            views.append(inner.permute(back) if isinstance(inner, Tensor) else inner.transpose(back))
        return views

    def flatten(self, i: int, tensor: Tensor) -> Tensor:
        """Tensor i as its part of the vector."""
        return tensor.to_dense().permute(self.orders[i]).reshape(-1)  # that of a sparse embedding is sparse


class Flat:
    """A vector of tensors, and views of each."""

    def __init__(self, layout: TorchLayout, vector: Tensor, pairs: bool) -> None:
        """`pairs`: the tensors are complex, and lie in the vector as pairs of real numbers."""
        self.layout, self.vector, self.pairs = layout, vector, pairs
        views: list[Tensor] = layout.cut(vector)
        self.views = [torch.view_as_complex(view) for view in views] if pairs else views

    @staticmethod
    def of(names: Sequence[str], tensors: Sequence[Tensor], device: torch.device, channels_last: bool = False) -> Flat:
        reals = [torch.view_as_real(t.contiguous()) for t in tensors] if tensors[0].is_complex() else tensors
        layout = TorchLayout.of(names, reals, channels_last)
        vector = torch.zeros(layout.size, dtype=reals[0].dtype, device=device)
        flat = Flat(layout, vector, pairs=tensors[0].is_complex())
        for view, tensor in zip(flat.views, tensors, strict=True):
            view.copy_(tensor)
        return flat

    def move(self, delta: Tensor) -> None:
        """Add the mean over the examples of the changes that the shards have seen."""
        if self.vector.is_floating_point():
            self.vector.add_(delta.to(self.vector.dtype))
        else:  # a counter changes alike in every shard, so the mean is the change
            self.vector.copy_(self.vector.long() + delta.round().long())

    def change_from(self, start: Tensor) -> Tensor:
        if self.vector.is_floating_point():
            return self.vector - start
        return self.vector.long() - start.long()

    def twin(self) -> Flat:
        """The same tensors in a vector of its own. To autograd they are apart: one may be written while another is needed."""
        twin = Flat(self.layout, self.vector.clone(), self.pairs)
        twin.views = [view.data for view in twin.views]
        return twin


def on_host(tensor: Tensor) -> Numbers:
    """A tensor as NumPy. Complex numbers become pairs, and small floats that NumPy lacks float32, which holds them exactly."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    small = tensor.is_floating_point() and tensor.element_size() < 4 and tensor.dtype != torch.float16
    return (tensor.float() if small else tensor).numpy()


def from_host(array: Numbers, like: Tensor) -> Tensor:
    """The inverse of `on_host`: a new tensor of the type and on the device of another."""
    tensor = torch.from_numpy(np.array(array)).to(like.device)
    return torch.view_as_complex(tensor) if like.is_complex() else tensor.to(like.dtype)

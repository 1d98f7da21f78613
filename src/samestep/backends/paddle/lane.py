"""What computes shards in Paddle: a *lane*, a copy of the layer that one thread has to itself.

Its parameters are views of the replica's vector and its state is its own, so that several threads can compute shards of one
replica side by side without seeing each other. Paddle lets go of Python's lock while it computes, so threads pay off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from samestep.backends.paddle.flat import Flat, Tensor, Vector
from samestep.backends.pair import Given

Home = tuple[dict[str, Any], str, Tensor]  # a layer's dictionary of tensors, a name in it, and what was there at first


@dataclass
class Lane:
    layer: paddle.nn.Layer
    parameters: list[Tensor]
    state: list[tuple[Vector, list[Home]]]  # a vector, and where its views are
    constants: dict[str, tuple[Tensor, int]]  # with the version each had at first
    modes: list[bool]
    buffers: list[tuple[dict[str, Any], dict[str, Any]]]  # of each layer: its dictionary, and what was in it at first
    training: bool = True

    @staticmethod
    def of(layer: paddle.nn.Layer, homes: dict[str, Home], weights: Flat, state: list[Flat], fixed: list[str]) -> Lane:
        """A lane around this layer, which is in training mode and has its tensors in these homes."""
        layers = layer.sublayers(include_self=True)
        return Lane(
            layer,
            [homes[name][2] for name in weights.views],
            [(flat.vector, [homes[name] for name in flat.views]) for flat in state],
            {name: (homes[name][2], homes[name][2].inplace_version) for name in fixed},
            [one.training for one in layers],
            [(one._buffers, dict(one._buffers)) for one in layers],
        )

    def train(self, training: bool) -> None:
        """Switch between training and evaluation, keeping parts that the user has put into evaluation mode as they are."""
        if training != self.training:
            self.training = training
            for layer, mode in zip(self.layer.sublayers(include_self=True), self.modes, strict=True):
                layer.training = training and mode

    def run(self, given: Given, start: Sequence[Flat]) -> Any:
        """The model's output, with a state that starts from these vectors."""
        for now, first in self.buffers:
            now.clear()
            now.update(first)
        for (own, _), flat in zip(self.state, start, strict=True):
            paddle.assign(flat.vector, own)
        x, named = given
        return self.layer(*x, **named)

    def changes(self, start: Sequence[Flat]) -> list[Vector]:
        """What the shard did to each vector of the state."""
        found = []
        for (own, homes), flat in zip(self.state, start, strict=True):
            now, first = own, flat.vector
            if not all(held[name] is home for held, name, home in homes):  # self.n = self.n + 1 makes a new tensor
                now = paddle.concat(flat.pieces([held[name].detach().astype(own.dtype) for held, name, _ in homes]))
            found.append(now.astype(flat.wide) - first.astype(flat.wide))
        return found

    def written(self) -> list[str]:
        """The constants that were written to."""
        return [name for name, (tensor, version) in self.constants.items() if tensor.inplace_version != version]

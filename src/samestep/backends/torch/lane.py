"""A *lane* computes shards in PyTorch. It is a copy of the module that one thread has to itself.

Its parameters are views of the replica's vector and its buffers are its own, so that several threads can compute shards of
one replica side by side without disturbing each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samestep.backends.calling import spread
from samestep.backends.losses import Losses, Measure, PerShard
from samestep.backends.making import Making
from samestep.backends.torch.flat import Flat
from samestep.backends.torch.precision import compiled
from samestep.errors import Invalid, Written
from samestep.trees import Tree, mapped

OPTIMIZER = "only the optimizer may do that, also in evaluation (nn.Embedding(max_norm=...) does it, too)"


def forward(model: torch.nn.Module, measure: Measure, x: Tree) -> Any:
    given, named = spread(x, measure.style)
    return model(*given, **named)


def numbers_of(model: torch.nn.Module, measure: Measure, by: Losses, x: Tree, y: Tree) -> list[Tensor]:
    """The loss, the hits and what else is measured of some examples."""
    return by.measured(measure, forward(model, measure, x), y)


def channels_last(images: Tensor) -> Tensor:
    """Images with their channels last. With one channel, only the strides say so to a convolution."""
    _, c, h, w = images.shape
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, (c * h * w, 1, w * c, c))


class Lane:
    def __init__(
        self,
        module: torch.nn.ModuleDict,
        measure: Measure,
        buffers: list[Flat],
        tensors: dict[str, Tensor],
        making: Making,
    ) -> None:
        """`module`: the model, and the loss if it is a module; `tensors`: its parameters and buffers by name."""
        self.module, self.buffers, self.making = module, buffers, making
        self._numbers = compiled(numbers_of) if making.compile else numbers_of
        loss = module._modules.get("loss", measure.function)
        self.measure = replace(measure, loss=PerShard(loss) if isinstance(measure.loss, PerShard) else loss)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._training, self._modes = True, [m.training for m in module.modules()]
        self._homes = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        # Parameters that are state, with their memory. What is neither state nor trained, with its address and version.
        self._state = {view.data_ptr() for flat in buffers for view in flat.views}
        self._written = [(p, p.data) for p in module.parameters() if p.data_ptr() in self._state]
        fixed = [(name, t) for name, t in tensors.items() if t.data_ptr() not in self._state]
        self._fixed = [(name, t, t.data_ptr(), -1 if t.requires_grad else t._version) for name, t in fixed]

    def forward(self, x: Tree) -> Any:
        return forward(self.module["model"], self.measure, self._laid_out(x))

    def _laid_out(self, x: Tree) -> Tree:
        """Examples with their channels last, if that is how images are to lie."""
        if self.making.memory_format != "channels_last":
            return x
        return mapped(lambda a: channels_last(a) if a.ndim == 4 else a, x)

    def run(self, x: Tree, y: Tree, start: Sequence[Flat], by: Losses) -> list[Tensor]:
        """The loss, the hits and what else is measured of some examples, with a state that starts from these vectors."""
        for own, first in zip(self.buffers, start, strict=True):
            own.vector.copy_(first.vector)
        version = self.parameters[0]._version  # of all: they are views of one vector
        bfloat16 = self.making.precision == "bfloat16"
        with torch.autocast(self.parameters[0].device.type, torch.bfloat16) if bfloat16 else nullcontext():
            numbers = self._numbers(self.module["model"], self.measure, by, self._laid_out(x), y)
        self._settle()
        self._check_fixed(self.parameters[0]._version != version)
        return numbers

    def _settle(self) -> None:
        """Put back the buffers that the forward pass has replaced (self.n = self.n + 1), with their new values."""
        for module, name, home in self._homes:
            now = module._buffers.get(name)
            if now is not home:
                if now is None or now.shape != home.shape or now.dtype != home.dtype:
                    if home.data_ptr() not in self._state:
                        continue  # of the batch's size, perhaps: it is no more than an attribute, and the rehearsal judges it
                    raise Invalid(
                        f"the forward pass has put something of another shape or type in the place of the buffer {name!r}: "
                        "use persistent=False if each pass makes it anew"
                    )
                with torch.no_grad():
                    home.copy_(now)
                module._buffers[name] = home
        for parameter, memory in self._written:  # p.data = ... makes a new tensor, too
            if parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.data)
                parameter.data = memory

    def train(self, training: bool) -> None:
        """Switch between training and evaluation. Modules that the user put into evaluation mode stay in it."""
        if training != self._training:
            self._training = training
            for module, mode in zip(self.module.modules(), self._modes, strict=True):
                module.training = training and mode

    def _check_fixed(self, weights_written: bool) -> None:
        """Weights and constants must be as they were before the forward pass: other lanes compute with them, too."""
        if weights_written:
            raise Written("a trained weight", OPTIMIZER)
        for name, tensor, address, version in self._fixed:
            if tensor.data_ptr() != address or version not in (-1, tensor._version):
                state = f"use Trainer(state={name!r}) if it is state, or a persistent buffer"
                raise Written(repr(name), OPTIMIZER if version < 0 else state)

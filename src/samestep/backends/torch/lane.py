"""A *lane* computes shards in PyTorch. It is a copy of the module that one thread has to itself.

Its parameters are views of the replica's vector and its buffers are its own, so that several threads can compute shards of
one replica side by side without disturbing each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.backends.torch.bands import Bands
from samestep.backends.torch.flat import Flat
from samestep.errors import Invalid


@dataclass
class Lane:
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    buffers: list[Flat]
    modes: list[bool]
    constants: dict[str, tuple[torch.Tensor, int]]  # each with its version at the start
    homes: list[tuple[torch.nn.Module, str, torch.Tensor]]  # module, name and tensor of every buffer
    training: bool = True
    bands: Bands | None = None  # of the shard that is being computed, if they are wanted one by one

    @staticmethod
    def of(module: torch.nn.Module, buffers: list[Flat]) -> Lane:
        kept = module.state_dict(keep_vars=True)
        constants = {name: (b, b._version) for name, b in module.named_buffers() if name not in kept}
        trained = [p for p in module.parameters() if p.requires_grad]
        homes = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        return Lane(module, trained, buffers, [m.training for m in module.modules()], constants, homes)

    def run(self, x: torch.Tensor, start: Sequence[Flat]) -> torch.Tensor:
        """The model's output, with buffers that start from these."""
        for own, first in zip(self.buffers, start, strict=True):
            own.vector.copy_(first.vector)
        output = self.module(x)
        self._settle()
        return output

    def _settle(self) -> None:
        """Put back the buffers that the forward pass has replaced (self.n = self.n + 1), with their new values."""
        for module, name, home in self.homes:
            now = module._buffers.get(name)
            if now is not home:
                if now is None or now.shape != home.shape or now.dtype != home.dtype:
                    raise Invalid(f"the forward pass has put something else in the place of the buffer {name!r}")
                with torch.no_grad():
                    home.copy_(now)
                module._buffers[name] = home

    def train(self, training: bool) -> None:
        """Switch between training and evaluation. Modules that the user put into evaluation mode stay in it."""
        if training != self.training:
            self.training = training
            for module, mode in zip(self.module.modules(), self.modes, strict=True):
                module.training = training and mode

    def check_constants(self) -> None:
        for name, (buffer, version) in self.constants.items():
            if buffer._version != version:
                raise Invalid(
                    f"the buffer {name!r} was written to in the forward pass but is not persistent, so its value would "
                    "depend on who computed which shard: register it with persistent=True"
                )

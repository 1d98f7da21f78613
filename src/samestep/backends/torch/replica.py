"""One whole copy of a PyTorch model on one device: a shard's gradient as one flat vector.

The trained parameters are views of one flat vector, the buffers of another. What computes is a *lane*: a copy of the
module whose parameters are views of the replica's vector and whose buffers are its own, so that several threads can
compute shards of one replica side by side without seeing each other.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from samestep.backends import Deliver, Tensors
from samestep.backends.layout import ALIGN
from samestep.backends.torch.bands import Bands, watched
from samestep.backends.torch.fingerprint import Print
from samestep.backends.torch.flat import Flat, change, strided
from samestep.backends.torch.noise import Noise
from samestep.backends.torch.recorder import Recorder
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.optimizers.rules import Descent

if TYPE_CHECKING:
    from samestep.data.examples import Pass
    from samestep.shards import Span

BAND = 1 << 20  # numbers; bands of this size are sent while others are computed, smaller vectors as a whole


@dataclass
class Lane:
    module: torch.nn.Module
    parameters: list[torch.nn.Parameter]
    buffers: list[Flat]
    modes: list[bool]
    constants: dict[str, tuple[torch.Tensor, int]]  # with the version each had at the start
    homes: list[tuple[torch.nn.Module, str, torch.Tensor]]  # module, name and tensor of every buffer
    training: bool = True
    bands: Bands | None = None  # of the shard that is being computed, if they are wanted one by one

    def settle(self) -> None:
        """Bring home the buffers that the forward pass has put others in the place of (self.n = self.n + 1)."""
        for module, name, home in self.homes:
            now = module._buffers.get(name)
            if now is not home:
                if now is None or now.shape != home.shape or now.dtype != home.dtype:
                    raise Invalid(f"the forward pass has put something else in the place of the buffer {name!r}")
                with torch.no_grad():
                    home.copy_(now)
                module._buffers[name] = home

    def train(self, training: bool) -> None:
        """Switch between training and evaluation, keeping parts that the user has put into evaluation mode as they are."""
        if training != self.training:
            self.training = training
            for module, mode in zip(self.module.modules(), self.modes, strict=True):
                module.training = training and mode


class TorchReplica:
    def __init__(self, model: torch.nn.Module, loss: Any, device: Device, shards: int, capture: bool = True) -> None:
        self.device, self.loss, self.shards = device, loss, shards
        self._model, self._place = model, torch.device(str(device))
        with torch.no_grad():
            trained = [p for p in model.parameters() if p.requires_grad]
            frozen = [p for p in model.parameters() if not p.requires_grad]
            kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
            buffers: dict[torch.dtype, list[torch.Tensor]] = {}
            for buffer in model.buffers():
                if id(buffer) in kept:
                    buffers.setdefault(buffer.dtype, []).append(buffer)
            self.weights = Flat(trained, self._place)
            self.buffers = [Flat(group, self._place) for group in buffers.values()]
            self.parameters = self.weights.vector
            self.gaps = [slice(piece.stop, piece.stop + piece.pad) for piece in self.weights.pieces]
            # Original tensor → ours. What is neither trained nor a kept buffer never changes: one copy serves all lanes.
            self._ours = dict(zip(map(id, trained), self.weights.views, strict=True))
            for group, flat in zip(buffers.values(), self.buffers, strict=True):
                self._ours |= zip(map(id, group), flat.views, strict=True)
            for tensor in [*frozen, *(b for b in model.buffers() if id(b) not in kept)]:
                self._ours[id(tensor)] = tensor.detach().to(self._place, copy=True)
        self._zeros = torch.zeros(max(shards, ALIGN), dtype=self.parameters.dtype, device=self._place)
        self._lanes: dict[int, Lane] = {}
        self._making = threading.Lock()
        self._noise = Noise(self._place)
        self._print = Print([flat.vector for flat in [self.weights, *self.buffers]])
        self._recorder = Recorder(capture)
        self.size = len(self.parameters) + sum(len(flat.vector) for flat in self.buffers) + 2 * shards
        self.bands = [(0, self.size)] if len(self.parameters) < 2 * BAND else self._cut()

    def _cut(self) -> list[tuple[int, int]]:
        """The weights in ranges of at least BAND numbers, last layers first, and at the end what follows the weights."""
        edges = [len(self.parameters)]
        for piece in reversed(self.weights.pieces):
            if edges[-1] - piece.start >= BAND or not piece.start:
                edges.append(piece.start)
        return [*((lo, hi) for hi, lo in itertools.pairwise(edges)), (len(self.parameters), self.size)]

    # One shard

    def gradient(
        self, x: torch.Tensor, y: torch.Tensor, key: int, shard: int, deliver: Deliver | None = None
    ) -> torch.Tensor:
        lane = self._lane(training=True)
        lane.bands = Bands(self, deliver) if deliver else None
        zeros, last = self._zeros, self.shards - 1 - shard
        *vector, loss, right = self._compute(lane, x, y, key, partial(self._laid_out, lane))
        vector += [zeros[:shard], loss, zeros[:last], zeros[:shard], right, zeros[:last]]
        return lane.bands.finish(vector) if lane.bands else torch.cat(vector)

    def whole(
        self, pass_: Pass, span: Span, key: int, optimizer: Descent, slots: dict[str, torch.Tensor], lr: float, t: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A whole step of one shard, tensor by tensor: no vector is put together."""
        x, y = pass_.shard(span, self.device)
        pieces, views, examples = self.weights.pieces, self.weights.views, len(y)

        def finish(gradients: Sequence[torch.Tensor], rest: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            directions = []
            for piece, view, gradient in zip(pieces, views, gradients, strict=True):
                own = {name: piece.view(slot) for name, slot in slots.items()}
                found, new = optimizer.direction(view, strided(gradient), own, t)
                directions.append(found)
                for name, slot in own.items():
                    slot.copy_(new[name])
            for view, found in zip(views, directions, strict=True):  # not before: a gradient may be made of weights
                view.sub_(found, alpha=lr)
            for flat, moved in zip(self.buffers, rest, strict=False):
                flat.move(moved / examples)
            return tuple(rest[-2:])

        scale = torch.full((), 1 / examples, dtype=self.parameters.dtype)  # the gradient of the mean, at once
        return torch.cat(self._compute(self._lane(training=True), x, y, key, finish, scale)), slots

    def in_one_go(self, optimizer: Any) -> bool:
        """Whether `whole` can make the steps of this optimizer. On a GPU a recorded shard is quicker."""
        return self.device.kind == "cpu" and isinstance(optimizer, Descent)

    def _laid_out(
        self, lane: Lane, gradients: Sequence[torch.Tensor], rest: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The pieces of a shard's vector, in order."""
        if lane.bands:
            lane.bands.close()  # the gradients are where they belong
            return tuple(rest)
        vector = []
        for piece, gradient in zip(self.weights.pieces, gradients, strict=True):
            vector += [piece.flatten(gradient), self._zeros[: piece.pad]]
        return (*vector, *rest)

    def _compute(
        self, lane: Lane, x: torch.Tensor, y: torch.Tensor, key: int, finish: Callable[..., tuple[torch.Tensor, ...]],
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """What `finish` makes of the gradients of a shard, times `scale`, and of what follows them: last its loss and hits."""

        def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for own, start in zip(lane.buffers, self.buffers, strict=True):
                own.vector.copy_(start.vector)
            output = lane.module(x)
            lane.settle()
            return sum_of_losses(self.loss, output, y), hits(output, y)

        def backward(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            loss, right = result
            with watched(lane.parameters, lane.bands):
                gradients = torch.autograd.grad(loss, lane.parameters, scale, allow_unused=True, materialize_grads=True)
            dtype = self._zeros.dtype
            with torch.no_grad():
                changes = [change(own.vector, start.vector).to(dtype) * len(y)
                           for own, start in zip(lane.buffers, self.buffers, strict=True)]  # fmt: skip
                return finish(gradients, [*changes, loss.detach().view(1), right.to(dtype).view(1)])

        def all_of_it(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            *vector, loss, right = backward(forward(x, y))
            return torch.cat(vector), loss, right

        if self._place.type == "cuda":
            with torch.cuda.device(self._place):
                recorded = None if lane.bands else self._recorder.find(all_of_it, x, y)
                self._noise.seed(key)
                out = recorded(x, y) if recorded else backward(forward(x, y))
        else:
            out = self._noise.compute(key, lambda: forward(x, y), backward)
        self._check_constants(lane)
        return out

    def evaluate(self, x: torch.Tensor, y: torch.Tensor, key: int) -> torch.Tensor:
        lane = self._lane(training=False)

        def forward() -> torch.Tensor:
            for own, start in zip(lane.buffers, self.buffers, strict=True):
                own.vector.copy_(start.vector)
            output = lane.module(x)
            lane.settle()
            return torch.stack([sum_of_losses(self.loss, output, y).double(), hits(output, y).double()])

        with torch.no_grad():
            if self._place.type == "cuda":
                self._noise.seed(key)
                return forward()
            return self._noise.compute(key, forward, lambda result: result)

    # The step's other half

    def assign(self, parameters: torch.Tensor) -> None:
        self.parameters.copy_(parameters)

    def leaves(self) -> dict[int, torch.nn.Parameter]:
        """The user's trained parameters, by id → parameters that are views of this replica's vector."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return {id(p): torch.nn.Parameter(view) for p, view in zip(trained, self.weights.views, strict=True)}

    def frozen(self) -> dict[int, torch.nn.Parameter]:
        """The user's other parameters, by id → parameters that never have a gradient, which every optimizer skips."""
        return {id(p): torch.nn.Parameter(p.detach(), False) for p in self._model.parameters() if not p.requires_grad}

    def advance(self, total: torch.Tensor, examples: int) -> None:
        start = len(self.parameters)
        for flat in self.buffers:
            flat.move(total[start : start + len(flat.vector)] / examples)
            start += len(flat.vector)

    def fingerprint(self) -> torch.Tensor:
        return self._print()

    def vectors(self) -> list[torch.Tensor]:
        return [flat.vector for flat in [self.weights, *self.buffers] if flat.vector.is_floating_point()]

    def tensors(self, vectors: Sequence[torch.Tensor] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        state, ours = self._model.state_dict(keep_vars=True), self._with(vectors)
        return {
            name: ours[id(tensor)].detach().cpu().numpy()
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor)
        }

    def vectors_from(self, tensors: Tensors) -> list[torch.Tensor]:
        floats = [flat for flat in [self.weights, *self.buffers] if flat.vector.is_floating_point()]
        names = {id(self._ours[id(t)]): name for name, t in self._model.state_dict(keep_vars=True).items()
                 if isinstance(t, torch.Tensor)}  # fmt: skip
        return [self._filled(flat, [tensors[names[id(view)]] for view in flat.views]) for flat in floats]

    def load(self, tensors: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if isinstance(tensor, torch.Tensor):
                    self._ours[id(tensor)].copy_(torch.from_numpy(np.require(tensors[name], requirements=["C", "W"])))

    def named(self, vector: torch.Tensor) -> Tensors:
        return {
            name: piece.view(vector).cpu().numpy() for name, piece in zip(self._names, self.weights.pieces, strict=True)
        }

    def flat(self, named: Tensors) -> torch.Tensor:
        return self._filled(self.weights, [named[name] for name in self._names])

    @property
    def _names(self) -> list[str]:
        return [name for name, p in self._model.named_parameters() if p.requires_grad]

    def _filled(self, flat: Flat, arrays: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
        twin = flat.twin()
        with torch.no_grad():
            for view, array in zip(twin.views, arrays, strict=True):
                view.copy_(torch.from_numpy(np.require(array, requirements=["C", "W"])))
        return twin.vector

    def model(self, vectors: Sequence[torch.Tensor] | None = None) -> torch.nn.Module:
        with torch.no_grad():
            return self._copy({key: ours.clone() for key, ours in self._with(vectors).items()})

    def _with(self, vectors: Sequence[torch.Tensor] | None) -> dict[int, torch.Tensor]:
        """Original tensor → ours, taken from other vectors than this replica's on request."""
        if vectors is None:
            return self._ours
        floats = [flat for flat in [self.weights, *self.buffers] if flat.vector.is_floating_point()]
        other = {
            id(view): piece.view(vector)
            for flat, vector in zip(floats, vectors, strict=True)
            for view, piece in zip(flat.views, flat.pieces, strict=True)
        }
        return {key: other.get(id(ours), ours) for key, ours in self._ours.items()}

    def release(self) -> None:
        """Let go of what only computing needs; weights and buffers stay."""
        self._lanes.clear()
        self._recorder = Recorder(wanted=False)

    # Lanes

    def _lane(self, training: bool) -> Lane:
        thread = threading.get_ident()
        lane = self._lanes.get(thread)
        if lane is None:
            with self._making, torch.no_grad():
                lane = self._lanes[thread] = self._new_lane()
        lane.train(training)
        return lane

    def _new_lane(self) -> Lane:
        buffers = [flat.twin() for flat in self.buffers]
        own = {id(view): twin for flat, new in zip(self.buffers, buffers, strict=True)
               for view, twin in zip(flat.views, new.views, strict=True)}  # fmt: skip
        module = self._copy({key: own.get(id(ours), ours) for key, ours in self._ours.items()})
        if not self._model.training:
            module.train()
        kept = module.state_dict(keep_vars=True)
        constants = {name: (b, b._version) for name, b in module.named_buffers() if name not in kept}
        trained = [p for p in module.parameters() if p.requires_grad]
        homes = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        return Lane(module, trained, buffers, [m.training for m in module.modules()], constants, homes)

    def _copy(self, tensors: dict[int, torch.Tensor]) -> torch.nn.Module:
        """The user's module, copied around the given tensors instead of around its own."""
        memo: dict[int, Any] = {}
        for p in self._model.parameters():
            memo[id(p)] = torch.nn.Parameter(tensors[id(p)], requires_grad=p.requires_grad)
        for b in self._model.buffers():
            memo[id(b)] = tensors[id(b)]
        return copy.deepcopy(self._model, memo)

    def _check_constants(self, lane: Lane) -> None:
        for name, (buffer, version) in lane.constants.items():
            if buffer._version != version:
                raise Invalid(
                    f"the buffer {name!r} was written to in the forward pass but is not persistent, so its value would "
                    "depend on who computed which shard: register it with persistent=True"
                )


def sum_of_losses(loss: Any, output: Any, y: torch.Tensor) -> torch.Tensor:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        return F.cross_entropy(output, y, reduction="sum")
    value = loss(output, y)
    if not isinstance(value, torch.Tensor):
        raise WrongType(f"loss must return a tensor (a loss per example, or their mean), got {type(value).__name__}")
    if value.ndim == 0:
        return value if getattr(loss, "reduction", "mean") == "sum" else value * len(y)
    if len(value) != len(y):
        raise Invalid(
            f"loss must return one value per example ({len(y)}) or their mean, got shape {tuple(value.shape)}"
        )
    return value.flatten(1).mean(1).sum() if value.ndim > 1 else value.sum()


def hits(output: Any, y: torch.Tensor) -> torch.Tensor:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if isinstance(output, torch.Tensor) and output.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
        return (output.detach().argmax(1) == y).sum()
    return torch.zeros((), device=y.device)

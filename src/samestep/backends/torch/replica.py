"""One whole copy of a PyTorch model on one device: a shard's gradient as one flat vector.

The trained parameters are views of one flat vector, the buffers of others, one for each type. Lanes compute (lane.py).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samestep.backends.base import Replica, Task
from samestep.backends.layout import ALIGN, Tensors
from samestep.backends.torch.bands import Bands, bands_of, watched
from samestep.backends.torch.fingerprint import VectorFingerprint
from samestep.backends.torch.flat import Flat
from samestep.backends.torch.lane import Lane
from samestep.backends.torch.noise import TorchNoise, seed_gpu
from samestep.backends.torch.recorder import Recorder, keeps_state
from samestep.devices import Device
from samestep.shards import Span

if TYPE_CHECKING:
    from samestep.backends.base import Backend
    from samestep.data.feed import Batch
    from samestep.training.step import ReplicaSums

Pieces = tuple[torch.Tensor, ...]


class TorchReplica(Replica):
    def __init__(
        self, backend: Backend, model: torch.nn.Module, loss: Any, device: Device, shards: int, capture: bool = True
    ) -> None:
        super().__init__(backend, loss, device, shards)
        self._model, self._native = model, torch.device(str(device))
        with torch.no_grad():
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            kept = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
            known = {id(t): name for name, t in [*reversed(kept.items()), *trained.items()]}  # a tensor's one name
            buffers: dict[torch.dtype, list[torch.Tensor]] = {}
            for buffer in model.buffers():
                if id(buffer) in known:
                    buffers.setdefault(buffer.dtype, []).append(buffer)
            self.weights = Flat.of(list(trained), list(trained.values()), self._native)
            self.buffers = [Flat.of([known[id(b)] for b in group], group, self._native) for group in buffers.values()]
            # Original tensor → ours. What is neither trained nor a kept buffer never changes: one copy serves all lanes.
            originals = [*trained.values(), *(buffer for group in buffers.values() for buffer in group)]
            views = [view for flat in [self.weights, *self.buffers] for view in flat.views]
            self._ours = dict(zip(map(id, originals), views, strict=True))
            constant = [t for t in [*model.parameters(), *model.buffers()] if id(t) not in self._ours]
            self._ours |= {id(t): t.detach().to(self._native, copy=True) for t in constant}
        self._constants = {known[id(t)]: self._ours[id(t)] for t in constant if id(t) in known}
        self._known = known
        self.names = {name: known[id(t)] for name, t in kept.items()}
        self.layouts = [flat.layout for flat in [self.weights, *self.buffers]]
        self._zeros = torch.zeros(max(shards, ALIGN), dtype=self.weights.vector.dtype, device=self._native)
        self._lanes: dict[int, Lane] = {}
        self._making = threading.Lock()
        self._noise = TorchNoise()
        self._fingerprint = VectorFingerprint(self.vectors)
        self._recorder = Recorder(capture and not keeps_state(model))
        self._bands = bands_of(self.weights.layout, self.size)

    @property
    def bands(self) -> Sequence[Span]:
        return self._bands

    @property
    def vectors(self) -> list[torch.Tensor]:
        return [self.weights.vector, *(flat.vector for flat in self.buffers)]

    # One shard

    def gradient(self, x: torch.Tensor, y: torch.Tensor, key: int, shard: int) -> torch.Tensor:
        pieces, numbers = self._compute(self._lane(training=True), x, y, key, shard)
        return torch.cat([*pieces, *numbers])

    def tasks(self, batch: Batch, shards: range, sums: ReplicaSums) -> list[Task]:
        if len(sums.bands) == 1:
            return super().tasks(batch, shards, sums)

        def compute(shard: int) -> None:
            lane, span = self._lane(training=True), (shard, shard + 1)
            vector = torch.empty(self.size, dtype=self.parameters.dtype, device=self._native)
            bands = Bands(self.weights.layout, sums.bands, vector, partial(sums.add, span))
            x, y = batch.shard(shard, self.device)
            pieces, numbers = self._compute(lane, x, y, batch.keys[shard], shard, bands)
            bands.finish([*pieces, *numbers])

        return [partial(compute, shard) for shard in shards]

    def _compute(
        self, lane: Lane, x: torch.Tensor, y: torch.Tensor, key: int, shard: int, bands: Bands | None = None
    ) -> tuple[Pieces, list[torch.Tensor]]:
        """The pieces of a shard's vector: gradients (unless `bands` gets them) and changes; then losses and hits."""

        def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output = lane.run(x, self.buffers)
            return self.backend.sum_of_losses(self.loss, output, y), self.backend.hits(output, y)

        def backward(result: tuple[torch.Tensor, torch.Tensor]) -> Pieces:
            loss, right = result
            with watched(lane.parameters, bands):
                gradients = torch.autograd.grad(loss, lane.parameters, allow_unused=True, materialize_grads=True)
            dtype = self._zeros.dtype
            with torch.no_grad():
                if bands:
                    bands.close()
                vector = [] if bands else self._laid_out(gradients)
                for own, start in zip(lane.buffers, self.buffers, strict=True):
                    vector.append(own.change_from(start.vector).to(dtype) * len(y))
                return (*vector, loss.detach().view(1), right.to(dtype).view(1))

        *pieces, loss, right = self._with_noise(x, y, key, forward, backward, record=bands is None)
        lane.check_constants()
        before, after = self._zeros[:shard], self._zeros[: self.shards - 1 - shard]
        return tuple(pieces), [before, loss, after, before, right, after]

    def _with_noise(
        self, x: torch.Tensor, y: torch.Tensor, key: int, forward: Callable[..., Any], backward: Callable[..., Pieces],
        record: bool,
    ) -> Pieces:  # fmt: skip
        """backward(forward(x, y)), with noise drawn from the key; on a GPU, recorded once and replayed."""

        def all_of_it(x: torch.Tensor, y: torch.Tensor) -> Pieces:
            *vector, loss, right = backward(forward(x, y))
            return torch.cat(vector), loss, right

        if self._native.type != "cuda":
            return self._noise.compute(key, lambda: forward(x, y), backward)
        with torch.cuda.device(self._native):
            seed = partial(seed_gpu, key, self._native)
            recorded = self._recorder.find(all_of_it, x, y, seed) if record else None
            seed()
            return recorded(x, y) if recorded else backward(forward(x, y))

    def _laid_out(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        layout, vector = self.weights.layout, []
        for i, (gradient, gap) in enumerate(zip(gradients, layout.padding, strict=True)):
            vector += [layout.flatten(i, gradient), self._zeros[: gap.stop - gap.start]]
        return vector

    def evaluate(self, x: torch.Tensor, y: torch.Tensor, key: int) -> torch.Tensor:
        lane = self._lane(training=False)

        def forward() -> torch.Tensor:
            output = lane.run(x, self.buffers)
            loss, right = self.backend.sum_of_losses(self.loss, output, y), self.backend.hits(output, y)
            return torch.stack([loss.double(), right.double()])

        with torch.no_grad():
            if self._native.type == "cuda":
                seed_gpu(key, self._native)
                return forward()
            return self._noise.compute(key, forward, lambda result: result)

    # The update

    def assign(self, parameters: torch.Tensor) -> None:
        self.parameters.copy_(parameters)

    def advance(self, total: torch.Tensor, examples: int) -> None:
        start = self.weights.layout.size
        for flat in self.buffers:
            flat.move(total[start : start + flat.layout.size] / examples)
            start += flat.layout.size

    def fingerprint(self) -> torch.Tensor:
        return self._fingerprint()

    def leaves(self) -> dict[int, torch.nn.Parameter]:
        """The user's trained parameters, by id → parameters that are views of this replica's vector."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return {id(p): torch.nn.Parameter(view) for p, view in zip(trained, self.weights.views, strict=True)}

    def frozen(self) -> dict[int, torch.nn.Parameter]:
        """The user's other parameters, by id → parameters that never have a gradient, which every optimizer skips."""
        return {id(p): torch.nn.Parameter(p.detach(), False) for p in self._model.parameters() if not p.requires_grad}

    # By name

    def constants(self) -> Tensors:
        return {name: tensor.cpu().numpy() for name, tensor in self._constants.items()}

    def take_constants(self, tensors: Tensors) -> None:
        for name, tensor in self._constants.items():
            tensor.copy_(torch.from_numpy(np.array(tensors[name])))

    def replace(self, vectors: Sequence[torch.Tensor]) -> None:
        for own, new in zip(self.vectors, vectors, strict=True):
            own.copy_(new)

    def model_of(self, tensors: Tensors) -> torch.nn.Module:
        with torch.no_grad():
            named = {name: torch.from_numpy(np.array(array)).to(self._native) for name, array in tensors.items()}
            return self._copy({
                key: named[self._known[key]] if self._known.get(key) in named else ours.clone()
                for key, ours in self._ours.items()
            })  # fmt: skip

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
        return Lane.of(module, buffers)

    def _copy(self, tensors: dict[int, torch.Tensor]) -> torch.nn.Module:
        """A copy of the user's module with the given tensors instead of its own."""
        memo: dict[int, Any] = {}
        for p in self._model.parameters():
            memo[id(p)] = torch.nn.Parameter(tensors[id(p)], requires_grad=p.requires_grad)
        for b in self._model.buffers():
            memo[id(b)] = tensors[id(b)]
        return copy.deepcopy(self._model, memo)

    def release(self) -> None:
        self._lanes.clear()
        self._recorder = Recorder(wanted=False)

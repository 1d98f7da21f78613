"""One whole copy of a PyTorch model on one device: a shard's gradient as one flat vector.

The trained parameters are views of one flat vector, the buffers of others, one for each type. Lanes compute (lane.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.backends.base import Replica, Task
from samestep.backends.lanes import Lanes
from samestep.backends.layout import ALIGN, Tensors, bands_of
from samestep.backends.losses import leaves
from samestep.backends.names import kept_among
from samestep.backends.torch.bands import Bands, watched
from samestep.backends.torch.fingerprint import VectorFingerprint
from samestep.backends.torch.flat import Flat, from_host, on_host
from samestep.backends.torch.lane import Lane
from samestep.backends.torch.noise import TorchNoise, seed_gpu
from samestep.backends.torch.recorder import Recorder, keeps_state
from samestep.backends.torch.traced import Traced
from samestep.devices import Device
from samestep.shards import Span
from samestep.trees import Tree, length

if TYPE_CHECKING:
    from samestep.backends.base import Backend
    from samestep.data.feed import Batch
    from samestep.training.step import ReplicaSums

Pieces = tuple[Tensor, ...]


class TorchReplica(Replica):
    def __init__(
        self, backend: Backend, model: torch.nn.Module, measure: Any, device: Device, shards: int, capture: bool
    ) -> None:
        super().__init__(backend, measure, device, shards)
        # A loss that is a module may have parameters, which are trained as the model's are.
        losses = {"loss": self.measure.function} if isinstance(self.measure.function, torch.nn.Module) else {}
        self._model = whole = torch.nn.ModuleDict({"model": model} | losses)
        self._native = torch.device(str(device))
        self._making, last = backend.making, backend.making.memory_format == "channels_last"
        compiled = self._making.compile or any(hasattr(m, "_orig_mod") for m in model.modules())
        self.side_by_side = device.kind == "cpu" and not compiled
        with torch.no_grad():
            named = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
            own = [(name.removeprefix("model."), tensor) for name, tensor in named]
            trained = {name.removeprefix("model."): p for name, p in whole.named_parameters() if p.requires_grad}
            declared = {name: t for name, t in own if not t.requires_grad and self.is_state(name)}
            kept = kept_among(own, model.state_dict(keep_vars=True)) | declared
            known = {id(t): name for name, t in [*reversed(kept.items()), *trained.items()]}  # a tensor's one name
            state: dict[torch.dtype, list[Tensor]] = {}
            for tensor in {id(t): t for t in [*model.buffers(), *declared.values()]}.values():
                if id(tensor) in known:
                    state.setdefault(tensor.dtype, []).append(tensor)
            self.weights = Flat.of(list(trained), list(trained.values()), self._native, last)
            self.state = [Flat.of([known[id(t)] for t in group], group, self._native, last) for group in state.values()]
            # Original tensor → ours. What is neither trained nor state never changes: one copy serves all lanes.
            originals = [*trained.values(), *(tensor for group in state.values() for tensor in group)]
            views = [view for flat in [self.weights, *self.state] for view in flat.views]
            self._ours = dict(zip(map(id, originals), views, strict=True))
            constant = [t for t in [*whole.parameters(), *whole.buffers()] if id(t) not in self._ours]
            self._ours |= {id(t): t.detach().to(self._native, copy=True) for t in constant}
        self._constants = {known[id(t)]: self._ours[id(t)] for t in constant if id(t) in known}
        self.names = {name: known[id(t)] for name, t in [*kept.items(), *trained.items()]}
        self._known, self.layouts = known, [flat.layout for flat in [self.weights, *self.state]]
        self._zeros = torch.zeros(max(shards, ALIGN), dtype=self.weights.vector.dtype, device=self._native)
        self._one = torch.ones_like(self._zeros[:1])
        self.lane = Lanes(self._new_lane)
        self._noise, self._fingerprint = TorchNoise(compiled), VectorFingerprint(self.vectors, self._making.compile)
        self._recorder, self.keeps_state = Recorder(capture and not keeps_state(model)), keeps_state(model)
        self._traced = Traced(self, capture and self.side_by_side and not self._making.compile)
        self._bands = bands_of(self.weights.layout, self.size)

    @property
    def bands(self) -> Sequence[Span]:
        return self._bands

    @property
    def vectors(self) -> list[Tensor]:
        return [self.weights.vector, *(flat.vector for flat in self.state)]

    def copies(self) -> list[Tensor]:
        return [vector.clone() for vector in self.vectors]

    # One shard

    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Tensor:
        recurrent = not training and any(isinstance(module, torch.nn.RNNBase) for module in self._model.modules())
        with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():  # its RNNs need training mode
            pieces, numbers = self._compute(self.lane(training=training), x, y, key, shard)
        return torch.cat([*pieces, *numbers])

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        theirs = {id(p): repr(name.removeprefix("model.")) for name, p in self._model.named_parameters()}
        lane = self.lane(training=True)
        loss, *_ = lane.run(x, y, self.state, self.backend)
        used = [leaf for leaf in leaves(loss.grad_fn) if isinstance(leaf, torch.nn.Parameter)]
        ours = set(map(id, lane.parameters))
        return [theirs.get(id(p), f"of shape {tuple(p.shape)}") for p in used if id(p) not in ours], []

    def replayed(self, batch: Batch, shard: int) -> Tensor:
        return self._traced.one(*batch.shard(shard, self.device), batch.keys[shard], shard)

    def tasks(self, batch: Batch, shards: range, sums: ReplicaSums) -> list[Task]:
        def together() -> None:
            for span, part in self._traced.sums(batch, shards).items():
                sums.add(span, part)

        if len(sums.bands) == 1:
            return [together] if shards else []

        def compute(shard: int) -> None:
            lane, span = self.lane(training=True), (shard, shard + 1)
            vector = torch.empty(self.size, dtype=self.parameters.dtype, device=self._native)
            bands = Bands(self.weights.layout, sums.bands, vector, partial(sums.add, span))
            x, y = batch.shard(shard, self.device)
            pieces, numbers = self._compute(lane, x, y, batch.keys[shard], shard, bands)
            bands.finish([*pieces, *numbers])

        return [partial(compute, shard) for shard in shards]

    def drawn(self, lane: Lane, x: Tree, y: Tree, shard: int, before: Tensor | None = None) -> Tensor:
        """The vector of a shard, with noise from wherever the GPU's generator is; added in place to one `before` it."""
        pieces, numbers = self._compute(lane, x, y, None, shard)
        vector = [*pieces, *numbers]
        if before is None:
            return torch.cat(vector)
        torch._foreach_add_(before.split([len(piece) for piece in vector]), vector)
        return before

    def _compute(
        self, lane: Lane, x: Tree, y: Tree, key: int | None, shard: int, bands: Bands | None = None
    ) -> tuple[Pieces, list[Tensor]]:
        """The pieces of a shard's vector: gradients (unless `bands` gets them) and changes; then losses, hits and more.

        Without a key, the GPU's generator is left as it is.
        """
        more = self.measure.more

        def forward(x: Tree, y: Tree) -> list[Tensor]:
            return lane.run(x, y, self.state, self.backend)

        def backward(result: list[Tensor]) -> Pieces:
            loss, *others = result
            with watched(lane.parameters, bands):
                given = self._one.view_as(loss) if loss.dtype == self._one.dtype else None  # else a kernel makes one
                gradients = torch.autograd.grad(loss, lane.parameters, given, allow_unused=True, materialize_grads=True)
            dtype = self._zeros.dtype
            with torch.no_grad():
                if bands:
                    bands.close()
                vector = [] if bands else self._laid_out(gradients)
                for own, start in zip(lane.buffers, self.state, strict=True):
                    vector.append(own.change_from(start.vector).to(dtype) * length(y))
                numbers = [loss.detach().view(1), *(number.to(dtype).view(1) for number in others)]
                return (*vector, *numbers)

        given = self._with_noise(x, y, key, forward, backward)
        pieces, (loss, right, *others) = given[: -2 - more], given[-2 - more :]
        before, after = self._zeros[:shard], self._zeros[: self.shards - 1 - shard]
        return pieces, [before, loss, after, before, right, after, *others]

    def _with_noise(
        self, x: Tree, y: Tree, key: int | None, forward: Callable[..., Any], backward: Callable[..., Pieces]
    ) -> Pieces:
        """backward(forward(x, y)), with noise drawn from the key."""
        if self._native.type != "cuda" and key is not None:
            return self._noise.compute(key, lambda: forward(x, y), backward)
        with torch.cuda.device(self._native) if self._native.type == "cuda" else nullcontext():
            if key is not None:
                seed_gpu(key, self._native)
            return backward(forward(x, y))

    def _laid_out(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        layout, vector = self.weights.layout, []
        for i, (gradient, gap) in enumerate(zip(gradients, layout.padding, strict=True)):
            vector += [layout.flatten(i, gradient), self._zeros[: gap.stop - gap.start]]
        return vector

    def evaluate(self, x: Tree, y: Tree, key: int) -> Tensor:
        lane = self.lane(training=False)

        def forward(x: Tree, y: Tree) -> Tensor:
            return torch.stack([number.double() for number in lane.run(x, y, self.state, self.backend)])

        with torch.no_grad():
            if self._native.type != "cuda":
                return self._noise.compute(key, lambda: forward(x, y), lambda result: result)
            with torch.cuda.device(self._native):
                seed = partial(seed_gpu, key, self._native)
                recorded = self._recorder.find(forward, x, y, seed)
                seed()
                return recorded(x, y).clone() if recorded else forward(x, y)

    # The update

    def assign(self, parameters: Tensor) -> None:
        if parameters.data_ptr() != self.parameters.data_ptr():  # else they are there already
            self.parameters.copy_(parameters)

    def fingerprint(self) -> Tensor:
        return self._fingerprint()

    def digest(self, vector: Tensor) -> Tensor:
        return VectorFingerprint([vector])()

    def leaves(self) -> dict[int, torch.nn.Parameter]:
        """The user's trained parameters, by id → parameters that are views of this replica's vector."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return {id(p): torch.nn.Parameter(view) for p, view in zip(trained, self.weights.views, strict=True)}

    def frozen(self) -> dict[int, torch.nn.Parameter]:
        """The user's other parameters, by id → parameters that never have a gradient, which every optimizer skips."""
        return {id(p): torch.nn.Parameter(p.detach(), False) for p in self._model.parameters() if not p.requires_grad}

    # By name

    def constants(self) -> Tensors:
        return {name: on_host(tensor) for name, tensor in self._constants.items()}

    def take_constants(self, tensors: Tensors) -> None:
        for name, tensor in self._constants.items():
            tensor.copy_(from_host(tensors[name], tensor))

    def replace(self, vectors: Sequence[Tensor]) -> None:
        for own, new in zip(self.vectors, vectors, strict=True):
            own.copy_(new)

    def model_of(self, tensors: Tensors) -> torch.nn.Module:
        with torch.no_grad():
            return self._copy({
                key: from_host(tensors[self._known[key]], ours) if self._known.get(key) in tensors else ours.clone()
                for key, ours in self._ours.items()
            })["model"]  # fmt: skip

    # Lanes

    def lanes(self, count: int) -> list[Lane]:
        """Lanes for shards that a GPU computes at once. Without state one serves them all."""
        return [self._new_lane() for _ in range(count)] if self.state else [self._new_lane()] * count

    @torch.no_grad()
    def _new_lane(self) -> Lane:
        buffers = [flat.twin() for flat in self.state]
        own = {id(view): twin for flat, new in zip(self.state, buffers, strict=True)
               for view, twin in zip(flat.views, new.views, strict=True)}  # fmt: skip
        module = self._copy({key: own.get(id(ours), ours) for key, ours in self._ours.items()})
        for part in module.values():
            if not part.training:
                part.train()
        named = [*module.named_parameters(), *module.named_buffers()]
        tensors = {name.removeprefix("model."): tensor for name, tensor in named}
        return Lane(module, self.measure, buffers, tensors, self._making)

    def _copy(self, tensors: dict[int, Tensor]) -> torch.nn.ModuleDict:
        """A copy of the user's modules with the given tensors instead of their own."""
        memo: dict[int, Any] = {}
        for p in self._model.parameters():
            memo[id(p)] = torch.nn.Parameter(tensors[id(p)], requires_grad=p.requires_grad)
        for b in self._model.buffers():
            memo[id(b)] = tensors[id(b)]
        return copy.deepcopy(self._model, memo)

    def release(self) -> None:
        self.lane.clear()
        self._recorder, self._traced = Recorder(wanted=False), Traced(self, wanted=False)

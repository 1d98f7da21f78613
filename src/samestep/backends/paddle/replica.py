"""One whole copy of a Paddle model: a shard's gradient as one flat vector.

The trained parameters are views of one flat vector, the state of others, one for each type. Lanes compute (lane.py).

State is what `state_dict` holds and training does not: buffers, and the statistics of norms, which in Paddle are parameters
that are not trained. Whatever else a layer keeps in its buffers begins every shard as it was at the start of the run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle.base import unique_name
from paddle.base.framework import EagerParamBase
from paddle.nn.clip import merge_selected_rows
from paddle.nn.layer.rnn import RNNBase

from samestep.backends.base import Replica
from samestep.backends.calling import spread
from samestep.backends.lanes import Lanes
from samestep.backends.layout import Numbers, Tensors
from samestep.backends.losses import not_trained
from samestep.backends.paddle.flat import CPU, Flat, Tensor, Vector, dtype_of, numpy_view
from samestep.backends.paddle.lane import Home, Lane
from samestep.backends.paddle.noise import PaddleNoise
from samestep.devices import Device
from samestep.errors import Written, WrongType
from samestep.fingerprint import Fingerprint
from samestep.trees import Tree, length

if TYPE_CHECKING:
    from samestep.backends.base import Backend

# Of batch norm and of spectral norm: parameters that the forward pass writes to.
STATISTICS = {"_mean", "_variance", "weight_u", "weight_v"}


class PaddleReplica(Replica):
    def __init__(self, backend: Backend, model: paddle.nn.Layer, measure: Any, device: Device, shards: int) -> None:
        super().__init__(backend, measure, device, shards)
        loss = self.measure.function
        for name, p in loss.named_parameters() if isinstance(loss, paddle.nn.Layer) else ():
            if not p.stop_gradient:
                raise not_trained(f"{name!r} of the loss")
        # The layers are copied, around the user's tensors: calling the model may put others in their places.
        self._model = model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors_of(model).values()})
        kept = {name: t for name, t in model.state_dict().items() if isinstance(t, paddle.Tensor)}
        known = {id(t): name for name, t in reversed(kept.items())}  # a tensor's one name
        self.names = {name: known[id(t)] for name, t in kept.items()}
        trained, constants = dict[str, Tensor](), dict[str, Tensor]()
        state: dict[str, dict[str, Tensor]] = {}  # by type
        for path, tensor in tensors_of(model).items():
            parameter, is_kept = isinstance(tensor, EagerParamBase), id(tensor) in known
            name = known.setdefault(id(tensor), path)
            if parameter and not tensor.stop_gradient:
                trained[name] = tensor
            elif is_kept and (not parameter or path.rpartition(".")[2] in STATISTICS or self.is_state(name)):
                state.setdefault(dtype_of(tensor), {})[name] = tensor
            elif "float8" in dtype_of(tensor):
                raise WrongType(f"{name} is of type {dtype_of(tensor)}, which NumPy does not know: convert it")
            elif is_kept or tensor._is_initialized():
                constants[name] = tensor
            # else it is memory for a kernel to use, as in LSTM: every copy gets its own
        self._known, self._trained = known, trained
        self.weights = Flat.of(list(trained), list(trained.values()))
        self.state = [Flat.of(list(group), list(group.values())) for group in state.values()]
        self._constants = {name: t.detach()._copy_to(CPU, True) for name, t in constants.items()}  # for all lanes
        self._digests = self._digested()  # empty once they have been compared
        self.layouts = [flat.layout for flat in [self.weights, *self.state]]
        zeros = paddle.to_tensor(np.zeros(shards, self.layouts[0].dtype), place=CPU)
        # Around the one number of a shard: those of the shards before, and those of the shards after.
        self._around = [([zeros[:i]] * (i > 0), [zeros[i + 1 :]] * (i + 1 < shards)) for i in range(shards)]
        self._fingerprint = Fingerprint([numpy_view(vector) for vector in self.vectors])  # they never move in memory
        self.lane, self.side_by_side = Lanes(self._new_lane), True
        self.slopes = not any(isinstance(layer, RNNBase) for layer in model.sublayers(include_self=True))
        self._noise = {training: PaddleNoise() for training in (True, False)}

    @property
    def vectors(self) -> list[Vector]:
        return [self.weights.vector, *(flat.vector for flat in self.state)]

    # One shard

    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Vector:
        lane, dtype, (before, after) = self.lane(training), self.parameters.dtype, self._around[shard]

        def backward(numbers: list[Tensor]) -> Vector:
            numbers[0].backward()
            with paddle.no_grad():  # a gradient can be differentiated again: it would hold on to what is made of it
                gradients = self.weights.pieces([dense(p.grad, p) for p in lane.parameters])
                changes = [change.astype(dtype) * length(y) for change in lane.changes(self.state)]
                loss, right, *more = (number.detach().astype(dtype).reshape([1]) for number in numbers)
                vector = paddle.concat([*gradients, *changes, *before, loss, *after, *before, right, *after, *more])
            for p in lane.parameters:
                p.grad = None  # clear_gradient would free a weight, too, if that is the gradient of another
            self._check_constants(lane)
            return vector

        return self._noise[training].compute(key, lambda: self._measured(lane, x, y), backward)

    def _measured(self, lane: Lane, x: Tree, y: Tree) -> list[Tensor]:
        return self.backend.measured(self.measure, lane.run(spread(x, self.measure.style), self.state), y)

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        lane, theirs = self.lane(training=True), self._trained
        loss, *_ = self._measured(lane, x, y)
        found = paddle.grad(loss, list(theirs.values()), allow_unused=True)
        return [repr(name) for name, gradient in zip(theirs, found, strict=True) if gradient is not None], []

    def evaluate(self, x: Tree, y: Tree, key: int) -> Vector:
        lane = self.lane(training=False)

        def forward() -> Vector:
            return paddle.stack([number.astype("float64") for number in self._measured(lane, x, y)])

        with paddle.no_grad():
            return self._noise[False].compute(key, forward, lambda result: result)

    def _check_constants(self, lane: Lane) -> None:
        before, self._digests = self._digests, {}
        names = lane.written()
        if before:  # once by content as well: some kernels write and do not count it as a version
            names += [name for name, digest in self._digested().items() if digest != before[name]]
        if names:
            raise Written(repr(names[0]), f"use Trainer(state={names[0]!r}), or register_buffer(name, tensor)")

    def _digested(self) -> dict[str, bytes]:
        return {name: hashlib.blake2b(array.tobytes()).digest() for name, array in self.constants().items()}

    # The step's other half

    def assign(self, parameters: Vector) -> None:
        if parameters is not self.parameters:  # an update in place
            paddle.assign(parameters, self.parameters)

    def fingerprint(self) -> Numbers:
        return self._fingerprint()

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Each trained parameter of the user, and one like it that is a view of this replica's vector."""
        return [(p, parameter_like(p, self.weights.views[name], p.name)) for name, p in self._trained.items()]

    def own_settings(self, decays: bool) -> dict[str, str]:
        told = {name: (p.optimize_attr["learning_rate"], p.regularizer) for name, p in self._trained.items()}
        return {name: f"learning_rate={lr}, regularizer={r}" for name, (lr, r) in told.items() if (lr, r) != (1, None)}

    # By name

    def constants(self) -> Tensors:
        """bfloat16, which NumPy does not know, as float32: that holds these numbers exactly."""
        halves = {name: t.astype("float32") for name, t in self._constants.items() if dtype_of(t) == "bfloat16"}
        return {name: tensor.numpy() for name, tensor in (self._constants | halves).items()}

    def take_constants(self, tensors: Tensors) -> None:
        for name in self._constants.keys() & tensors.keys():
            paddle.assign(paddle.to_tensor(tensors[name], self._constants[name].dtype, CPU), self._constants[name])
        self._digests = self._digested()
        self.release()  # lanes know the versions that the constants had

    def replace(self, vectors: Sequence[Vector]) -> None:
        for own, new in zip(self.vectors, vectors, strict=True):
            paddle.assign(new, own)

    def model_of(self, tensors: Tensors) -> paddle.nn.Layer:
        types = {name: tensor.dtype for name, tensor in self._constants.items()}
        given = (self.constants() | tensors).items()
        return self._copy({name: paddle.to_tensor(array, types.get(name), CPU) for name, array in given})

    # Lanes

    def _new_lane(self) -> Lane:
        state = [flat.twin() for flat in self.state]
        tensors = self._constants | self.weights.views
        for flat in state:
            tensors |= flat.views
        layer = self._copy(tensors)
        if not self._model.training:
            layer.train()
        layers, theirs = layer.sublayers(include_self=True), self._model.sublayers(include_self=True)
        homes: dict[str, Home] = {}
        for ours, original in zip(layers, theirs, strict=True):
            for held, there in ((ours._parameters, original._parameters), (ours._buffers, original._buffers)):
                homes |= {self._known[id(t)]: (held, name, held[name]) for name, t in there.items() if t is not None}
        return Lane.of(layer, homes, self.weights, state, list(self._constants))

    def _copy(self, tensors: dict[str, Tensor]) -> paddle.nn.Layer:
        """The user's layer, copied around the given tensors instead of around its own."""
        memo: dict[int, Any] = {}
        for tensor in tensors_of(self._model).values():
            name = self._known[id(tensor)]
            new = tensors[name] if name in tensors else paddle.zeros([0], tensor.dtype)
            new.persistable = tensor.persistable
            memo[id(tensor)] = parameter_like(tensor, new) if isinstance(tensor, EagerParamBase) else new
        return copy.deepcopy(self._model, memo)

    def release(self) -> None:
        self.lane.clear()


def tensors_of(model: paddle.nn.Layer) -> dict[str, Tensor]:
    """All parameters and buffers by name, each once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def parameter_like(p: Tensor, tensor: Tensor, name: str | None = None) -> Tensor:
    """A parameter with the attributes of p, in the memory of another tensor."""
    about = {**copy.deepcopy(vars(p)), "name": name or unique_name.generate(p.name), "trainable": not p.stop_gradient}
    new = EagerParamBase(list(p.shape), p.dtype, **about)
    new.get_tensor()._share_data_with(tensor.get_tensor())
    return new


def dense(gradient: Tensor | None, p: Tensor) -> Tensor:
    """The gradient of p as a tensor of its shape: zeros if there is none; an embedding's may be of some rows only."""
    if gradient is None:
        return paddle.zeros_like(p)
    if gradient.is_selected_rows():
        merged = merge_selected_rows(gradient)  # each row once, so that scattering them has no order
        rows = paddle.to_tensor(np.asarray(merged.rows(), np.int64), place=p.place)
        return paddle.scatter(paddle.zeros_like(p), rows, merged._get_tensor_from_selected_rows())
    return gradient

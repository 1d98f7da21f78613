"""One whole copy of a Paddle model on one device: a shard's gradient as one flat vector.

The trained parameters are views of one flat vector, the state of others. What computes is a *lane*: a copy of the layer whose
parameters are views of the replica's vector and whose state is its own, so that several threads can compute shards of one
replica side by side without seeing each other. Paddle lets go of Python's lock while it computes, so threads pay off.

State is what `state_dict` holds and training does not: buffers, and the statistics of norms, which in Paddle are parameters
that are not trained. Whatever else a layer keeps in its buffers begins every shard as it was at the start of the run.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.base import unique_name
from paddle.base.framework import EagerParamBase
from paddle.nn.clip import merge_selected_rows

from samestep.backends import Deliver, Tensors
from samestep.backends.paddle.fingerprint import Print, in_memory
from samestep.backends.paddle.lane import Flat, Lane, Place, name_of
from samestep.backends.paddle.noise import Noise
from samestep.data.examples import Pass
from samestep.devices import Device
from samestep.errors import Invalid, WrongType
from samestep.optimizers.rules import SGD, Descent
from samestep.optimizers.updating import update_in_place
from samestep.shards import Span

Tensor = Any
Vector = Any
Numbers = np.ndarray[Any, Any]
INTEGERS = {"int8", "int16", "int32", "int64", "uint8"}
# Of batch norm and of spectral norm: parameters that the forward pass writes to.
STATISTICS = {"_mean", "_variance", "weight_u", "weight_v"}


class PaddleReplica:
    def __init__(self, model: paddle.nn.Layer, loss: Any, device: Device, shards: int, place: Any) -> None:
        self.device, self.loss, self.shards, self._place = device, loss, shards, place
        # The layers themselves are copied, around the user's tensors: calling the model may put others in their places.
        self._model = model = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors_of(model).values()})
        self._ids = {name: id(t) for name, t in model.state_dict().items() if isinstance(t, paddle.Tensor)}
        self._named = {key: name for name, key in reversed(self._ids.items())}
        trained, constant = list[Tensor](), list[Tensor]()
        state: dict[str, list[Tensor]] = {}
        for name, tensor in tensors_of(model).items():
            parameter, kept = isinstance(tensor, EagerParamBase), id(tensor) in self._named
            if parameter and not tensor.stop_gradient:
                trained.append(tensor)
            elif kept and (not parameter or name.rpartition(".")[2] in STATISTICS):
                state.setdefault(name_of(tensor), []).append(tensor)
            elif kept or tensor._is_initialized():
                constant.append(tensor)
            # else it is memory for a kernel to use, as in LSTM: every copy gets its own
        self.weights = Flat(trained, place)
        self.state = [Flat(group, place) for group in state.values()]
        self._constants = {id(t): t.detach()._copy_to(place, True) for t in constant}  # one copy serves all lanes
        self.parameters = self.weights.vector
        ends = [*(lo for lo, _ in self.weights.spans[1:]), self.weights.size]
        self.gaps = [slice(hi, end) for (_, hi), end in zip(self.weights.spans, ends, strict=True)]
        zeros = paddle.to_tensor(np.zeros(shards, self.weights.dtype), place=place)
        # around the one number of a shard: (those of the shards before, those of the shards after)
        self._slots = [([zeros[:i]] * (i > 0), [zeros[i + 1 :]] * (i + 1 < shards)) for i in range(shards)]
        self._print = Print([flat.vector for flat in [self.weights, *self.state]])
        self._lanes: dict[int, Lane] = {}
        self._making = threading.Lock()
        self._rate: tuple[float | None, Tensor] = None, None  # that of the last whole step, as a number and as a tensor
        self._noise = {training: Noise(place) for training in (True, False)}
        self._digests = self._digested()  # None when they have been compared
        self.size = len(self.parameters) + sum(flat.size for flat in self.state) + 2 * shards
        self.bands = [(0, self.size)]  # all at once

    # One shard

    def gradient(self, x: Tensor, y: Tensor, key: int, shard: int, deliver: Deliver | None = None) -> Vector:
        (before, after), dtype = self._slots[shard], self.parameters.dtype

        def finish(gradients: list[Tensor], changes: list[Vector], loss: Tensor, output: Any) -> Vector:
            vector, right = [*self.weights.join(gradients), *changes], hits(output, y, dtype)
            loss, right = loss.astype(dtype).reshape([1]), right.reshape([1])
            return paddle.concat([*vector, *before, loss, *after, *before, right, *after])

        return self._compute(x, y, key, finish)

    def whole(self, pass_: Pass, span: Span, key: int, optimizer: Descent, slots: Any, lr: float, t: int) -> Any:
        """A whole step of one shard, tensor by tensor: no vector is put together."""
        x, y = pass_.shard(span, self.device)
        examples, parameters = span[1] - span[0], self._lane(training=True).parameters
        plain = optimizer == SGD()
        # the gradient of the mean at once; by a power of two it can be divided at any time with the same bits
        at_once = plain or examples & (examples - 1) == 0
        if lr != self._rate[0]:
            self._rate = lr, paddle.to_tensor(lr, self.parameters.dtype, self._place)
        weights = in_memory(self.parameters)
        first, last = weights.ctypes.data, weights.ctypes.data + weights.nbytes
        held = {name: in_memory(slot) for name, slot in slots.items()}

        def finish(gradients: list[Tensor], changes: list[Vector], loss: Tensor, output: Any) -> Any:
            # a layer's own backward pass may give a weight itself
            gradients = [g.clone() if first <= g.data_ptr() < last else g for g in gradients]
            for p, gradient, (lo, hi) in zip(parameters, gradients, self.weights.spans, strict=True):
                if plain:
                    paddle._C_ops.sgd_(p, self._rate[1], gradient, None, False)  # in one pass, with bits of its own
                    continue
                own, array = {name: slot[lo:hi] for name, slot in held.items()}, in_memory(gradient).reshape(-1)
                update_in_place(optimizer, weights[lo:hi], own, array, 1 if at_once else examples, lr, t)
            right = np.count_nonzero(in_memory(output).argmax(1) == in_memory(y)) if has_scores(output, y) else 0
            return np.array([loss.item(), right], weights.dtype)

        return self._compute(x, y, key, finish, 1 / examples if at_once else None), slots

    def in_one_go(self, optimizer: Any) -> bool:
        """Whether `whole` can make the steps of this optimizer."""
        return self.device.kind == "cpu" and isinstance(optimizer, Descent) and not self.state

    def _compute(
        self, x: Tensor, y: Tensor, key: int, finish: Callable[..., Vector], scale: float | None = None
    ) -> Vector:
        """What `finish` makes of a shard's gradients, times `scale`, count x change of every buffer, loss and output."""
        lane, dtype = self._lane(training=True), self.parameters.dtype

        def forward() -> tuple[Tensor, Any]:
            lane.begin(self.state)
            output = lane.layer(x)
            return sum_of_losses(self.loss, output, y), output

        def backward(result: tuple[Tensor, Any]) -> Vector:
            loss, output = result
            loss.backward(None if scale is None else paddle.full_like(loss, scale))
            with paddle.no_grad():  # a gradient can be differentiated again: it would hold on to what is made of it
                changes = [lane.change(i, flat).astype(dtype) * len(y) for i, flat in enumerate(self.state)]
                made = finish([dense(p.grad, p) for p in lane.parameters], changes, loss.detach(), output)
            for p in lane.parameters:
                p.clear_gradient(False)  # frees the memory of the gradients themselves
            self._check_constants(lane)
            return made

        return self._noise[True].compute(key, forward, backward)

    def evaluate(self, x: Tensor, y: Tensor, key: int) -> Vector:
        lane = self._lane(training=False)

        def forward() -> Vector:
            lane.begin(self.state)
            output = lane.layer(x)
            return paddle.stack([sum_of_losses(self.loss, output, y).astype("float64"), hits(output, y, "float64")])

        with paddle.no_grad():
            return self._noise[False].compute(key, forward, lambda result: result)

    def assign(self, parameters: Vector) -> None:
        if parameters is not self.parameters:  # an update in place
            paddle.assign(parameters, self.parameters)

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """Each trained parameter of the user, and one like it that is a view of this replica's vector."""
        theirs = {id(p): p for p in self._model.parameters()}
        views = zip(self.weights.ids, self.weights.cut(self.parameters), strict=True)
        return [(theirs[key], parameter_like(theirs[key], view, theirs[key].name)) for key, view in views]

    def name_of(self, tensor: Tensor) -> str:
        """The name of a tensor of the user's model."""
        return self._named[id(tensor)]

    def advance(self, total: Vector, examples: int) -> None:
        start = self.weights.size
        for flat in self.state:
            delta = total[start : start + flat.size] / examples
            start += flat.size
            if flat.real:
                paddle.assign(flat.vector + delta.astype(flat.vector.dtype), flat.vector)
            else:  # a counter changes alike in every shard, so the mean is the change
                counted = flat.vector.astype("int64") + delta.round().astype("int64")
                paddle.assign(counted.astype(flat.vector.dtype), flat.vector)

    def fingerprint(self) -> Vector:
        return self._print()

    # By name

    def _flats(self) -> list[Flat]:
        """What `vectors` gives the vectors of."""
        return [flat for flat in [self.weights, *self.state] if flat.real]

    def vectors(self) -> list[Vector]:
        return [flat.vector for flat in self._flats()]

    def tensors(self, vectors: Sequence[Vector] | None = None) -> dict[str, Numbers]:
        arrays = self._arrays(vectors)
        return {name: arrays[key] for name, key in self._ids.items()}

    def _arrays(self, vectors: Sequence[Vector] | None) -> dict[int, Numbers]:
        """The id of each tensor of the user's → what it is now, on the host."""
        found = {key: tensor.numpy() for key, tensor in self._constants.items()}
        given = zip(self._flats(), self.vectors() if vectors is None else vectors, strict=True)
        for flat, vector in [*given, *((flat, flat.vector) for flat in self.state if not flat.real)]:
            found |= zip(flat.ids, flat.cut(vector.numpy()), strict=True)
        return found

    def _filled(self, flat: Flat, tensors: Tensors) -> Vector:
        return flat.filled([tensors[self._named[key]] for key in flat.ids])

    def vectors_from(self, tensors: Tensors) -> list[Vector]:
        return [self._filled(flat, tensors) for flat in self._flats()]

    def load(self, tensors: Tensors) -> None:
        for flat in [self.weights, *self.state]:
            paddle.assign(self._filled(flat, tensors), flat.vector)
        for key, constant in self._constants.items():
            if key in self._named:
                paddle.assign(paddle.to_tensor(tensors[self._named[key]], place=self._place), constant)
        self._lanes.clear()
        self._digests = self._digested()

    def named(self, vector: Vector) -> Tensors:
        arrays = self.weights.cut(vector.numpy())
        return {self._named[key]: array for key, array in zip(self.weights.ids, arrays, strict=True)}

    def flat(self, named: Tensors) -> Vector:
        return self._filled(self.weights, named)

    def model(self, vectors: Sequence[Vector] | None = None) -> paddle.nn.Layer:
        now = self._arrays(vectors).items()
        return self._copy({key: paddle.to_tensor(array, place=self._place) for key, array in now})

    def release(self) -> None:
        self._lanes.clear()

    def _lane(self, training: bool) -> Lane:
        thread = threading.get_ident()
        lane = self._lanes.get(thread)
        if lane is None:
            with self._making:
                lane = self._lanes[thread] = self._new_lane()
        lane.train(training)
        return lane

    def _new_lane(self) -> Lane:
        own = [flat.vector.clone() for flat in self.state]
        tensors = self._constants | dict(zip(self.weights.ids, self.weights.cut(self.weights.vector), strict=True))
        for flat, vector in zip(self.state, own, strict=True):
            tensors |= zip(flat.ids, flat.cut(vector), strict=True)
        layer = self._copy(tensors)
        if not self._model.training:
            layer.train()
        layers, theirs = layer.sublayers(include_self=True), self._model.sublayers(include_self=True)
        found: dict[int, Place] = {}  # the user's tensor → where ours is
        for ours, original in zip(layers, theirs, strict=True):
            for held, there in ((ours._parameters, original._parameters), (ours._buffers, original._buffers)):
                found |= {id(t): (held, name, held[name]) for name, t in there.items() if t is not None}
        named = {id(t): name for name, t in tensors_of(self._model).items()}
        return Lane(
            layer,
            [found[key][2] for key in self.weights.ids],
            [(vector, [found[key] for key in flat.ids]) for flat, vector in zip(self.state, own, strict=True)],
            [one.training for one in layers],
            [(one._buffers, dict(one._buffers)) for one in layers],
            {named[key]: (found[key][2], found[key][2].inplace_version) for key in self._constants},
        )

    def _copy(self, tensors: dict[int, Tensor]) -> paddle.nn.Layer:
        """The user's layer, copied around the given tensors instead of around its own."""
        memo: dict[int, Any] = {}
        for tensor in tensors_of(self._model).values():
            new = tensors[id(tensor)] if id(tensor) in tensors else paddle.zeros([0], tensor.dtype)
            new.persistable = tensor.persistable
            memo[id(tensor)] = parameter_like(tensor, new) if isinstance(tensor, EagerParamBase) else new
        return copy.deepcopy(self._model, memo)

    def _digested(self) -> list[bytes] | None:
        return [hashlib.blake2b(t.numpy().tobytes()).digest() for t in self._constants.values()]

    def _check_constants(self, lane: Lane) -> None:
        before, self._digests = self._digests, None
        names = [name for name, (tensor, version) in lane.constants.items() if tensor.inplace_version != version]
        if before:  # once by content as well: some kernels write and do not count it as a version
            now = zip(lane.constants, before, self._digested() or [], strict=True)
            names += [name for name, old, new in now if old != new]
        if names:
            raise Invalid(
                f"{names[0]!r} was written to in the forward pass, but is not a buffer that state_dict holds, so its value "
                "would depend on who computed which shard: use register_buffer(name, tensor)"
            )


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


def sum_of_losses(loss: Any, output: Any, y: Tensor) -> Tensor:
    """The sum over examples of the loss, whether `loss` gives one value per example or their mean."""
    if loss is None:
        return F.cross_entropy(output, y, reduction="sum")
    value = loss(output, y)
    if not isinstance(value, paddle.Tensor):
        raise WrongType(f"loss must return a tensor (a loss per example, or their mean), got {type(value).__name__}")
    if value.ndim == 0:
        return value if getattr(loss, "reduction", "mean") == "sum" else value * len(y)
    if len(value) != (n := len(y)):
        raise Invalid(f"loss must return one value per example ({n}) or their mean, got shape {tuple(value.shape)}")
    return value.flatten(1).mean(1).sum() if value.ndim > 1 else value.sum()


def has_scores(output: Any, y: Tensor) -> bool:
    """Whether the output is one score per class, for labels."""
    return isinstance(output, paddle.Tensor) and output.ndim == 2 and y.ndim == 1 and name_of(y) in INTEGERS


def hits(output: Any, y: Tensor, dtype: Any) -> Tensor:
    """How many examples have their highest score at their label; 0 where the output is not one score per class."""
    if has_scores(output, y):
        return (output.detach().argmax(1) == y).sum(dtype=dtype)
    return paddle.zeros([], dtype)

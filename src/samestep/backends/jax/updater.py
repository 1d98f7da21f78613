"""An optax transformation as the optimizer of a run."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import jax
import numpy as np

from samestep.backends.by_id import ById
from samestep.backends.jax.flat import FlatTree
from samestep.backends.jax.program import GPU
from samestep.backends.jax.replica import JaxReplica
from samestep.backends.layout import Tensors, on_host
from samestep.backends.updaters import Clip, NativeUpdater
from samestep.errors import WrongType, told


class JaxUpdater(NativeUpdater):
    """An optax transformation at work on one replica, on the model's own tree. The rate comes to it in one of three ways:

    optax.adam, partial(optax.sgd, momentum=0.9)        a function of the rate: it is called with schedule(t)
    optax.inject_hyperparams(optax.adam)(0.001)         its learning_rate is set to schedule(t); schedule=None keeps it
    optax.adam(0.001)                                   its rate is inside it: used as it is, and a schedule is an error
    """

    def __init__(self, given: Any, replica: JaxReplica, clip: Clip) -> None:
        super().__init__(replica, clip)
        ready, got = hasattr(given, "init") and hasattr(given, "update"), type(given).__name__
        try:
            made = given if ready else given(0.1)
        except TypeError as error:  # it does not take a rate, or is no function
            made, got = None, f"{got}, which raised {told(error)}"
        if not (hasattr(made, "init") and hasattr(made, "update")):
            kinds = "an optax transformation, such as optax.adam(1e-3), or a function that makes one from a rate"
            raise WrongType(f"optimizer must be {kinds}, got {got}")
        tree = replica.trees[0]
        self.state = jax.jit(lambda vector: made.init(tree.unflatten([vector])))(replica.parameters)
        seen, moved = (getattr(self.state, name, {}) for name in ("hyperparams", "hyperparams_states"))
        own = (
            "hyperparams" if "learning_rate" in seen and "learning_rate" not in moved else "fixed"
        )  # moved: a schedule
        self._way = own if ready else "rate"
        self._first_rate = float(seen["learning_rate"]) if self._way == "hyperparams" else None
        how = "pass the function that makes the optimizer (optimizer=optax.adam), or use optax.inject_hyperparams"
        self.fixed, self._update = how * (self._way == "fixed"), update_of(ById.wrap(given), self._way, tree)

    def __repr__(self) -> str:
        """What it computes, hashed: an optax transformation does not say what it was made from."""
        one = self.replica.parameters.dtype.type(1)
        update = jax.make_jaxpr(jax.jit(self._update.__wrapped__))
        program = update(self.replica.parameters, self.replica.parameters, self.state, one)
        return f"optax({hashlib.sha256(str(program).encode()).hexdigest()[:16]})"

    def rate(self) -> float | None:
        """The rate that it came with; 1 stands for a rate that is inside it and cannot be seen."""
        return 1.0 if self.fixed else self._first_rate

    def apply(self, gradient: Any, lr: float, t: int) -> None:
        replica = self.replica
        rate = replica.parameters.dtype.type(lr)
        parameters, self.state = self._update(replica.parameters, gradient, self.state, rate)
        replica.assign(parameters)

    def tensors(self) -> Tensors:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.state)
        return {jax.tree_util.keystr(path): on_host(np.asarray(leaf)) for path, leaf in leaves}

    def load(self, tensors: Tensors) -> None:
        paths, structure = jax.tree_util.tree_flatten_with_path(self.state)
        leaves = [np.asarray(tensors[jax.tree_util.keystr(path)], leaf.dtype) for path, leaf in paths]
        self.state = jax.device_put(jax.tree.unflatten(structure, leaves), self.replica.parameters.sharding)


@functools.lru_cache(maxsize=16)
def update_of(given: Any, way: str, tree: FlatTree) -> Any:
    given = given.function if isinstance(given, ById) else given

    @functools.partial(jax.jit, compiler_options=GPU)
    def update(parameters: Any, gradient: Any, state: Any, lr: Any) -> tuple[Any, Any]:
        params, gradients = tree.unflatten([parameters]), tree.unflatten([gradient])
        if way == "hyperparams":
            state = state._replace(hyperparams={**state.hyperparams, "learning_rate": lr})
        transformation = given(lr) if way == "rate" else given
        updates, state = transformation.update(gradients, state, params)
        moved = jax.tree.map(lambda p, u: p + u.astype(p.dtype), params, updates)
        return tree.flatten(moved)[0], state

    return update

"""One whole copy of a TensorFlow model. The vectors are NumPy arrays; what computes with them is the program (program.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from samestep.backends.base import Backend, Replica
from samestep.backends.layout import Numbers, Tensors, aligned_copy, on_host
from samestep.backends.tensorflow.adapters import adapter_of
from samestep.backends.tensorflow.program import Program
from samestep.devices import Device
from samestep.fingerprint import Fingerprint, hashed
from samestep.trees import Tree, length


class TensorflowReplica(Replica):
    def __init__(self, backend: Backend, program: Program, device: Device) -> None:
        super().__init__(backend, program.measure, device, program.shards)
        self.program, self.layouts = program, program.layouts
        start = program.adapter.values()
        self.names = {name: name for name in start}
        self._vectors = [self.to_vector(layout.filled(start)) for layout in self.layouts]
        self._fingerprint = Fingerprint(self._vectors)

    @property
    def vectors(self) -> list[Numbers]:
        return self._vectors

    def gradient(self, x: Tree, y: Tree, key: int, shard: int, training: bool = True) -> Numbers:
        return self.program("gradient" if training else "slope", self._vectors, x, y, key, shard)

    def inside(self, x: Tree, y: Tree) -> tuple[list[str], list[str]]:
        def traced() -> str:  # without names, which TensorFlow numbers on and on, and in no order
            graph = self.program.traced("gradient", x, y, length(y)).graph.as_graph_def()
            nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
            return "".join(sorted(node.op + str(node.attr["value"]) * (node.op == "Const") for node in nodes))

        return [], [hashed(text=traced()) for _ in range(2)]

    def evaluate(self, x: Tree, y: Tree, key: int) -> Numbers:
        return self.program("evaluate", self._vectors, x, y, key, 0)

    def assign(self, parameters: Numbers) -> None:
        if parameters is not self.parameters:  # an update in place is already there
            self.parameters[:] = parameters

    def advance(self, total: Numbers, examples: int) -> None:
        start = self.layouts[0].size
        for layout, vector in zip(self.layouts[1:], self._vectors[1:], strict=True):
            mean, wide = total[start : start + layout.size] / examples, layout.wide(self.layouts[0].dtype)
            start += layout.size
            # A counter changes alike in every shard, so the mean is the change.
            vector[:] = vector.astype(wide, copy=False) + (mean if layout.real else np.round(mean)).astype(wide)

    def own_settings(self, decays: bool) -> dict[str, str]:
        return {name: f"the constraint {type(one).__name__}" for name, one in self.program.adapter.constraints.items()}

    def fingerprint(self) -> Numbers:
        return self._fingerprint()

    def replace(self, vectors: Sequence[Numbers]) -> None:
        for own, new in zip(self._vectors, vectors, strict=True):
            own[:] = new

    def to_vector(self, numbers: Numbers) -> Numbers:
        return aligned_copy(numbers)  # so TensorFlow reads it where it is, without another copy

    def tensors(self, vectors: Sequence[Numbers] | None = None) -> Tensors:
        return {name: on_host(array) for name, array in super().tensors(vectors).items()}

    def model_of(self, tensors: Tensors) -> Any:
        twin = self.program.adapter.copied(self.program.example)
        for name, variable in zip(self.program.adapter.variables, adapter_of(twin).variables.values(), strict=True):
            variable.assign(tf.cast(tensors[name], variable.dtype))
        return twin

    def release(self) -> None:
        self.program.release()

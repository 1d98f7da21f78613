"""The leaves of a JAX tree in flat vectors, one vector for each type of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from samestep.backends.layout import Layout, Tensors
from samestep.errors import WrongType

Vector = Any


@dataclass(frozen=True)
class FlatTree:
    """The structure of a tree, and where its leaves lie in flat vectors. It can be hashed, so programs are found by it."""

    structure: Any  # of JAX
    names: tuple[str, ...]  # of the leaves, in the order of the tree
    vector_of: tuple[int, ...]  # for each leaf, which of the vectors it lies in
    layouts: tuple[Layout, ...]  # of the vectors

    @staticmethod
    def of(tree: Any) -> FlatTree:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = tuple(".".join(map(step_name, without_value(path))) for path, _ in leaves)
        arrays = [jnp.asarray(leaf) for _, leaf in leaves]
        groups: dict[Any, list[int]] = {}  # type of number → the leaves of that type
        for i, array in enumerate(arrays):
            if not (is_real(array.dtype) or jnp.issubdtype(array.dtype, jnp.integer)):
                raise WrongType(f"{names[i]} is of type {array.dtype}: weights and state must be real or whole numbers")
            groups.setdefault(array.dtype, []).append(i)
        layouts = [
            Layout(tuple(names[i] for i in group), tuple(arrays[i].shape for i in group), str(dtype), is_real(dtype))
            for dtype, group in groups.items()
        ]
        types = list(groups)
        return FlatTree(structure, names, tuple(types.index(array.dtype) for array in arrays), tuple(layouts))

    @property
    def size(self) -> int:
        """Of all vectors together."""
        return sum(layout.size for layout in self.layouts)

    def flatten(self, tree: Any) -> tuple[Vector, ...]:
        leaves = [jnp.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)]
        return tuple(
            jnp.concatenate([leaf for leaf, number in zip(leaves, self.vector_of, strict=True) if number == i])
            for i in range(len(self.layouts))
        )

    def unflatten(self, vectors: Sequence[Vector]) -> Any:
        cut = [iter(layout.cut(vector)) for layout, vector in zip(self.layouts, vectors, strict=True)]
        return jax.tree.unflatten(self.structure, [next(cut[number]) for number in self.vector_of])

    def filled(self, tensors: Tensors) -> Any:
        """The tree of these tensors."""
        return jax.tree.unflatten(self.structure, [tensors[name] for name in self.names])


def is_real(dtype: Any) -> bool:
    """Also for bfloat16, which is no floating type to NumPy."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def without_value(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """In nnx every leaf is the attribute `value` of a variable: names leave it out."""
    return path[:-1] if path and getattr(path[-1], "name", None) == "value" else path


def step_name(step: Any) -> str:
    return str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step))))

"""The leaves of a JAX tree in flat vectors, one vector for each type of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from samestep.backends.layout import INSTEAD, Layout, Tensors, by_type, path_name
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
        names = tuple(path_name(path) for path, _ in leaves)
        arrays = [jnp.asarray(leaf) for _, leaf in leaves]
        for name, array in zip(names, arrays, strict=True):
            if not (is_real(array.dtype) or getattr(array.dtype, "kind", "key") in "iub"):
                raise WrongType(f"{name} is of type {array.dtype}: {INSTEAD}")
        types = [(str(array.dtype), is_real(array.dtype)) for array in arrays]
        return FlatTree(structure, names, *by_type(names, [array.shape for array in arrays], types))

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
        where = zip(self.names, self.vector_of, strict=True)
        leaves = [np.asarray(tensors[name], self.layouts[i].dtype) for name, i in where]
        return jax.tree.unflatten(self.structure, leaves)


def is_real(dtype: Any) -> bool:
    """Also for bfloat16, which is no floating type to NumPy."""
    return bool(jnp.issubdtype(dtype, jnp.floating))

"""How the shards of a run are computed: settings of the Trainer that a backend follows, and that are part of the recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from samestep.errors import Invalid

PRECISIONS = ("float32", "tf32", "bfloat16")
FORMATS = ("auto", "contiguous", "channels_last")


@dataclass(frozen=True)
class Making:
    """The defaults are what every framework does."""

    precision: str = "float32"  # in which products are computed; weights and sums are as the model has them
    memory_format: str = "auto"  # which a backend replaces by one of the others, if it has them
    compile: bool = False
    streams: int | None = None  # shards at once on a GPU; it decides no bit

    def recipe(self) -> dict[str, Any]:
        """What decides bits, as far as it is not the default."""
        last = {"memory_format": self.memory_format} if self.memory_format == "channels_last" else {}
        return last | ({"compile": True} if self.compile else {})

    def only_of_pytorch(self, framework: str) -> None:
        """Refuse what a framework does not have, with what to do there instead."""
        instead = {
            "jax": {"precision": "use `with jax.default_matmul_precision(...)` around the fit, which the recipe knows",
                    "compile": "JAX compiles anyway"},
            "tensorflow": {"precision": "make the model with a dtype policy of Keras", "compile": "graphs are compiled anyway"},
        }.get(framework, {})  # fmt: skip
        for f in fields(self):
            if getattr(self, f.name) not in (f.default, "contiguous"):
                how = instead.get(f.name, "leave it out")
                raise Invalid(
                    f"{f.name}={getattr(self, f.name)!r} is for PyTorch, and the model is of {framework}: {how}"
                )

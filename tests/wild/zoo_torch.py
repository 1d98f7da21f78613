"""What the three families in PyTorch need: torchvision, also where its wheel was built for another PyTorch.

The operators of its own that it then lacks are defined here, without code: no model below calls them.
"""

import importlib
import re
from typing import Any

import torch

KEPT: list[Any] = []  # an operator is there for as long as its library is


def torchvision() -> Any:
    while True:
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
            KEPT[-1].define(f"{missing[1]}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def seeded(make: Any) -> Any:
    """What makes the model, with weights from seed 0."""

    def made() -> Any:
        torch.manual_seed(0)
        return make()

    return made

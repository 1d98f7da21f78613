"""A training loop as a user of PyTorch writes it: data on the device, batches in a shuffled order, torch.optim.SGD."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], None]:
    """A function that makes so many steps of SGD on a copy of a torch.nn.Module, and waits for the last."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = copy.deepcopy(model).to(device)
    examples, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def go(steps: int) -> None:
        order = torch.randperm(len(x), device=device)
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            optimizer.zero_grad()
            F.cross_entropy(model(examples[index]), labels[index]).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return go

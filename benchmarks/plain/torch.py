"""A training loop as a user of PyTorch writes it: data on the device, batches in a shuffled order, torch.optim.SGD, and
the loss and accuracy of the epoch, as the chapters do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def loop(model: Any, x: np.ndarray, y: np.ndarray, batch: int, rate: float) -> Callable[[int], tuple[float, float]]:
    """A function that makes so many steps of SGD on a copy of a torch.nn.Module, and gives mean loss and accuracy."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = copy.deepcopy(model).to(device)
    examples, labels = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def go(steps: int) -> tuple[float, float]:
        order = torch.randperm(len(x), device=device)
        total, hits = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for i in range(steps):
            start = i * batch % len(x)
            index = order[start : start + batch]
            optimizer.zero_grad()
            y_hat, wanted = model(examples[index]), labels[index]
            loss = F.cross_entropy(y_hat, wanted)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total += loss * batch
                hits += (y_hat.argmax(1) == wanted).sum()
        return float(total) / steps / batch, float(hits) / steps / batch

    return go

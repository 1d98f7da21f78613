"""How close `samestep lab curvature` comes to the Hessian: against power iteration over PyTorch's double backward.

    python benchmarks/curvature.py

Both take the first 2,048 of 2,560 images of Fashion-MNIST, in the order of a fit, and the weights that the model starts with.
Double backward does not see the kinks of a ReLU or of a max-pool; differences of gradients do.
"""

from __future__ import annotations

import numpy as np
import torch
from machine import keep, table
from torch import nn

import samestep as ss
from samestep import draws
from samestep.models import torch as models
from samestep.tuning.probing import curvature, prepared

EXAMPLES, USED, PRODUCTS = 2560, 2048, 100


def small(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), activation(), nn.Linear(64, 10))


def exact(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    weights = list(model.parameters())
    flat = lambda tensors: torch.cat([tensor.reshape(-1) for tensor in tensors])  # noqa: E731
    gradient = flat(torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weights, create_graph=True))
    torch.manual_seed(1)
    v, value = torch.randn_like(gradient), 0.0
    for _ in range(PRODUCTS):
        v = v / v.norm()
        product = flat(torch.autograd.grad(gradient @ v, weights, retain_graph=True)).detach()
        value, v = float(v @ product), product
    return value


def main() -> None:
    data, chosen = ss.fashion_mnist().head(EXAMPLES), draws.order(0, 0, EXAMPLES)[:USED]
    x, y = torch.tensor(np.asarray(data.train.x)[chosen]), torch.tensor(np.asarray(data.train.y)[chosen])
    tried = {"784-64-10, tanh": small(nn.Tanh), "784-64-10, ReLU": small(nn.ReLU), "mlp": models.mlp(),
             "lenet_modern": models.lenet_modern()}  # fmt: skip
    rows = []
    for name, model in tried.items():
        with prepared(ss.Trainer(1, 256, progress=False, devices="cpu"), model, data) as fit:
            found = curvature(fit)
        rows.append({"model": name, "lab": found.eigenvalue, "settled": found.converged, "exact": exact(model, x, y)})
    keep("curvature", rows)
    shown = [
        [row["model"], f"{row['lab']:.3g}", f"{row['exact']:.3g}", f"{row['lab'] / row['exact']:.2f}"] for row in rows
    ]
    print(table(["", "samestep lab curvature", "double backward", "ratio"], shown))


if __name__ == "__main__":
    main()

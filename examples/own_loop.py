"""A loop of one's own in PyTorch: another kind of clothes joins as soon as the ones before it are told apart.

python examples/own_loop.py                           --small: seconds on a CPU
torchrun --nproc-per-node 2 examples/own_loop.py      every process prints the same

Which batch comes next depends on the loss of the step before, which a Trainer cannot do. It trains on one device, saves in
the middle (half.safetensors), and goes on from there on one device and on three: the same weights, to the last bit.
"""

import sys

import numpy as np

import samestep as ss
from samestep.models import torch as models

SMALL = "--small" in sys.argv
HALF, END = (30, 50) if SMALL else (400, 800)
data = ss.fashion_mnist()
x, y = data.train.x, data.train.y


def train(group, kinds, end):
    """Go on to step `end`; returns how many kinds of clothes there are by then."""
    while group.steps < end:
        rng = np.random.default_rng([0, group.steps])  # from the step alone: there is no generator to save
        chosen = rng.choice(np.flatnonzero(y < kinds), 128)
        made = group.step(x[chosen], y[chosen], lr=0.05)
        if made.loss < 0.5 and kinds < 10:
            kinds += 1
            print(f"step {made.step}: loss {made.loss:.3f}, now {kinds} kinds")
    return kinds


if __name__ == "__main__":
    settings = {"optimizer": ss.sgd(momentum=0.9), "gradient_clip_val": 1.0}
    group = ss.Group(models.mlp(dropout=0.2), devices=1, **settings)
    kinds = train(group, 2, HALF)
    group.save("half.safetensors")  # weights, optimizer, number of steps; `kinds` is ours to keep
    prints = {}
    for devices in (1, 3):
        other = ss.Group.load("half.safetensors", models.mlp(dropout=0.2), devices=devices, **settings)
        seen = train(other, kinds, END)
        prints[devices] = other.fingerprint
        accuracy = other.evaluate(data.test.x, data.test.y)["accuracy"]
        print(f"{devices} devices: {seen} kinds, test accuracy {accuracy:.4f}, fingerprint {prints[devices]}")
    assert prints[1] == prints[3]

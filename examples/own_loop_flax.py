"""A loop of one's own in JAX, with a flax module: own_loop.py in another framework, with optax's Adam.

python examples/own_loop_flax.py                     --small: seconds on a CPU
mpiexec -n 2 python examples/own_loop_flax.py        every process prints the same; needs pip install '.[mpi]'

Which batch comes next depends on the loss of the step before, which a Trainer cannot do. It trains on one device, saves in
the middle (half.safetensors), and goes on from there on one device and on three: the same weights, to the last bit.
"""

import sys

import numpy as np
import optax
from flax import nnx

import samestep as ss

SMALL = "--small" in sys.argv
HALF, END = (30, 50) if SMALL else (400, 800)
data = ss.fashion_mnist()
x, y = data.train.x, data.train.y


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(784, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.inner(x.reshape(len(x), -1)))))


def train(group, kinds, end):
    """Go on to step `end`; returns how many kinds of clothes there are by then."""
    while group.steps < end:
        rng = np.random.default_rng([0, group.steps])  # from the step alone: there is no generator to save
        chosen = rng.choice(np.flatnonzero(y < kinds), 128)
        made = group.step(x[chosen], y[chosen], lr=0.001)
        if made.loss < 0.5 and kinds < 10:
            kinds += 1
            print(f"step {made.step}: loss {made.loss:.3f}, now {kinds} kinds")
    return kinds


if __name__ == "__main__":
    model = Net(nnx.Rngs(0))
    group = ss.Group(model, devices=1, optimizer=optax.adam)  # with a rate for each step
    kinds = train(group, 2, HALF)
    group.save("half.safetensors")  # weights, optimizer, number of steps; `kinds` is ours to keep
    prints = {}
    for devices in (1, 3):
        other = ss.Group.load("half.safetensors", model, devices=devices, optimizer=optax.adam)
        seen = train(other, kinds, END)
        prints[devices] = other.fingerprint
        accuracy = other.evaluate(data.test.x, data.test.y)["accuracy"]
        print(f"{devices} devices: {seen} kinds, test accuracy {accuracy:.4f}, fingerprint {prints[devices]}")
    assert prints[1] == prints[3]

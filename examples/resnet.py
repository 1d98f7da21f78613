"""ResNet-18 on Fashion-MNIST, each picture moved by up to two pixels and mirrored at random.

python examples/resnet.py                          --small: seconds on a CPU
torchrun --nproc-per-node 2 examples/resnet.py     the same fingerprint, as with samestep train examples/resnet.py --devices 4

It shows augmentation by a transform, whose random numbers follow from (seed, epoch, example) alone, worker processes that do
this work ahead, batch norm, a metric, and a checkpoint that is the best by this metric: samestep export --best runs/resnet.
"""

import sys

import numpy as np

import samestep as ss
from samestep.models import torch as models


def augment(x, y, rng):
    """One picture of shape (1, 28, 28), and its label."""
    top, left = rng.integers(0, 5, 2)
    x = np.pad(x, ((0, 0), (2, 2), (2, 2)))[:, top : top + 28, left : left + 28]
    return (x[:, :, ::-1] if rng.random() < 0.5 else x), y


def top3(scores, y):
    """How many have their label among the three highest scores, of how many."""
    return (scores.topk(3).indices == y[:, None]).sum(), len(y)


if __name__ == "__main__":
    small, data = "--small" in sys.argv, ss.fashion_mnist()
    n, epochs, batch, width, rate = (480, 2, 40, 8, 0.05) if small else (60_000, 15, 256, 64, 0.1)
    trainer = ss.Trainer(
        epochs,
        batch,
        optimizer=ss.sgd(momentum=0.9, weight_decay=5e-4),
        schedule=ss.cosine(rate, epochs - 1).warmup(1).in_epochs(smooth=True),
        metrics={"top3": top3},
        monitor="test_top3",
        mode="max",
        run_dir=None if small else "runs/resnet",
    )
    data = data.head(n)
    data = ss.Data(data.train, data.test, transform=augment, readers=None if small else 4)
    run = trainer.fit(models.resnet18(width=width), data)
    if run.rank == 0:
        for row in run.history:
            told = f"test accuracy {row['test_accuracy']:.4f}, among the top three {row['test_top3']:.4f}"
            print(f"epoch {row['epoch']}: loss {row['train_loss']:.4f}, {told}")
        print(f"fingerprint {run.fingerprint}")

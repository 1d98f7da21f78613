"""Does a warm-up help? ResNet-18 at a large rate, on a part of Fashion-MNIST.

samestep lab sweep examples/warmup.py --of warmup --values 0,1,3 --lr 0.3 --seeds 3 --png warmup.png
samestep lab sweep examples/warmup.py --of warmup --values 0,1 --epochs 2 -- --small        seconds on a CPU

The book's chapter on schedules says that a large rate at the start makes deep nets diverge, and that a warm-up limits how far
their parameters drift. `samestep lab rates` and `samestep lab curvature` take this script, too.
"""

import sys

import samestep as ss
from samestep.models import torch as models

if __name__ == "__main__":
    n, width = (320, 8) if "--small" in sys.argv else (2560, 64)
    trainer = ss.Trainer(8, 128, optimizer=ss.sgd(momentum=0.9), schedule=0.1)
    model = models.resnet18(width=width, seed=trainer.seed)  # --seed decides the weights, too
    run = trainer.fit(model, ss.fashion_mnist().head(n))
    print(run)

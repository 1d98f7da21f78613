"""A small training job with all that a resume could lose: dropout, batch norm, momentum, a schedule, uneven batches.

    samestep train tests/chaos/job.py --run-dir FOLDER [-- --width 512]

60 steps of some 10 ms on one core: long enough to be killed in the middle, and with checkpoints of 5 MB, of which one is being
written most of the time.
"""

from __future__ import annotations

import argparse

import numpy as np

import samestep as ss


def main() -> None:
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=768)
    width = parser.parse_args().width
    random = np.random.default_rng(0)
    x, y = random.standard_normal((94, 32), np.float32), random.integers(0, 10, 94)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10),
    )  # fmt: skip
    trainer = ss.Trainer(
        max_epochs=15, batch_size=24, optimizer=ss.sgd(momentum=0.9), schedule=ss.cosine(0.05, 60, end=0.001).warmup(5)
    )
    trainer.fit(model, ss.Data(train=(x, y), test=(x[:20], y[:20])))


if __name__ == "__main__":
    main()

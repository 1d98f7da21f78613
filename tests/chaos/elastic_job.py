"""A training job for hosts that come and go: what torchrun starts in test_hosts.py.

    torchrun ... elastic_job.py RUN_DIR TIMEOUT [STEP:FILE ...]

STEP:FILE is a gate: no example of that step or of a later one is read before the file is there, so that a test decides what
happens at which step. Waiting changes no number. A process that is asked to stop waits at no gate, as its step must end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import samestep as ss
from samestep import draws

STEPS, BATCH, FEATURES, CLASSES, SEED = 60, 24, 12, 3, 4


class Gated:
    """Examples of which some are not to be had before a file is there."""

    def __init__(self, gates: dict[int, Path]) -> None:
        random = np.random.default_rng(0)
        n = STEPS * BATCH - 7  # the last batch is smaller
        self.x = random.standard_normal((n, FEATURES)).astype(np.float32)
        self.y = random.integers(0, CLASSES, n)
        self.step_of = np.argsort(draws.order(SEED, 0, n)) // BATCH  # by example: there is one epoch
        self.gates = gates
        if gates:
            self.asked, send = os.pipe()  # readable once a signal has come
            os.set_blocking(send, False)
            signal.set_wakeup_fd(send)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        steps = set(self.step_of[indices])
        now = steps.pop() if len(steps) == 1 < len(indices) else -1  # else a look at shapes, or the recipe's sample
        for step, file in self.gates.items():
            while step <= now and not file.exists() and not select.select([self.asked], [], [], 0)[0]:
                time.sleep(0.01)
        return self.x[indices], self.y[indices]


def fit(run_dir: str | None, timeout: float = 10.0, gates: dict[int, Path] | None = None) -> ss.Run:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )
    trainer = ss.Trainer(
        max_epochs=1, batch_size=BATCH, devices="cpu", optimizer=ss.adam(), schedule=ss.cosine(0.05, STEPS), seed=SEED,
        run_dir=run_dir, checkpoint_every=1, timeout=timeout, progress=False,
    )  # fmt: skip
    return trainer.fit(model, ss.Data(train=Gated(gates or {})))


if __name__ == "__main__":
    pairs = [text.partition(":") for text in sys.argv[3:]]
    run = fit(sys.argv[1], float(sys.argv[2]), {int(step): Path(file) for step, _, file in pairs})
    print(f"rank {run.rank} ends with {run.fingerprint}", flush=True)

"""A model and data of one's own, trained on one and on three devices: the same weights.

python examples/your_own_model.py
samestep train examples/your_own_model.py --epochs 2
"""

import numpy as np
import torch
from torch import nn

import samestep as ss

random = np.random.default_rng(0)
x = random.standard_normal((2000, 20)).astype(np.float32)
y = (x[:, :5].sum(1) > 0).astype(np.int64) + 2 * (x[:, 5:10].sum(1) > 0)
data = ss.Data(train=(x[:1500], y[:1500]), test=(x[1500:], y[1500:]))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))

if __name__ == "__main__":
    for devices in (1, 3):
        trainer = ss.Trainer(
            max_epochs=5, batch_size=100, devices=devices, schedule=0.1, optimizer=ss.sgd(momentum=0.9)
        )
        run = trainer.fit(model, data)
        accuracy = run.history[-1]["test_accuracy"]
        print(f"{len(run.devices)} devices: test accuracy {accuracy:.3f}, fingerprint {run.fingerprint[:16]}")

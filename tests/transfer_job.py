"""Weights to and from another framework, in a process of its own: `transfer_job.py FRAMEWORK FOLDER`.

For every model it reads data.npz and torch.safetensors from FOLDER/MODEL; trains a few steps and exports the weights to
FRAMEWORK.safetensors there; and prints what it makes of both files.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

import samestep as ss
from samestep import models
from samestep.runs.run import export

# With the side of the images: batch norm needs more than one value to be left of them.
MODELS = {"lenet_modern": 28, "resnet18": 40}


def made(framework: str, name: str):
    """A small model of a framework."""
    arguments = {"width": 4, "seed": 1} if name == "resnet18" else {"seed": 1}
    return getattr(importlib.import_module(f"samestep.models.{framework}"), name)(**arguments)


def trainer(**settings) -> ss.Trainer:
    """Shards of one size, as JAX compiles for each."""
    return ss.Trainer(max_epochs=2, batch_size=24, schedule=0.05, devices="cpu", progress=False, **settings)


def train(framework: str, name: str, data: ss.Data, folder: Path) -> Path:
    """Weights after a few steps, as a plain safetensors file."""
    trainer(run_dir=folder / f"{framework}-run").fit(made(framework, name), data)
    export(folder / f"{framework}-run", folder / f"{framework}.safetensors")
    return folder / f"{framework}.safetensors"


def evaluate(framework: str, name: str, data: ss.Data, file: Path) -> dict[str, float]:
    """Loss and accuracy of the weights in a file."""
    return trainer().evaluate(models.load(made(framework, name), file), data)


def read(folder: Path) -> ss.Data:
    with np.load(folder / "data.npz") as arrays:
        return ss.Data(train=(arrays["x"], arrays["y"]))


if __name__ == "__main__":
    framework, said = sys.argv[1], {}
    for name in MODELS:
        folder = Path(sys.argv[2], name)
        data = read(folder)
        theirs = evaluate(framework, name, data, folder / "torch.safetensors")
        own = evaluate(framework, name, data, train(framework, name, data, folder))
        said[name] = {"torch": theirs, framework: own}
    print(json.dumps(said))

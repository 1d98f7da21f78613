"""One run, five frameworks: the same starting weights, the same order of examples, the same rates; compared step by step.

    python examples/five_frameworks.py [--mxnet PYTHON]

LeNet of the schedule chapter takes 100 steps on Fashion-MNIST, in float32 and once more in float64, in a process of its own
for each framework. Frameworks that are not installed are named and left out; MXNet needs an old NumPy, and so a Python of its
own. It prints a table, draws five_frameworks.png, and ends with status 1 if a difference is larger than it may be.

The difference of two models is ‖a - b‖ / ‖b‖ over all weights and biases as one vector, b being PyTorch's.

  float64   1e-10. It stays at rounding, 3e-17: all five take the same step.
  float32   1e-4. Rounding alone is 1e-8 or so, but it decides which side of a ReLU a unit is on that is almost at zero (or
            which of two almost equal ones a max-pool takes); then its gradient is there in one framework and not in the other.
            These are the jumps in the figure, which float64 does not have. Each costs about (rate / batch size) x the gradient
            of one example, and later steps carry it on. So the rate is small here, 0.02, and the loss falls from 2.3 to 1.8.
            At 0.05 it was 3e-4 after 100 steps; at 0.1, with batches of 64, up to 4e-3. A single bias, which starts at zero,
            may be off by 1e-3 of itself; in the whole vector it does not weigh much.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import samestep as ss
from samestep import models
from samestep.backends import find
from samestep.runs import checkpoint
from samestep.runs.log import events

STEPS, BATCH, EVERY = 100, 256, 5  # weights are compared after every fifth step
ALLOWED = {"float64": 1e-10, "float32": 1e-4}
OWN = Path(__file__).parents[1] / ".venv-mxnet" / "bin" / "python"  # made by `make test`


def double(backend: str, model: Any) -> Any:
    """A model of samestep.models with weights of 64 bits, as each framework has it."""
    if backend == "torch":
        return model.double()
    if backend == "jax":
        return type(model)(model.apply, {name: weight.astype("float64") for name, weight in model.params.items()})
    if backend == "tensorflow":
        return type(model)(dtype="float64")
    if backend == "paddle":
        return model.to(dtype="float64")
    model.cast("float64")
    return model


def train(backend: str, precision: str, name: str, rate: float, folder: Path) -> None:
    """The run of one framework, in this process."""
    if backend == "jax" and precision == "float64":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    model = getattr(importlib.import_module(f"samestep.models.{backend}"), name)()
    if precision == "float64":
        model = models.load(double(backend, model), getattr(models, name)())
    data, n = ss.fashion_mnist(), STEPS * BATCH
    data = ss.Data(train=(data.train.x[:n].astype(precision), data.train.y[:n]))
    ss.Trainer(
        max_epochs=1, batch_size=BATCH, schedule=rate, devices="cpu", progress=False,
        run_dir=folder, checkpoint_every=EVERY, keep_checkpoints=STEPS,
    ).fit(model, data)  # fmt: skip


def losses(folder: Path) -> list[float]:
    """The mean loss of every step."""
    steps = [event for event in events((folder / "events.jsonl").read_bytes()) if event["event"] == "steps"]
    return [sum(loss) / n for event in steps for loss, n in zip(event["loss"], event["examples"], strict=True)]


def norm(tensors: list[Any]) -> float:
    return float(np.sqrt(sum((np.asarray(tensor, np.float64) ** 2).sum() for tensor in tensors)))


def differences(ours: Path, theirs: Path) -> dict[int, float]:
    """‖a - b‖ / ‖b‖ by the number of steps made, where both runs have a checkpoint."""
    found, names = {}, {path.name for path in checkpoint.paths(ours)}
    for path in checkpoint.paths(theirs):
        if path.name in names:
            a, b = (checkpoint.read(file) for file in (checkpoint.path_of(ours, 0).parent / path.name, path))
            mine, its = a.group("model"), b.group("model")
            assert mine.keys() == its.keys()
            found[b.step] = norm([mine[name] - its[name] for name in its]) / norm(list(its.values()))
    return found


def draw(curves: dict[str, list[float]], found: dict[tuple[str, str], dict[int, float]], path: Path) -> None:
    """Losses on one another, and the differences from PyTorch below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, constrained_layout=True)
    colours = dict(zip(find.FRAMEWORKS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for i, (name, curve) in enumerate(curves.items()):  # each thinner than the one below it, so that all can be seen
        above.plot(range(1, len(curve) + 1), curve, color=colours[name], linewidth=9 - 2 * i, label=name)
    above.set(ylabel="loss of the step", title="One run, five frameworks")
    above.legend()
    for (name, precision), values in found.items():
        style = "-" if precision == "float32" else "--"
        shown = {step: max(value, 1e-18) for step, value in values.items()}  # equal ones have a place, too
        below.plot(list(shown), list(shown.values()), style, color=colours[name], label=f"{name}, {precision}")
    for precision, allowed in ALLOWED.items():
        below.axhline(allowed, color="grey", linewidth=0.8, linestyle=":")
        below.annotate(f"allowed in {precision}", (1, allowed), va="bottom", color="grey", fontsize=8)
    below.set(yscale="log", xlabel="steps made", ylabel="difference of the weights from PyTorch's, relative")
    below.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxnet", type=Path, default=OWN, help="a Python with MXNet and samestep")
    parser.add_argument("--model", default="lenet_modern", choices=("lenet", "lenet_modern"))
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--figure", type=Path, default=Path("five_frameworks.png"))
    parser.add_argument("--one", nargs=3, metavar=("BACKEND", "PRECISION", "FOLDER"), help="train one, in this process")
    options = parser.parse_args()
    if options.one:
        backend, precision, folder = options.one
        train(backend, precision, options.model, options.rate, Path(folder))
        return 0
    pythons = {name: Path(sys.executable) for name in find.FRAMEWORKS if find.installed(name)}
    if "mxnet" not in pythons and options.mxnet.exists():
        pythons["mxnet"] = options.mxnet
    for name in find.FRAMEWORKS:
        if name not in pythons:
            print(f"{name} is not installed, and left out")
    if "torch" not in pythons:
        print(
            "PyTorch is what the others are compared with: pip install -c constraints.txt '.[torch]'", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="samestep-five-") as root:
        where = {(name, precision): Path(root, f"{name}-{precision}") for name in pythons for precision in ALLOWED}
        for (name, precision), folder in where.items():
            settings = ["--model", options.model, "--rate", str(options.rate)]
            command = [str(pythons[name]), __file__, *settings, "--one", name, precision, str(folder)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
        found = {(n, p): differences(folder, where["torch", p]) for (n, p), folder in where.items() if n != "torch"}
        curves = {name: losses(where[name, "float32"]) for name in pythons}
        draw(curves, found, options.figure)
    print(f"\n{options.model}, {STEPS} steps, rate {options.rate:g}: losses, and differences from PyTorch at the end")
    print(f"{'':<12}{'first':>8}{'last':>8}{'float32':>10}{'float64':>10}")
    good = True
    for name, curve in curves.items():
        ends = {p: found[name, p][STEPS] for p in ALLOWED if name != "torch"}
        good = good and all(end <= ALLOWED[precision] for precision, end in ends.items())
        shown = "".join(f"{ends[p]:>10.0e}" for p in ("float32", "float64")) if ends else ""
        print(f"{name:<12}{curve[0]:>8.4f}{curve[-1]:>8.4f}{shown}")
    print(f"the figure is {options.figure}" + ("" if good else "; A DIFFERENCE IS LARGER THAN IT MAY BE"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

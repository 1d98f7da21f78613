"""models: the numbers that models start from, and weights that move between frameworks by their names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transfer_job import MODELS, evaluate, made, read, train, trainer

from samestep import models
from samestep.backends import find
from samestep.errors import Invalid, WrongType

JOB = Path(__file__).with_name("transfer_job.py")
MXNET = JOB.parents[1] / ".venv-mxnet" / "bin" / "python"  # made by `make test`
N = 96  # examples
PYTHONS = {name: Path(sys.executable) for name in find.FRAMEWORKS if name != "torch" and find.installed(name)}
if "mxnet" not in PYTHONS and MXNET.exists():
    PYTHONS["mxnet"] = MXNET


@pytest.mark.parametrize("framework", [name for name in find.FRAMEWORKS if name != "torch"])
def test_weights_move_to_another_framework_and_back(framework: str, tmp_path: Path) -> None:
    """Trained in one and evaluated in the other: the same hits, and the loss to rounding. Batch norm's statistics included."""
    if framework not in PYTHONS or framework not in find.FRAMEWORKS:
        pytest.skip(f"{framework} is not installed")
    random, data, ours = np.random.default_rng(0), {}, {}
    for name, side in MODELS.items():
        folder = tmp_path / name
        folder.mkdir()
        x, y = random.random((N, 1, side, side), dtype=np.float32), random.integers(0, 10, N)
        np.savez(folder / "data.npz", x=x, y=y)
        data[name] = read(folder)
        ours[name] = evaluate("torch", name, data[name], train("torch", name, data[name], folder))
    command = [str(PYTHONS[framework]), str(JOB), framework, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for name in MODELS:
        theirs = evaluate("torch", name, data[name], tmp_path / name / f"{framework}.safetensors")
        for here, there in ((ours[name], said[name]["torch"]), (theirs, said[name][framework])):
            assert round(here["accuracy"] * N) == round(there["accuracy"] * N)
            assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        files = [load_file(tmp_path / name / f"{which}.safetensors") for which in ("torch", framework)]
        assert files[0].keys() == files[1].keys()


@pytest.mark.parametrize(("name", "side"), MODELS.items())
def test_weights_that_moved_in_a_wrong_way_would_be_noticed(name: str, side: int, tmp_path: Path) -> None:
    """Broken twins of the test above: weights that never moved, and filters with height and width exchanged."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=random.random((N, 1, side, side), dtype=np.float32), y=random.integers(0, 10, N))
    data = read(tmp_path)
    file = train("torch", name, data, tmp_path)
    turned = {key: np.swapaxes(array, -1, -2) if array.ndim == 4 else array for key, array in load_file(file).items()}
    right = evaluate("torch", name, data, file)["loss"]
    for wrong in (made("torch", name), models.load(made("torch", name), turned)):
        assert trainer().evaluate(wrong, data)["loss"] != pytest.approx(right, rel=1e-5)


def test_load_leaves_the_model_alone_and_takes_files_and_dictionaries(tmp_path: Path) -> None:
    model, other = made("torch", "lenet"), models.lenet(seed=7)
    before = {name: weight.numpy().copy() for name, weight in model.state_dict().items()}
    save_file(other, tmp_path / "weights.safetensors")
    for given in (other, tmp_path / "weights.safetensors", str(tmp_path / "weights.safetensors")):
        loaded = models.load(model, given).state_dict()
        assert {name: weight.numpy().tobytes() for name, weight in loaded.items()} == {
            name: weight.tobytes() for name, weight in other.items()
        }
    assert all(weight.numpy().tobytes() == before[name].tobytes() for name, weight in model.state_dict().items())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model, weights = made("torch", "lenet"), models.lenet()
    (tmp_path / "text").write_text("not weights")
    few = {name: weight for name, weight in weights.items() if name != "conv2.bias"}
    for given, kind, message in (
        (few, Invalid, "load: the dictionary has no conv2.bias"),
        (weights | {"extra": weights["conv1.bias"]}, Invalid, "load: the dictionary has, and the model has not, extra"),
        (weights | {"conv1.weight": np.zeros((3, 3, 1, 20), np.float32)}, Invalid,
         "load: conv1.weight of the dictionary has shape (3, 3, 1, 20), and that of the model (20, 1, 3, 3)"),
        (tmp_path / "text", Invalid, f"load: {tmp_path}/text is not a safetensors file that can be read: "),
        (tmp_path / "none", Invalid, f"load: {tmp_path}/none is not a safetensors file that can be read: "),
        (7, WrongType, "load: weights must be a dictionary of arrays or a safetensors file, got int"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            models.load(model, given)
        assert str(caught.value).startswith(message)
        assert len(str(caught.value).splitlines()) == 1

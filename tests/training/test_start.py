"""Weights to start a fit from: which are taken, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import nn

import samestep as ss
from samestep.errors import Invalid, WrongType


class Net(nn.Module):
    """Tied weights, a frozen one, and buffers, of real and of whole numbers."""

    def __init__(self, seed: int = 0, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.head = nn.Linear(4, classes)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.head(self.last(self.norm(self.first(x))))


def fit(weights: Any, model: Any = None, **settings: Any) -> ss.Run:
    random = np.random.default_rng(0)
    data = random.standard_normal((12, 4)).astype(np.float32), random.integers(0, 3, 12)
    given = {"max_epochs": 1, "batch_size": 6, "shards": 2, "devices": 2, "schedule": 0.0, "progress": False} | settings
    return ss.Trainer(**given).fit(model or Net(), data, weights=weights)


def own(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def test_all_weights_are_taken_and_the_model_stays_as_it_was() -> None:
    model, other = Net(), Net(seed=1)
    before = own(model)
    run = fit(other.state_dict(), model)  # of tensors: what is of the framework is read as NumPy
    for name, tensor in own(other).items():
        if not name.startswith("norm."):  # whose statistics move at a rate of 0, too
            assert run.weights()[name].tobytes() == tensor.tobytes()
            assert (before[name] == own(model)[name]).all()
    assert run.recipe["initial"] == fit(None, other).recipe["initial"] != fit(None).recipe["initial"]
    optimizer: Any = torch.optim.Adam
    trained = fit(own(other), optimizer=optimizer, schedule=0.1)  # which has copies of nothing
    assert trained.fingerprints == fit(None, Net(seed=1), optimizer=optimizer, schedule=0.1).fingerprints


def test_some_of_them_for_a_model_with_another_head() -> None:
    given = {name: tensor for name, tensor in own(Net(seed=1)).items() if not name.startswith("head.")}
    run = fit(given | {"norm.num_batches_tracked": np.int32(7)}, Net(classes=3))
    assert (
        run.weights()["first.weight"].tobytes()
        == run.weights()["last.weight"].tobytes()
        == given["first.weight"].tobytes()
    )
    assert run.weights()["head.weight"].tobytes() == own(Net(classes=3))["head.weight"].tobytes()
    assert run.weights()["norm.num_batches_tracked"] == 7 + 2
    alias = fit({"last.weight": given["first.weight"]})  # by the other name of a tensor
    assert alias.weights()["first.weight"].tobytes() == given["first.weight"].tobytes()


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        (3, WrongType, "weights must be a dictionary of arrays, a Run, the folder of a run or a safetensors file, got int"),
        ({"fist.weight": np.ones((4, 4))}, Invalid,
         "weights: the model has no 'fist.weight'; there are, among others, first.weight, last.weight, norm.weight"),
        ({3: np.ones((4, 4))}, Invalid, None),
        ({"head.weight": [[1], [1, 2]]}, WrongType, None),
        ({"head.weight": np.ones((3, 4), np.float32)}, Invalid,
         "weights: 'head.weight' is float32 of shape (3, 4), and that of the model float32 of shape (4, 4): leave it out, or "
         "give one that fits"),
        ({"norm.num_batches_tracked": np.float32(1)}, Invalid,
         "weights: 'norm.num_batches_tracked' is float32 of shape (), and that of the model int64 of shape (): leave it out, "
         "or give one that fits"),
        ({"first.weight": np.ones((4, 4)), "last.weight": np.zeros((4, 4))}, Invalid,
         "weights: 'last.weight' and 'first.weight' are one tensor of the model, and have two values here"),
    ],
)  # fmt: skip
def test_what_does_not_fit(weights: Any, kind: Any, message: str | None) -> None:
    with pytest.raises(kind) as caught:
        fit(weights)
    assert str(caught.value) == message or message is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    for name in ("text", "nowhere"):
        with pytest.raises(Invalid, match=f"^weights: {tmp_path / name} is not a safetensors file that can be read: "):
            fit(tmp_path / name)
    with pytest.raises(Invalid, match="is not the folder of a run: recipe.json cannot be read"):
        fit(tmp_path)
    save_file(own(Net(seed=1)), tmp_path / "file")
    assert fit(str(tmp_path / "file")).recipe["initial"] == fit(None, Net(seed=1)).recipe["initial"]
    half = {"first.bias": torch.randn(4).bfloat16(), "head.weight": torch.randn(4, 4).half()}
    save_tensors(half, tmp_path / "half")
    run = fit(tmp_path / "half")
    assert all((run.weights()[name] == tensor.float().numpy()).all() for name, tensor in half.items())


def test_a_resume_needs_the_same_weights(tmp_path: Path) -> None:
    settings = {"run_dir": tmp_path, "schedule": 0.1}
    fit(own(Net(seed=1)), **settings)
    again = fit(own(Net(seed=1)), **settings, max_epochs=2)
    assert again.resumed == 2
    assert again.fingerprints == fit(own(Net(seed=1)), schedule=0.1, max_epochs=2).fingerprints
    with pytest.raises(Invalid, match="initial"):
        fit(None, **settings)

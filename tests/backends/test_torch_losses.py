"""PyTorch's losses over a weight: sum and weight are those of its own mean, also when a batch is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss
from samestep.backends.losses import Measure
from samestep.backends.torch.backend import backend
from samestep.backends.torch.losses import weighted

DRAWS = torch.Generator().manual_seed(0)
SCORES = torch.randn(6, 5, 3, generator=DRAWS, dtype=torch.float64)
LABELS = torch.randint(0, 5, (6, 3), generator=DRAWS)
SOME = LABELS.clone()
SOME[1], SOME[2, 0] = -100, -100  # a shard may have no label at all
CHANCES = torch.softmax(torch.randn(6, 5, 3, generator=DRAWS, dtype=torch.float64), 1)
COUNTS = torch.tensor([0.5, 2, 1, 3, 0.25], dtype=torch.float64)
LOGS = F.log_softmax(SCORES, 1)
CASES = {
    "plain": (nn.CrossEntropyLoss(), SCORES, LABELS),
    "the function": (F.cross_entropy, SCORES, SOME),
    "ignored": (nn.CrossEntropyLoss(), SCORES, SOME),
    "ignored by another number": (nn.CrossEntropyLoss(ignore_index=2), SCORES, LABELS),
    "classes": (nn.CrossEntropyLoss(COUNTS), SCORES, SOME),
    "classes, one ignored": (partial(F.cross_entropy, weight=COUNTS, ignore_index=2), SCORES, LABELS),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), SCORES, SOME),
    "smoothed, classes": (nn.CrossEntropyLoss(COUNTS, label_smoothing=0.1), SCORES, SOME),
    "chances": (nn.CrossEntropyLoss(), SCORES, CHANCES),
    "chances, all": (nn.CrossEntropyLoss(COUNTS, label_smoothing=0.2), SCORES, CHANCES),
    "chances, one position": (F.cross_entropy, SCORES[..., 0], CHANCES[..., 0]),
    "logs": (nn.NLLLoss(), LOGS, SOME),
    "logs, classes": (partial(F.nll_loss, weight=COUNTS, ignore_index=1), LOGS, LABELS),
    "compiled": (torch.compile(nn.CrossEntropyLoss(ignore_index=2), backend="eager"), SCORES, LABELS),
    "one label each": (nn.CrossEntropyLoss(COUNTS), SCORES[..., 0], SOME[:, 0]),
}


@pytest.mark.parametrize("cuts", [(6,), (1, 1, 4), (3, 3)])
@pytest.mark.parametrize("name", CASES)
def test_it_is_pytorchs_own_mean(name: str, cuts: tuple[int, ...]) -> None:
    loss, output, y = CASES[name]
    given = [weighted(loss, *part) for part in zip(output.split(cuts), y.split(cuts), strict=True)]
    assert None not in given
    total, weight = (sum(column) for column in zip(*given, strict=True))  # type: ignore[arg-type]
    assert abs(total / weight - loss(output, y)) < 1e-14


def test_a_mean_of_means_would_be_seen() -> None:
    """The broken twin, for every case that needs a weight."""
    needed = [
        name
        for name, (loss, output, y) in CASES.items()
        if abs(torch.stack([loss(output[i:], y[i:]) * n / 6 for i, n in ((0, 2), (2, 4))]).sum() - loss(output, y))
        > 1e-3
    ]
    assert len(needed) > 8  # fmt: skip


class Own(nn.CrossEntropyLoss):
    def forward(self, input: Any, target: Any) -> Any:
        return super().forward(input, target) * 2


class Named(nn.CrossEntropyLoss):
    """Computes as all of them do."""


def test_what_is_not_recognised_is_called_as_it_is() -> None:
    for loss in (
        Own(), nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none"), nn.MSELoss(), F.mse_loss,
        partial(F.cross_entropy, reduction="sum"), lambda output, y: F.cross_entropy(output, y),
        partial(F.cross_entropy, SCORES), partial(F.cross_entropy, size_average=False), partial(nn.CrossEntropyLoss()),
    ):  # fmt: skip
        assert weighted(loss, SCORES, SOME) is None
    assert weighted(nn.CrossEntropyLoss(), SCORES, {"labels": SOME}) is None
    assert weighted(Named(), SCORES, SOME) is not None
    value, weight = backend.loss_of(Measure(Own()), SCORES, SOME)
    assert (value, weight) == (Own()(SCORES, SOME) * 6, None)
    shape = backend.described(Measure(Own()), SCORES, SOME, SOME.numpy(), "float64")
    assert (shape.kind, shape.foreign) == ("mean", True)  # so it is tried


def test_the_default_loss_at_every_position_ignores_as_pytorch_does() -> None:
    expected = F.cross_entropy(SCORES, SOME, reduction="sum"), (SOME != -100).sum()
    for scores in (SCORES, SCORES.movedim(1, 2)):
        assert backend.loss_of(Measure(), scores, SOME) == expected


@pytest.mark.parametrize("value", [0.1, torch.tensor([0.1], dtype=torch.float64, requires_grad=True), 257])
def test_a_number_is_not_rounded_to_half_precision(value: Any) -> None:
    """257 examples counted in bfloat16 would be 256; 0.1 as Python has it is a float64."""
    for kind, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        number = backend.number(value, torch.zeros((), dtype=kind))
        assert (number.dtype, number.shape, number.requires_grad) == (wide, (), False)
        assert number == torch.as_tensor(value, dtype=torch.float64).detach().to(wide)


def test_labels_of_another_shape_are_pytorchs_own_error() -> None:
    scores, labels = SCORES.reshape(6, 5, 3, 1), LABELS.reshape(6, 1, 3)
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(COUNTS)):
        with pytest.raises(RuntimeError, match="size mismatch|size does not match"):
            backend.loss_of(Measure(loss), scores, labels)


def test_a_weight_of_classes_is_not_added_in_16_bits() -> None:
    scores, y = torch.zeros(4099, 2, dtype=torch.bfloat16), torch.arange(4099) % 2
    _, weight = backend.loss_of(Measure(nn.CrossEntropyLoss(torch.tensor([1.0, 1.0]).bfloat16())), scores, y)
    assert float(weight) == 4099


class Contrast(nn.Module):
    """It couples examples, with a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, output: Any, y: Any) -> Any:
        return F.cross_entropy(output @ output.T * self.scale, torch.arange(len(output)))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_loss_per_shard_is_trained_with_its_parameters(shards: int) -> None:
    model, loss, x = nn.Linear(3, 4, dtype=torch.float64), Contrast(), SCORES[:, 0]
    mean = torch.stack([loss(model(part), None) for part in x.chunk(shards)]).mean()
    slopes = torch.autograd.grad(mean, [*model.parameters(), *loss.parameters()])
    settings: Any = {"shards": shards, "devices": ["cpu"], "loss": ss.per_shard(loss), "optimizer": ss.sgd()}
    run = ss.Trainer(1, 6, schedule=1.0, sampling="in_order", progress=False, **settings).fit(model, (x, LABELS[:, 0]))
    assert run.history[0]["train_loss"] == pytest.approx(float(mean.detach()), abs=1e-13)
    group = ss.Group(model, **settings)
    group.step(x, LABELS[:, 0], lr=1.0)
    for weights in (run.weights(), group.weights()):
        before = {**dict(model.named_parameters()), "loss.scale": loss.scale}
        assert weights.keys() == before.keys()
        for (name, start), slope in zip(before.items(), slopes, strict=True):
            assert abs(start.detach() - slope - torch.from_numpy(weights[name])).max() < 1e-12

"""PyTorch's losses whose mean is one over a weight: some labels are ignored, or classes count more or less."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from samestep.backends.losses import setting

NAMES = "weight", "ignore_index", "label_smoothing"
FUNCTIONS = {F.cross_entropy: torch.nn.CrossEntropyLoss, F.nll_loss: torch.nn.NLLLoss}


def weighted(loss: Any, output: Any, y: Any) -> tuple[torch.Tensor, Any] | None:
    """(sum, weight) of such a loss; None if it is another."""
    loss = getattr(loss, "_orig_mod", loss)  # of torch.compile
    ours = isinstance(loss, functools.partial) and not loss.args and loss.keywords.keys() <= {*NAMES, "reduction"}
    inner = loss.func if ours else loss
    kinds = [(function, one) for function, one in FUNCTIONS.items() if inner is function or is_one(loss, one)]
    if not kinds or (setting(loss, "reduction") or "mean") != "mean" or not isinstance(y, torch.Tensor):
        return None
    function, given = kinds[0][0], {name: value for name in NAMES if (value := setting(loss, name)) is not None}
    if "weight" in given:  # of a function, it is where the user has made it
        given["weight"] = given["weight"].to(output.device)
    if y.is_floating_point():  # probabilities: every position counts
        return function(output, y, **given, reduction="sum"), y.numel() // y.shape[1 if y.ndim > 1 else 0]
    if output.ndim > 2 and output.shape[:1] + output.shape[2:] != y.shape:
        return None  # PyTorch says what is wrong
    total = function(rows(output, 1), y.flatten(), **given, reduction="sum")
    counts, wide = y != given.get("ignore_index", -100), torch.promote_types(output.dtype, torch.float32)
    if "weight" not in given:
        return total, counts.sum()
    return total, (given["weight"].to(wide)[torch.where(counts, y, 0)] * counts).sum()


def rows(scores: torch.Tensor, axis: int) -> torch.Tensor:
    """Scores with one row per position: on a GPU, the kernel for more dimensions adds in no fixed order."""
    return scores if scores.ndim < 3 else scores.movedim(axis, -1).flatten(0, -2)


def is_one(loss: Any, kind: type[torch.nn.Module]) -> bool:
    """Whether it is a loss of this kind that computes as all of them do."""
    return isinstance(loss, kind) and type(loss).forward is kind.forward

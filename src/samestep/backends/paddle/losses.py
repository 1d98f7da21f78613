"""Paddle's losses whose mean is one over a weight: some labels are ignored, or classes count more or less."""

from __future__ import annotations

import functools
from typing import Any

import paddle
import paddle.nn.functional as F

from samestep.backends.losses import setting

FUNCTIONS = {F.cross_entropy: paddle.nn.CrossEntropyLoss, F.nll_loss: paddle.nn.NLLLoss}
ARGUMENTS = {F.cross_entropy: ("soft_label", "axis", "use_softmax", "label_smoothing"), F.nll_loss: ()}


def weighted(loss: Any, output: Any, y: Any) -> tuple[Any, Any] | None:
    """(sum, weight) of such a loss; None if it is another."""
    inner = loss.func if isinstance(loss, functools.partial) and not loss.args else loss
    kinds = [
        f for f, one in FUNCTIONS.items() if inner is f or (isinstance(loss, one) and type(loss).forward is one.forward)
    ]
    if not kinds or (_setting(loss, "reduction") or "mean") != "mean":
        return None
    names = ("weight", "ignore_index", *ARGUMENTS[kinds[0]])
    given = {name: value for name in names if (value := _setting(loss, name)) is not None}
    weight: Any = given.get("weight")
    ignored, smoothing = given.get("ignore_index", -100), given.get("label_smoothing")
    soft = given.get("soft_label") or smoothing
    if weight is None and (soft or (kinds[0] is F.cross_entropy and ignored < 0)):
        return None  # a mean over all labels: Paddle counts those below zero, too, with a loss of zero
    counts = y != ignored
    safe = paddle.where(counts, y, paddle.zeros_like(y))
    if kinds[0] is F.nll_loss:  # the kernel of Paddle 3.3.1 writes outside of its memory at an ignored label
        rows = counts.reshape([output.shape[0], 1, *output.shape[2:]])
        output, y = paddle.where(rows, output, paddle.zeros_like(output)), safe
        given["ignore_index"] = -100
    total = kinds[0](output, y, **given, reduction="sum")
    if soft:
        shares = F.one_hot(y, output.shape[-1]) if y.ndim < output.ndim else y
        shares = F.label_smooth(shares, epsilon=smoothing) if smoothing else shares
        return total, paddle.matmul(shares.astype(weight.dtype), weight).sum()
    if weight is None:
        return total, counts.sum()
    return total, (paddle.gather(weight, safe.flatten()) * counts.flatten().astype(weight.dtype)).sum()


def _setting(loss: Any, name: str) -> Any:
    """NLLLoss hides its settings."""
    found = setting(loss, name)
    return setting(loss, f"_{name}") if found is None else found

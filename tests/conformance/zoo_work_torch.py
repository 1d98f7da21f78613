"""A linear model of every form of input, and losses by hand, in PyTorch."""

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class Line(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(weight.copy()))

    def forward(self, x):
        return x @ self.weight


class Two(Line):
    def forward(self, left, right):
        return (left + right) @ self.weight


class Named(Line):
    def forward(self, right, left=None):
        return {"logits": (left + right) @ self.weight, "other": (left, [right])}


class Own(Line):
    def forward(self, left, right, labels=None):
        scores = (left + right) @ self.weight
        return {"loss": (each(scores, labels) * 1.0).mean(), "logits": scores}


def each(output, labels):
    flat = F.cross_entropy(output.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return flat.reshape(labels.shape)


def total(array):
    return array.sum()


def real(array):
    return array.double()


def exactly(scores, labels):
    """How many have the highest score at their label."""
    return (scores.argmax(-1) == labels).sum()


def standard(weights):
    """The framework's own losses, with what each label counts; those of PyTorch take the classes at 1."""
    ours = torch.from_numpy(weights)
    return {
        "a module": (nn.CrossEntropyLoss(weight=ours), weights),
        "a function": (F.cross_entropy, None),
        "a partial function": (partial(F.cross_entropy, weight=ours), weights),
    }


class First(Line):
    """With the classes at 1."""

    def forward(self, x):
        return (x @ self.weight).movedim(-1, 1)


def half(scores):
    return scores.bfloat16()


def tried():
    """Losses of the framework that are no means over examples, where samestep cannot see it, and whether they take chances."""
    with warnings.catch_warnings(action="ignore"):  # that it is deprecated
        scripted = torch.jit.script(nn.CrossEntropyLoss(ignore_index=0))
    return {
        "partial": (partial(nn.CrossEntropyLoss(ignore_index=0)), False),
        "scripted": (scripted, False),
        "compiled": (torch.compile(partial(F.cross_entropy, ignore_index=0), backend="eager"), False),
    }


def sums():
    """Sums of softmax cross-entropy, where samestep cannot see it, and whether they take chances."""
    return {"as it was once called": (partial(F.cross_entropy, size_average=False), False)}

"""A linear model of every form of input, and losses by hand, in Paddle."""

import warnings
from functools import partial

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no ccache
    import paddle

import paddle.nn.functional as F
from paddle import nn


class Line(nn.Layer):
    def __init__(self, weight):
        super().__init__()
        self.weight = self.create_parameter(weight.shape, dtype="float64")
        self.weight.set_value(weight)

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
        return {"loss": each(scores, labels).mean(), "logits": scores}


class First(Line):
    def forward(self, x):
        return (x @ self.weight).transpose([0, 2, 1])


def each(output, labels):
    return F.cross_entropy(output, labels.clip(min=0).unsqueeze(-1), reduction="none").squeeze(-1)


def total(array):
    return array.sum()


def real(array):
    return array.astype("float64")


def exactly(scores, labels):
    return (scores.argmax(-1) == labels).sum()


def standard(weights):
    ours = paddle.to_tensor(weights)
    return {
        "a layer": (nn.CrossEntropyLoss(weight=ours), weights),
        "a function": (F.cross_entropy, True),
        "a partial function": (partial(F.cross_entropy, weight=ours), weights),
    }


def half(scores):
    return scores  # Paddle's cross-entropy takes no 16 bits on a CPU


def tried():
    return {"partial": (partial(nn.CrossEntropyLoss(ignore_index=0)), False)}


def sums():
    return {"partial": (partial(F.cross_entropy, reduction="sum"), False)}

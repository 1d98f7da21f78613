"""The models of the conformance suite in PyTorch, small enough for many fits."""

import itertools

import torch
from torch import nn

from samestep.backends.torch.replica import TorchReplica as Replica  # noqa: F401
from samestep.models import torch as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(nn.Module):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.dense(self.embedding(x).mean(1))


def embedding():
    return Words()


# What the recipe must see (test_recipe.py)


class Small(nn.Module):
    """A model whose settings and activation can be chosen."""

    def __init__(self, rate=0.5, momentum=0.1, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(784, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Dropout(rate), nn.Linear(8, 10)
        )  # fmt: skip
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x.flatten(1))))))


def tanh_instead():
    class Small(globals()["Small"]):
        def forward(self, x):
            return self.last(self.drop(torch.tanh(self.norm(self.first(x.flatten(1))))))

    return Small()


def relu_as_before():
    class Small(globals()["Small"]):
        def forward(self, x):
            return self.last(self.drop(torch.relu(self.norm(self.first(x.flatten(1))))))

    return Small()


def small(**settings):
    return Small(**settings)


def losses(weight):
    return lambda output, y: weight * nn.functional.cross_entropy(output, y)


def hooked(factor):
    model = Small()
    model.last.register_forward_hook(lambda module, inputs, output: output * factor)
    return model


def changes():
    """What is changed between a stop and a resume → before, after, and the part that must be named."""
    smooth, step = nn.CrossEntropyLoss, torch.optim.lr_scheduler.StepLR
    # A loss stays where it is, so these cannot be on a GPU.
    weighted = [{"loss": smooth(weight=w), "devices": "cpu"} for w in (torch.ones(10), torch.arange(10.0))]
    return {
        "the body of a loss": ({"loss": lambda o, y: nn.functional.cross_entropy(o, y)},
                               {"loss": lambda o, y: nn.functional.cross_entropy(o, y) * 2}, "<lambda>()"),
        "what a loss closes over": ({"loss": losses(1.0)}, {"loss": losses(2.0)}, "<lambda>()"),
        "a setting of a loss": ({"loss": smooth()}, {"loss": smooth(label_smoothing=0.1)}, "loss"),
        "class weights": (*weighted, "loss"),
        "an activation": ({"model": relu_as_before}, {"model": tanh_instead}, "Small.forward()"),
        "a dropout rate": ({}, {"model": lambda: small(rate=0.2)}, "model.drop"),
        "the momentum of batch norm": ({}, {"model": lambda: small(momentum=0.3)}, "model.norm"),
        "a frozen layer": ({}, {"model": lambda: small(frozen=True)}, "model.first"),
        "a hook": ({"model": lambda: hooked(1)}, {"model": lambda: hooked(2)}, "<lambda>()"),
        "the formula of a schedule": ({"schedule": lambda t: 0.1}, {"schedule": lambda t: 0.1 + t}, "<lambda>()"),
        "how an optimizer is made": ({"optimizer": lambda p: torch.optim.SGD(p, 0.1)},
                                     {"optimizer": lambda p: torch.optim.SGD(list(p), 0.1)}, "<lambda>()"),
        "a scheduler": ({"schedule": lambda: step(torch.optim.SGD(Small().parameters(), 0.1), 5)},
                        {"schedule": lambda: step(torch.optim.SGD(Small().parameters(), 0.1), 6)}, "schedule"),
    }  # fmt: skip


def settings():
    """Settings of the framework that change numbers: how to set each, and how to put it back."""
    backends = torch.backends
    return {
        "matmul precision": (lambda: torch.set_float32_matmul_precision("medium"),
                             lambda: torch.set_float32_matmul_precision("highest")),
        "mkldnn": (lambda: setattr(backends.mkldnn, "enabled", False), lambda: setattr(backends.mkldnn, "enabled", True)),
        "denormals": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    }  # fmt: skip


# What breaks the rules (test_rehearsal.py)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


class Momentum(Plain):
    """A second encoder that follows the first, as in MoCo, BYOL and mean teacher."""

    def __init__(self, how):
        super().__init__()
        self.how, self.follower = how, nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, first in zip(self.follower.parameters(), self.inner.parameters(), strict=True):
                if self.how == "copy_":
                    own.copy_(own * 0.9 + first * 0.1)
                elif self.how == "data":
                    own.data.mul_(0.9).add_(first.data * 0.1)
                else:
                    own.data = own.data * 0.9 + first.data * 0.1
        return self.outer((self.inner(x) + self.follower(x)).relu())


class Scaled(Plain):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def forward(self, x):
        with torch.no_grad():
            (self.inner.weight.data if self.data else self.inner.weight).mul_(0.99)
        return super().forward(x)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.outer = nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(self.words((x.abs() * 3).long().clamp(0, 9)).mean(1))


class ThroughALambda(Plain):
    def __init__(self):
        super().__init__()
        self.through = lambda x: self.outer(x)

    def forward(self, x):
        return self.through(self.inner(x).relu())


class Times(Plain):
    """The output times whatever a function gives."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor()


class Own(Plain):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return super().forward(x) * torch.rand((), generator=self.generator)


SAID = []  # what a model tells its loss, behind the back of everybody


class Aside(Plain):
    def forward(self, x):
        hidden = self.inner(x)
        SAID[:] = [hidden.square().mean()]
        return self.outer(hidden.relu())


class LearnedScale(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, y):
        self.calls = self.calls + 1
        return nn.functional.cross_entropy(output * self.scale, y)


def call_itself():
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x)
    return model


def cross_entropy(output, y):
    return nn.functional.cross_entropy(output, y)


def closed_over():
    inner = LearnedScale()
    return lambda output, y: inner(output, y)


def unruly(counter, draws):
    """What is done → the model, settings, what the error says, and what happens without a rehearsal."""
    written, other = "was written to in the forward pass", "(the loss|its result) is not the same"
    return {
        **{f"a frozen parameter is written, {how}": (lambda how=how: Momentum(how), {}, f"'follower.weight' {written}", None)
           for how in ("copy_", "data = ")},
        "the data of a frozen parameter is written": (lambda: Momentum("data"), {}, f"'follower.weight' {written}", "differs"),
        "a weight is scaled": (lambda: Scaled(False), {}, f"a trained weight {written}", None),
        "the data of a weight is scaled": (lambda: Scaled(True), {}, f"'inner.weight' {written}.*only the optimizer", None),
        "max_norm": (Renormed, {}, f"a trained weight {written}.*max_norm", None),
        "a model calls itself through a closure": (call_itself, {}, "no trained weight gets a gradient", "stays"),
        "a layer is called through a closure": (ThroughALambda, {}, "depends on a parameter .'outer.(weight|bias)'", "moves"),
        "Python's random": (lambda: Times(draws.random), {}, f"{other}.*Python's", "differs"),
        "a counter": (lambda: Times(counter), {}, other, "differs"),
        "a generator of its own": (Own, {}, other, "differs"),
        "a loss with a counter": (Plain, {"loss": lambda o, y: cross_entropy(o, y) * counter()}, other, "differs"),
        "a loss with a buffer": (Plain, {"loss": LearnedScale()}, f"'loss.calls' {written}", None),
        "a loss that closes over a parameter": (Plain, {"loss": closed_over()}, r"a parameter .of shape \(\)", None),
        "a loss through a global": (Aside, {"loss": lambda o, y: cross_entropy(o, y) + SAID[0]},
                                    "not the same|but not (again|side by side)", None),
    }  # fmt: skip


def late(counter):
    """A model that begins to look at a counter after some calls."""
    return Times(counter)


# Layers large enough for every kernel (tests/portable.py)


class Over(nn.Module):
    """Some layers, a mean over all but the channels, and ten classes."""

    def __init__(self, make, channels):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = make(), nn.Linear(channels, 10)

    def forward(self, x):
        x = self.inner(x)
        x = x[0] if isinstance(x, tuple) else x
        return self.last(x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1) if x.dim() == 3 else x)


def convolutions(*channels, kernel=3, **settings):
    pairs = itertools.pairwise(channels)
    layers = [
        [nn.Conv2d(a, b, kernel, padding=kernel // 2, **settings), nn.BatchNorm2d(b), nn.ReLU()] for a, b in pairs
    ]
    return nn.Sequential(*(layer for group in layers for layer in group))


LARGE = {
    "convolutions": (lambda: Over(lambda: convolutions(3, 64, 128, 256), 256), 4, (3, 14, 14)),
    "1 x 1 and strides": (lambda: Over(lambda: convolutions(64, 256, 64, kernel=1, stride=2), 64), 4, (64, 14, 14)),
    "depthwise": (lambda: Over(lambda: convolutions(96, 96, kernel=7, groups=96), 96), 4, (96, 14, 14)),
    "transposed": (lambda: Over(lambda: nn.ConvTranspose2d(32, 48, 4, 2), 48), 4, (32, 9, 9)),
    "wide products": (lambda: Over(lambda: nn.Sequential(nn.Linear(1500, 700), nn.GELU(), nn.Linear(700, 300)), 300), 4,
                      (1500,)),
    "attention": (lambda: Over(lambda: nn.TransformerEncoderLayer(96, 4, 200, batch_first=True), 96), 4, (50, 96)),
    "lstm": (lambda: Over(lambda: nn.LSTM(40, 60, 2, batch_first=True, dropout=0.1), 60), 4, (20, 40)),
}  # fmt: skip

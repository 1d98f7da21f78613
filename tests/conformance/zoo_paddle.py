"""The models of the conformance suite in Paddle, small enough for many fits."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no ccache
    import paddle

import paddle.nn.functional as F
from paddle import nn

from samestep.backends.paddle.replica import PaddleReplica as Replica  # noqa: F401
from samestep.models import paddle as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(nn.Layer):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.dense(self.embedding(x).mean(1))


def embedding():
    return Words()


# What the recipe must see (test_recipe.py)


class Small(nn.Layer):
    """A model whose settings and activation can be chosen."""

    def __init__(self, rate=0.5, momentum=0.9, frozen=False):
        super().__init__()
        paddle.seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(784, 8), nn.BatchNorm(8, momentum=momentum), nn.Dropout(rate), nn.Linear(8, 10)
        )  # fmt: skip
        for p in self.first.parameters():
            p.stop_gradient = frozen

    def forward(self, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x.flatten(1))))))


def tanh_instead():
    class Small(globals()["Small"]):
        def forward(self, x):
            return self.last(self.drop(F.tanh(self.norm(self.first(x.flatten(1))))))

    return Small()


def relu_as_before():
    class Small(globals()["Small"]):
        def forward(self, x):
            return self.last(self.drop(F.relu(self.norm(self.first(x.flatten(1))))))

    return Small()


def small(**settings):
    return Small(**settings)


def losses(weight):
    return lambda output, y: weight * F.cross_entropy(output, y)


def hooked(factor):
    model = Small()
    model.last.register_forward_post_hook(lambda layer, inputs, output: output * factor)
    return model


def with_rates(factor):
    """A model whose last layer learns at another rate: a setting of Paddle's parameters."""
    model = Small()
    model.last.weight.optimize_attr["learning_rate"] = factor
    return model


def changes():
    """What is changed between a stop and a resume → before, after, and the part that must be named."""
    entropy, sgd, step = nn.CrossEntropyLoss, paddle.optimizer.SGD, paddle.optimizer.lr.StepDecay
    return {
        "the body of a loss": ({"loss": lambda o, y: F.cross_entropy(o, y)},
                               {"loss": lambda o, y: F.cross_entropy(o, y) * 2}, "<lambda>()"),
        "what a loss closes over": ({"loss": losses(1.0)}, {"loss": losses(2.0)}, "<lambda>()"),
        "a setting of a loss": ({"loss": entropy()}, {"loss": entropy(label_smoothing=0.1)}, "loss"),
        "class weights": ({"loss": entropy(weight=paddle.ones([10]))},
                          {"loss": entropy(weight=paddle.arange(10.0))}, "loss"),
        "an activation": ({"model": relu_as_before}, {"model": tanh_instead}, "Small.forward()"),
        "a dropout rate": ({}, {"model": lambda: small(rate=0.2)}, "model.drop"),
        "the momentum of batch norm": ({}, {"model": lambda: small(momentum=0.7)}, "model.norm"),
        "a frozen layer": ({}, {"model": lambda: small(frozen=True)}, "model.first"),
        "a hook": ({"model": lambda: hooked(1)}, {"model": lambda: hooked(2)}, "<lambda>()"),
        "the rate of a layer": ({"model": lambda: with_rates(1.0), "optimizer": sgd},
                                {"model": lambda: with_rates(0.5), "optimizer": sgd}, "model.last"),
        "the formula of a schedule": ({"schedule": lambda t: 0.1}, {"schedule": lambda t: 0.1 + t}, "<lambda>()"),
        "how an optimizer is made": ({"optimizer": lambda p: sgd(0.1, parameters=p)},
                                     {"optimizer": lambda p: sgd(0.1, parameters=list(p))}, "<lambda>()"),
        "a scheduler": ({"schedule": lambda: step(0.1, 5)}, {"schedule": lambda: step(0.1, 6)}, "schedule"),
    }  # fmt: skip


def settings():
    """Settings of the framework that change numbers: how to set each, and how to put it back."""

    def flag(name, value):
        before = paddle.get_flags(f"FLAGS_{name}")
        return lambda: paddle.set_flags({f"FLAGS_{name}": value}), lambda: paddle.set_flags(before)

    flags = {
        "use_stride_kernel": False,
        "enable_unique_name": True,
        "use_mkldnn": True,
        "new_executor_serial_run": True,
    }
    return {name: flag(name, value) for name, value in flags.items()} | {
        "prim": (
            lambda: paddle.base.core.set_prim_eager_enabled(True),
            lambda: paddle.base.core.set_prim_eager_enabled(False),
        ),
        "threads": (lambda: paddle.base.core.set_num_threads(2), lambda: paddle.base.core.set_num_threads(1)),
    }


# What breaks the rules (test_rehearsal.py)


class Plain(nn.Layer):
    def __init__(self):
        super().__init__()
        paddle.seed(0)
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.outer(F.relu(self.inner(x)))


class Momentum(Plain):
    """A second encoder that follows the first, as in MoCo, BYOL and mean teacher."""

    def __init__(self):
        super().__init__()
        self.follower = nn.Linear(6, 8)
        for p in self.follower.parameters():
            p.stop_gradient = True

    def forward(self, x):
        with paddle.no_grad():
            for own, first in zip(self.follower.parameters(), self.inner.parameters(), strict=True):
                paddle.assign(own * 0.9 + first * 0.1, own)
        return self.outer(F.relu(self.inner(x) + self.follower(x)))


class Scaled(Plain):
    def forward(self, x):
        with paddle.no_grad():
            self.inner.weight.scale_(0.99)
        return super().forward(x)


class ThroughALambda(Plain):
    def __init__(self):
        super().__init__()
        self.through = lambda x: self.outer(x)

    def forward(self, x):
        return self.through(F.relu(self.inner(x)))


class Times(Plain):
    """The output times whatever a function gives."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor()


SAID = []  # what a model tells its loss, behind the back of everybody


class Aside(Plain):
    def forward(self, x):
        hidden = self.inner(x)
        SAID[:] = [hidden.square().mean()]
        return self.outer(F.relu(hidden))


class LearnedScale(nn.Layer):
    def __init__(self):
        super().__init__()
        self.scale = self.create_parameter([1])

    def forward(self, output, y):
        return F.cross_entropy(output * self.scale, y)


def call_itself():
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x)
    return model


def unruly(counter, draws):
    """What is done → the model, settings, what the error says, and what happens without a rehearsal."""
    written, other = "was written to in the forward pass", "(the loss|its result) is not the same"
    return {
        "a frozen parameter is written": (Momentum, {}, f"'follower.weight' {written}", None),
        "a weight is scaled": (Scaled, {}, f"'inner.weight' {written}.*only the optimizer", None),
        "a model calls itself through a closure": (call_itself, {}, "no trained weight gets a gradient", "stays"),
        "a layer is called through a closure": (ThroughALambda, {}, "depends on a parameter .'outer.(weight|bias)'", "moves"),
        "Python's random": (lambda: Times(draws.random), {}, f"{other}.*Python's", "differs"),
        "a counter": (lambda: Times(counter), {}, other, "differs"),
        "a loss with a counter": (Plain, {"loss": lambda o, y: F.cross_entropy(o, y) * counter()}, other, "differs"),
        "a loss with a parameter": (Plain, {"loss": LearnedScale()}, "a parameter .'scale' of the loss", None),
        "a loss through a global": (Aside, {"loss": lambda o, y: F.cross_entropy(o, y) + SAID[0]},
                                    "not the same|but not (again|side by side)", None),
    }  # fmt: skip


def late(counter):
    """A model that begins to look at a counter after some calls."""
    return Times(counter)

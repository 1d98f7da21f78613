"""The models of the conformance suite in MXNet, small enough for many fits."""

import os
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MXNet uses names that NumPy has deprecated
    import mxnet as mx

from mxnet import gluon, nd
from mxnet.gluon import HybridBlock, nn

from samestep.backends.mxnet.replica import MxnetReplica as Replica  # noqa: F401
from samestep.models import mxnet as models


def lenet():
    return models.lenet()


def lenet_modern():
    return models.lenet_modern()


def mlp_with_dropout():
    return models.mlp((784, 32, 10), dropout=0.5)


def resnet_with_batch_norm():
    return models.resnet18(width=4)


class Words(HybridBlock):
    """An embedding, averaged: its gradient is a scatter-add."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(50, 8), nn.Dense(10, in_units=8)

    def hybrid_forward(self, F, x):
        return self.dense(F.mean(self.embedding(x), axis=1))


def embedding():
    mx.random.seed(0)
    model = Words()
    model.initialize()
    return model


# What the recipe must see (test_recipe.py)


class Small(HybridBlock):
    """A model whose settings and activation can be chosen."""

    def __init__(self, rate=0.5, momentum=0.9, frozen=False):
        super().__init__()
        mx.random.seed(0)
        self.first, self.norm = nn.Dense(8, in_units=784), nn.BatchNorm(momentum=momentum, in_channels=8)
        self.drop, self.last = nn.Dropout(rate), nn.Dense(10, in_units=8)
        self.initialize(mx.init.Xavier())
        if frozen:
            self.first.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F, x):
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


def tanh_instead():
    class Small(globals()["Small"]):
        def hybrid_forward(self, F, x):
            return self.last(self.drop(F.tanh(self.norm(self.first(x)))))

    return Small()


def relu_as_before():
    class Small(globals()["Small"]):
        def hybrid_forward(self, F, x):
            return self.last(self.drop(F.relu(self.norm(self.first(x)))))

    return Small()


def small(**settings):
    return Small(**settings)


def losses(weight):
    entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    return lambda output, y: weight * entropy(output, y)


class Weighted(gluon.loss.SoftmaxCrossEntropyLoss):
    """With a weight for every class."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def hybrid_forward(self, F, output, y):
        return super().hybrid_forward(F, output, y, F.take(self.weights.as_in_context(y.context), y).expand_dims(1))


def hooked(factor):
    model = Small()
    model.last.register_forward_hook(lambda block, inputs, output: print("", end="" * factor))
    return model


def changes():
    """What is changed between a stop and a resume → before, after, and the part that must be named."""
    entropy, step, sgd = gluon.loss.SoftmaxCrossEntropyLoss, mx.lr_scheduler.FactorScheduler, mx.optimizer.SGD
    return {
        "the body of a loss": ({"loss": lambda o, y: entropy()(o, y)},
                               {"loss": lambda o, y: entropy()(o, y) * 2}, "<lambda>()"),
        "what a loss closes over": ({"loss": losses(1.0)}, {"loss": losses(2.0)}, "<lambda>()"),
        "a setting of a loss": ({"loss": entropy()}, {"loss": entropy(from_logits=True)}, "loss"),
        "class weights": ({"loss": Weighted(nd.ones(10))}, {"loss": Weighted(nd.arange(10))}, "loss"),
        "an activation": ({"model": relu_as_before}, {"model": tanh_instead}, "Small.hybrid_forward()"),
        "a dropout rate": ({}, {"model": lambda: small(rate=0.2)}, "model.drop"),
        "the momentum of batch norm": ({}, {"model": lambda: small(momentum=0.7)}, "model.norm"),
        "a frozen layer": ({}, {"model": lambda: small(frozen=True)}, "model.first"),
        "a hook": ({"model": lambda: hooked(1)}, {"model": lambda: hooked(2)}, "<lambda>()"),
        "the formula of a schedule": ({"schedule": lambda t: 0.1}, {"schedule": lambda t: 0.1 + t}, "<lambda>()"),
        "how an optimizer is made": ({"optimizer": lambda: sgd(learning_rate=0.1)},
                                     {"optimizer": lambda: sgd(0.0, learning_rate=0.1)}, "<lambda>()"),
        "a scheduler": ({"schedule": lambda: step(5, 0.5)}, {"schedule": lambda: step(6, 0.5)}, "schedule"),
    }  # fmt: skip


def settings():
    """Settings of the framework that change numbers: how to set each, and how to put it back."""

    def variable(name, value):
        return lambda: os.environ.update({name: value}), lambda: os.environ.pop(name)

    return {
        "np_shape": (lambda: mx.util.set_np_shape(True), lambda: mx.util.set_np_shape(False)),
        "safe accumulation": variable("MXNET_SAFE_ACCUMULATION", "1"),
        "sums of gradients": variable("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "1"),
        "size of bulks": (lambda: mx.engine.set_bulk_size(1), lambda: mx.engine.set_bulk_size(15)),
    }


# What breaks the rules (test_rehearsal.py)


class Plain(gluon.Block):
    def __init__(self, factor=lambda: 1.0):
        super().__init__()
        self.factor = factor
        with self.name_scope():
            self.inner, self.outer = nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8)
        mx.random.seed(0)
        self.initialize()

    def forward(self, x):
        return self.outer(self.inner(x)) * self.factor()


class ThroughALambda(Plain):
    def __init__(self):
        super().__init__()
        self.through = lambda x: self.outer(x)

    def forward(self, x):
        return self.through(self.inner(x))


class LearnedScale(gluon.Block):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1,), init="ones")
        self.initialize()

    def forward(self, output, y):
        return entropy_of(output * self.scale.data(), y)


def entropy_of(output, y):
    return gluon.loss.SoftmaxCrossEntropyLoss()(output, y)


def call_itself():
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x)
    return model


def unruly(counter, draws):
    """What is done → the model, settings, what the error says, and what happens without a rehearsal."""
    other = "(the loss|its result) is not the same"
    return {
        "a model calls itself through a closure": (call_itself, {}, "depends on a parameter", None),
        "a layer is called through a closure": (ThroughALambda, {}, "depends on a parameter", None),
        "Python's random": (lambda: Plain(draws.random), {}, f"{other}.*Python's", "differs"),
        "a counter": (lambda: Plain(counter), {}, other, "differs"),
        "a loss with a counter": (Plain, {"loss": lambda o, y: entropy_of(o, y) * counter()}, other, "differs"),
        "a loss with a parameter": (Plain, {"loss": LearnedScale()}, "a parameter .'.*scale' of the loss", None),
    }  # fmt: skip


def late(counter):
    """A model that begins to look at a counter after some calls."""
    return Plain(counter)

"""A loop of one's own makes the steps that a fit makes of the same batches, on any number of devices, saved and loaded."""

import gc
import threading

import pytest

import samestep as ss
from conformance import suite
from samestep import draws

KIND = "cuda" if ss.num_gpus() else "cpu"
N, BATCH, EPOCHS = 22, 8, 2


def settings():
    return {"optimizer": ss.adamw(weight_decay=0.1), "shards": 3, "gradient_clip_val": 0.5, "seed": 7}


def steps(data):
    """The batches of a fit, and its rate."""
    for epoch in range(EPOCHS):
        order = draws.order(7, epoch, N)
        for start in range(0, N, BATCH):
            index = order[start : start + BATCH]
            yield data.train.x[index], data.train.y[index]


@pytest.mark.parametrize("model", ["mlp_with_dropout", suite.NORMED])
def test_the_steps_of_a_fit(model, tmp_path):
    data, make = suite.data(model, N), getattr(suite.zoo, model)
    run = ss.Trainer(EPOCHS, BATCH, devices=KIND, schedule=0.01, progress=False, **settings()).fit(make(), data)
    group = ss.Group(make(), devices=[KIND] * 2, batch_size=BATCH, **settings())
    made, path = [], tmp_path / "group.safetensors"
    for i, (x, y) in enumerate(steps(data)):
        made.append(group.step(x, y, lr=0.01))
        if i == 2:
            group.save(path)
            group = ss.Group.load(path, make(), devices=[KIND] * 3, gradient_clip_val=0.5, batch_size=BATCH)
    assert [one.fingerprint for one in made] == run.fingerprints
    assert (group.fingerprint, group.rank) == (run.fingerprint, 0)
    assert (group.steps, made[-1].step) == (len(made), len(made))
    loss = sum(one.loss * n for one, n in zip(made[3:], (8, 8, 6), strict=True)) / N
    assert loss == pytest.approx(run.history[1]["train_loss"], abs=1e-6)
    last = run.history[-1]
    assert group.evaluate(data.test.x, data.test.y) == {"loss": last["test_loss"], "accuracy": last["test_accuracy"]}
    trained = ss.Trainer(devices=KIND, shards=3).evaluate(group.model, data)
    assert trained["accuracy"] == last["test_accuracy"]


@pytest.mark.skipif(suite.BACKEND != "torch", reason="only PyTorch has memory formats")
def test_groups_of_two_memory_formats_take_turns():
    data, make = suite.data("lenet_modern", N), suite.zoo.lenet_modern
    given = [settings() | {"memory_format": name} for name in ("contiguous", "channels_last")]
    runs = [
        ss.Trainer(EPOCHS, BATCH, devices=KIND, schedule=0.01, progress=False, **one).fit(make(), data) for one in given
    ]
    groups = [ss.Group(make(), devices=[KIND] * 2, **one) for one in given]
    found = [[group.step(x, y, lr=0.01).fingerprint for group in groups] for x, y in steps(data)]
    assert [list(prints) for prints in zip(*found, strict=True)] == [run.fingerprints for run in runs]
    assert runs[0].fingerprints != runs[1].fingerprints


def test_two_groups_take_turns():
    data = suite.data("mlp_with_dropout", N)
    alone = ss.Group(suite.zoo.mlp_with_dropout(), devices=KIND, **settings())
    both = [ss.Group(suite.zoo.mlp_with_dropout(), devices=KIND, **settings()) for _ in range(2)]
    expected = [alone.step(x, y, lr=0.01).fingerprint for x, y in steps(data)]
    found = [[group.step(x, y, lr=0.01).fingerprint for group in both] for x, y in steps(data)]
    assert found == [[one, one] for one in expected]
    del alone, both
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("samestep")]


def test_the_rate_of_an_optimizer():
    """It is followed by a fit and by a loop of one's own, and the history has it as it was written."""
    data, make = suite.data("mlp_with_dropout", N), suite.zoo.mlp_with_dropout
    given = settings() | {"optimizer": ss.sgd(momentum=0.9, lr=ss.drops(0.05, [1], 0.6).in_epochs(3))}
    run = ss.Trainer(EPOCHS, BATCH, devices=KIND, progress=False, **given).fit(make(), data)
    assert [row["lr"] for row in run.history] == [0.05, 0.03]
    group = ss.Group(make(), devices=[KIND] * 2, **given)
    assert [group.step(x, y).fingerprint for x, y in steps(data)] == run.fingerprints
    plain = ss.Group(make(), devices=KIND, **given | {"optimizer": ss.sgd(momentum=0.9)})
    assert [plain.step(x, y).fingerprint for x, y in steps(data)] != run.fingerprints


def theirs(model):
    """An optimizer of the framework, with a rate of its own that a group may replace."""
    if suite.BACKEND == "torch":
        import torch

        return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    if suite.BACKEND == "jax":
        import optax

        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.25, momentum=0.9)
    if suite.BACKEND == "tensorflow":
        import keras

        return keras.optimizers.SGD(0.25, momentum=0.9)
    if suite.BACKEND == "paddle":
        import paddle

        return lambda parameters: paddle.optimizer.Momentum(0.25, 0.9, parameters)
    import mxnet

    return mxnet.optimizer.SGD(momentum=0.9, learning_rate=0.25)


BY_HAND = [0.25, 0.25, 0.1, 0.1, 0.3, 0.1]  # the rates of the six steps: 0.1 is set after two, 0.3 is for one step


@pytest.mark.parametrize("whose", ["samestep's", "the framework's"])
def test_a_rate_set_by_hand(whose, tmp_path):
    """It holds until another is set, in this group and in one that is loaded; a schedule with these rates has the same bits."""
    data, path = suite.data("mlp_with_dropout", N), tmp_path / "group.safetensors"

    def given(lr=None):
        model = suite.zoo.mlp_with_dropout()
        ours = {"optimizer": ss.sgd(lr, momentum=0.9)} if whose == "samestep's" else {"optimizer": theirs(model)}
        return model, settings() | ours

    model, ours = given(0.25 if whose == "samestep's" else None)
    group, made = ss.Group(model, devices=[KIND] * 2, **ours), []
    assert (group.lr, group.rates) == (0.25, [])
    for i, (x, y) in enumerate(steps(data)):
        if i == 2:
            group.lr = 0.1
            assert (group.lr, group.rates) == (0.1, BY_HAND[:2])
        if i == 3:
            group.save(path)
            model, ours = given()
            again = {} if whose == "samestep's" else {"optimizer": ours["optimizer"]}
            group = ss.Group.load(path, model, devices=[KIND] * 3, gradient_clip_val=0.5, **again)
            assert (group.lr, group.rates) == (0.1, BY_HAND[:3])
        made.append(group.step(x, y, lr=0.3 if i == 4 else None))
        assert group.rates == BY_HAND[: i + 1]
    group.lr = None
    assert group.lr == 0.25
    twin, prints = settings() | {"optimizer": ss.sgd(ss.table(BY_HAND), momentum=0.9)}, []
    if whose == "samestep's":
        other = ss.Group(suite.zoo.mlp_with_dropout(), devices=KIND, **twin)
        prints = [other.step(x, y).fingerprint for x, y in steps(data)]
        assert other.rates == BY_HAND
    else:
        model, ours = given()
        other = ss.Group(model, devices=KIND, **ours)
        prints = [other.step(x, y, lr=lr).fingerprint for (x, y), lr in zip(steps(data), BY_HAND, strict=True)]
    assert [one.fingerprint for one in made] == prints
    model, ours = given(0.25 if whose == "samestep's" else None)
    left = ss.Group(model, devices=KIND, **ours)  # nobody sets its rate
    found = [left.step(x, y).fingerprint for x, y in steps(data)]
    assert [a == b for a, b in zip(found, prints, strict=True)] == [True] * 2 + [False] * 4
    assert left.rates == [0.25] * 6

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

"""unit="epoch": whatever gives the rate counts epochs, and the rate of count e holds through epoch e."""

import pytest
from patience import be_patient

import samestep as ss
from conformance import suite
from samestep.errors import Invalid

KIND = "cuda" if ss.num_gpus() else "cpu"
N, BATCH, EPOCHS = 22, 8, 4
RATES = [0.1, 0.1, 0.05, 0.05]  # of the epochs, of three steps each


def schedulers():
    """Those of the framework that give these rates, if they count epochs from 0."""
    if suite.BACKEND == "torch":
        import torch

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return {"StepLR": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}
    if suite.BACKEND == "jax":
        import optax

        return {"optax": optax.piecewise_constant_schedule(0.1, {2: 0.5})}
    if suite.BACKEND == "tensorflow":
        import keras

        return {"keras": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)}
    if suite.BACKEND == "paddle":
        import paddle

        return {"StepDecay": paddle.optimizer.lr.StepDecay(0.1, 2, 0.5)}
    import mxnet

    return {"MultiFactorScheduler": mxnet.lr_scheduler.MultiFactorScheduler([1], 0.5, base_lr=0.1)}  # from 2 on


def fit(count=1, **settings):
    given = {"optimizer": ss.sgd(momentum=0.9), "devices": [KIND] * count, "shards": 3, "progress": False} | settings
    return ss.Trainer(EPOCHS, BATCH, **given).fit(suite.zoo.mlp_with_dropout(), suite.data("mlp_with_dropout", N))


def rate_of_epoch(epoch):
    return RATES[epoch]


@pytest.fixture(scope="module")
def expected():
    """The run with these rates, from a schedule of samestep's in epochs."""
    run = fit(schedule=ss.table(RATES).in_epochs())
    assert [row["lr"] for row in run.history] == RATES
    return run


def test_a_schedule_and_a_function(expected):
    suite.same(fit(2, schedule=ss.table(RATES), unit="epoch"), expected)
    run = fit(2, lr=rate_of_epoch, unit="epoch")
    suite.same(run, expected)
    assert run.recipe["unit"] == "epoch"
    steps = fit(schedule=lambda t: RATES[min(t, 3)])
    assert steps.fingerprints != expected.fingerprints
    assert "unit" not in steps.recipe


@pytest.mark.parametrize("name", schedulers())
def test_a_scheduler_of_the_framework(name, expected):
    suite.same(fit(3, schedule=schedulers()[name], unit="epoch"), expected)
    assert fit(schedule=schedulers()[name]).fingerprints != expected.fingerprints


@pytest.mark.parametrize("kind", ["function", "scheduler"])
def test_a_resume_in_the_middle(kind, expected, tmp_path, monkeypatch):
    """It goes on with the same rates, on another number of devices; with another unit it is refused."""
    be_patient(monkeypatch)

    def settings(folder):
        schedule = rate_of_epoch if kind == "function" else next(iter(schedulers().values()))
        return {"schedule": schedule, "unit": "epoch", "run_dir": tmp_path / folder, "checkpoint_every": 2}

    fit(**settings("first"), keep_checkpoints=9)
    middle = tmp_path / "first" / "checkpoints" / "step-000000008.safetensors"  # two steps into epoch 2
    run = fit(2, **settings("second"), resume=middle)
    assert run.resumed == 8
    suite.same(run, expected)
    with pytest.raises(Invalid, match="unit is None, was 'epoch'"):
        fit(**settings("third") | {"unit": "step"}, resume=middle)

"""Averages over the path of the weights: against averages worked out by hand from every step's weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance import suite
from patience import one_by_one
from safetensors.numpy import load_file
from torch import nn

import samestep as ss
from samestep.errors import Invalid, WrongType
from samestep.optimizers.averaging import Average, Averager, Exponential, ema, path_average, swa
from samestep.schedules.kinds import cosine
from samestep.training.replicas import Replicas

STEPS, EPOCHS = 4, 4  # 61 examples in batches of 16: the last has 13
ROUNDING = 1e-14  # relative, float64: a running mean of up to 16 vectors against their sum, divided once


def net(dtype=torch.float64):
    """Batch norm has buffers of real numbers, a running mean and variance, and a whole number, a counter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype=np.float64):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((81, 12)).astype(dtype), random.integers(0, 3, 81)
    return ss.Data((x[:61], y[:61]), (x[61:], y[61:]))


def trainer(**settings):
    base = {"max_epochs": EPOCHS, "batch_size": 16, "shards": 4, "progress": False, "devices": "cpu"}
    return ss.Trainer(**base | {"optimizer": ss.sgd(momentum=0.9), "schedule": cosine(0.3, 20)} | settings)


@pytest.fixture
def path(monkeypatch):
    """The weights and buffers at the start and after every step of a fit, by name."""
    seen, step = [], Replicas.step

    def recording(self, *args):
        if not seen:
            seen.append({name: np.array(tensor) for name, tensor in self.replicas[0].tensors().items()})
        result = step(self, *args)
        seen.append({name: np.array(tensor) for name, tensor in self.replicas[0].tensors().items()})
        return result

    monkeypatch.setattr(Replicas, "step", recording)
    one_by_one(monkeypatch)
    return seen


def check(run, points, shares):
    """The average of a run is that of these points, each with its share, and there is something to average."""
    last = points[-1]
    assert list(run.average) == list(last)
    for name in last:
        if name.endswith("num_batches_tracked"):  # a counter has no average: it stands where the training ended
            assert run.average[name] == run.weights()[name] == EPOCHS * STEPS
            continue
        assert run.average[name].dtype == last[name].dtype == np.float64
        expected = sum(share * point[name] for share, point in zip(shares, points, strict=True)) / sum(shares)
        np.testing.assert_allclose(run.average[name], expected, rtol=ROUNDING, atol=ROUNDING)
        assert len(points) == 1 or np.abs(expected - last[name]).max() > 1e-3


# The averages


@pytest.mark.parametrize(
    ("average", "steps"),
    [
        (swa(2), [8, 12, 16]),
        (swa(1, every=2), [4, 12]),
        (swa(2, every=3), [8]),
        (swa(4), [16]),
        (swa(1, unit="steps"), list(range(1, 17))),
        (swa(5, every=4, unit="steps"), [5, 9, 13]),
        (swa(16, unit="steps"), [16]),
        (swa(3, every=100, unit="steps"), [3]),
    ],
    ids=repr,
)
def test_swa_is_the_plain_mean_of_the_weights_after_these_steps(average, steps, path):
    run = trainer(average=average).fit(net(), data())
    assert len(path) == EPOCHS * STEPS + 1
    check(run, [path[t] for t in steps], [1.0] * len(steps))


def test_swa_over_epochs_is_the_mean_of_what_shorter_fits_end_with():
    ends = [trainer(max_epochs=epochs).fit(net(), data()).weights() for epochs in (2, 3, 4)]
    check(trainer(average=swa(2)).fit(net(), data()), ends, [1.0] * 3)


@pytest.mark.parametrize(
    "schedule",
    [cosine(0.3, 20), lambda t: 0.1 * (t % 3), lambda t: 0.2 if t == 3 else 0.0],
    ids=["cosine", "some", "one"],
)
def test_path_average_gives_every_weight_the_rate_with_which_it_is_left(schedule, path):
    """Also the weights before the first update; not those after the last, which no update leaves."""
    run = trainer(average=path_average(), schedule=schedule).fit(net(), data())
    rates = [schedule(t) for t in range(EPOCHS * STEPS)]
    used = [(point, rate) for point, rate in zip(path[:-1], rates, strict=True) if rate]
    check(run, *zip(*used, strict=True))


@pytest.mark.parametrize(("average", "first"), [(ema(0.75), 1), (ema(0.5, start=5), 5), (ema(0.9, 16), 16)])
def test_ema_forgets_by_its_decay_at_every_step(average, first, path):
    """The weights after step `first` are its beginning."""
    run = trainer(average=average).fit(net(), data())
    ages = [EPOCHS * STEPS - t for t in range(first, EPOCHS * STEPS + 1)]
    shares = [average.decay ** ages[0], *((1 - average.decay) * average.decay**age for age in ages[1:])]
    check(run, path[first:], shares)
    assert run.average_metrics["test_loss"] > 0


def test_one_point_is_averaged_to_itself(path):
    """To the bit, in float32 too: the mean of one is that one."""
    run = trainer(average=swa(EPOCHS)).fit(net(torch.float32), data(np.float32))
    for name, final in run.weights().items():
        assert run.average[name].dtype == final.dtype
        assert run.average[name].tobytes() == final.tobytes()


def test_a_constant_rate_makes_the_path_average_a_plain_mean(path):
    run = trainer(average=path_average(), schedule=0.1).fit(net(), data())
    check(run, path[:-1], [1.0] * (EPOCHS * STEPS))


def test_each_point_counts_as_one_in_a_checkpoint():
    """So that checkpoints of other versions can be gone on from."""
    averager = Averager(swa(2, unit="steps"), SimpleNamespace(real_vectors=lambda: [np.ones(2)]), 4, 4)
    totals = []
    for t in range(1, 5):
        averager.before(0.5)
        averager.after(t)
        totals.append(averager.total)
    assert totals == [0.0, 1.0, 2.0, 3.0]


def test_averaging_does_not_change_the_training():
    plain = trainer().fit(net(), data())
    for average in (swa(1), ema(0.5), path_average()):
        run = trainer(average=average).fit(net(), data())
        suite.same(run, plain)
        assert run.recipe == plain.recipe | {"average": repr(average)}


@pytest.mark.parametrize("average", [swa(1), swa(3, every=2, unit="steps"), path_average(), ema(0.5)], ids=repr)
def test_same_bits_on_any_number_of_devices(average):
    runs = [trainer(devices=k, average=average).fit(net(torch.float32), data(np.float32)) for k in (1, 2, 3)]
    assert [len(run.devices) for run in runs] == [1, 2, 3]
    for other in runs[1:]:
        suite.same(other, runs[0])
        assert other.average_metrics == runs[0].average_metrics
        assert list(other.average) == list(runs[0].average)
        for name, values in runs[0].average.items():
            assert other.average[name].tobytes() == values.tobytes()
    assert any((runs[0].average[name] != values).any() for name, values in runs[0].weights().items())


def test_frozen_parameters_are_in_the_average_as_they_are():
    model = net()
    model[0].requires_grad_(False)
    run = trainer(average=swa(1)).fit(model, data())
    assert run.average["0.weight"].tobytes() == model[0].weight.numpy().tobytes()
    assert (run.average["3.weight"] != run.weights()["3.weight"]).any()


# What a run makes of them


@pytest.mark.parametrize("average", [swa(2), path_average()], ids=repr)
def test_the_run_gives_weights_model_metrics_and_a_file(average, tmp_path):
    model, examples, fitting = net(), data(), trainer(average=average, run_dir=tmp_path / "run")
    run = fitting.fit(model, examples)
    averaged = run.average_model
    assert type(averaged) is nn.Sequential
    assert averaged is run.average_model
    assert not averaged.training
    for name, values in averaged.state_dict().items():
        assert values.numpy().tobytes() == run.average[name].tobytes()
    result = fitting.evaluate(averaged, examples)
    assert result["examples"] == 20
    assert run.average_metrics == {"test_loss": result["loss"], "test_accuracy": result["accuracy"]}
    assert run.average_metrics["test_loss"] != run.history[-1]["test_loss"]

    stored = load_file(tmp_path / "run" / "average.safetensors")
    assert sorted(stored) == sorted(run.average)
    assert all(stored[name].tobytes() == values.tobytes() for name, values in run.average.items())
    final = load_file(tmp_path / "run" / "weights.safetensors")
    assert all(final[name].tobytes() == values.tobytes() for name, values in run.weights().items())

    averaged[0].weight.data.zero_()  # the user's copy: nobody else's
    assert (run.average["0.weight"] != 0).any()
    assert (run.model[0].weight.detach().numpy() == run.weights()["0.weight"]).all()
    assert torch.equal(model[1].running_mean, torch.zeros(8, dtype=torch.float64))


def test_a_run_that_is_loaded_has_its_average_again(tmp_path):
    run = trainer(average=swa(2), run_dir=tmp_path / "run").fit(net(), data())
    loaded = ss.Run.load(tmp_path / "run")
    assert sorted(loaded.average) == sorted(run.average)
    assert all(loaded.average[name].tobytes() == values.tobytes() for name, values in run.average.items())
    mine = loaded.average_model(net())
    assert torch.equal(mine(torch.ones(2, 12).double()), run.average_model(torch.ones(2, 12).double()))
    assert ss.Run.load(trainer(run_dir=tmp_path / "plain").fit(net(), data()).folder).average is None


def test_the_average_is_evaluated_with_an_optimizer_of_torch_too():
    """Its parameters are those of the model that is trained, not those of the average."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitting = trainer(average=swa(2), optimizer=optimizer)
    run = fitting.fit(model, data())
    result = fitting.evaluate(run.average_model, data())
    assert run.average_metrics == {"test_loss": result["loss"], "test_accuracy": result["accuracy"]}


def test_without_test_examples_there_are_no_metrics_of_the_average():
    examples = data()
    run = trainer(average=swa(2)).fit(net(), ss.Data(examples.train))
    assert run.average_metrics is None
    assert run.average is not None
    assert run.average_model is not None


def test_without_an_average(tmp_path):
    run = trainer(run_dir=tmp_path / "run").fit(net(), data())
    assert run.average is None
    assert run.average_metrics is None
    assert run.recipe["average"] == "None"
    assert not (tmp_path / "run" / "average.safetensors").exists()
    with pytest.raises(Invalid) as caught:
        _ = run.average_model
    assert str(caught.value) == (
        "this run has no average: pass average=samestep.swa(...) to the Trainer, and ask the run itself, not run.best"
    )


def test_a_path_on_which_every_rate_is_zero_has_no_average(tmp_path):
    run = trainer(average=path_average(), schedule=0.0, run_dir=tmp_path / "run").fit(net(), data())
    assert run.average is None
    assert run.average_metrics is None
    assert not (tmp_path / "run" / "average.safetensors").exists()


# The values, and what is refused


@pytest.mark.parametrize(
    ("average", "end"),
    [
        (swa(5), "start=5 epochs"),
        (swa(17, unit="steps"), "start=17 steps"),
        (swa(5, every=2), "start=5 epochs"),
        (ema(start=17), "start=17 steps"),
    ],
    ids=repr,
)
def test_a_start_after_the_end_is_refused_before_anything_is_done(average, end, tmp_path):
    with pytest.raises(Invalid) as caught:
        trainer(average=average, run_dir=tmp_path / "run").fit(net(), data())
    assert str(caught.value) == f"{average.kind}: {end} is after the end of the training"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"start": 0}, Invalid, "swa: start must be at least 1, got start=0"),
        ({"start": -1}, Invalid, "swa: start must be at least 1, got start=-1"),
        ({"start": 1.5}, WrongType, "swa: start must be a whole number, got start=1.5"),
        ({"start": True}, WrongType, "swa: start must be a whole number, got start=True"),
        ({"start": 1, "every": 0}, Invalid, "swa: every must be at least 1, got every=0"),
        ({"start": 1, "every": "2"}, WrongType, "swa: every must be a whole number, got every='2'"),
        ({"start": 1, "unit": "hours"}, Invalid, "swa: unit must be one of 'epochs', 'steps', got unit='hours'"),
        ({"start": 1, "unit": None}, WrongType, "swa: unit must be a string, got unit=None"),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, message):
    with pytest.raises(kind) as caught:
        swa(**arguments)
    assert type(caught.value) is kind
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"decay": 1.0}, Invalid, "ema: decay must be below 1, got decay=1.0"),
        ({"decay": "slow"}, WrongType, "ema: decay must be a number, got decay='slow'"),
        ({"start": -1}, Invalid, "ema: start must be at least 0, got start=-1"),
    ],
)
def test_bad_arguments_of_ema_are_refused(arguments, kind, message):
    with pytest.raises(kind) as caught:
        ema(**arguments)
    assert str(caught.value) == message


def test_an_average_is_a_value():
    assert ema() == Exponential("ema", 0, unit="steps", decay=0.999) != ema(0.99)
    assert repr(ema(0.5, 3)) == "Exponential(kind='ema', start=3, every=1, unit='steps', decay=0.5)"
    assert swa(np.int64(3)) == swa(start=3, every=1, unit="epochs") == Average("swa", 3) != swa(3, unit="steps")
    assert {swa(3): "found"}[swa(3)] == "found"
    assert repr(swa(3, 2, "steps")) == "Average(kind='swa', start=3, every=2, unit='steps')"
    assert path_average() == Average("path") != swa(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        swa(3).start = 4  # type: ignore[misc]

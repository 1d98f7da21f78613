"""The Trainer on PyTorch: what a fit computes, what it leaves alone, and what it says to bad input."""

import inspect
import json
import multiprocessing
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep as ss
from samestep import draws, portable
from samestep.backends import find
from samestep.errors import BackendMissing, Invalid, NotDeterministic, NotFinite, OutOfMemory, WrongType
from samestep.models import torch as models
from samestep.schedules.rates import as_written
from samestep.shards import cut

ROUNDING = 1e-12  # relative, float64: the same sums in another order, over some tens of steps
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU"))]


def numbers(n=60, features=12, classes=3, dtype=np.float32):
    random = np.random.default_rng(0)
    return random.standard_normal((n, features)).astype(dtype), random.integers(0, classes, n)


def net(*layers, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(layers or (nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)))).to(dtype)


def trainer(**settings):
    return ss.Trainer(**{"max_epochs": 2, "batch_size": 16, "progress": False, "devices": "cpu"} | settings)


# What a fit computes


def test_equals_a_plain_pytorch_loop():
    """Same order, same rates: the same weights to rounding, with momentum, weight decay and a changing rate."""
    x, y = numbers(dtype=np.float64)
    model = net(dtype=torch.float64)
    start = [p.detach().clone() for p in model.parameters()]
    rate = lambda t: 0.2 / (1 + t)  # noqa: E731
    run = trainer(optimizer=ss.sgd(momentum=0.9, weight_decay=0.01), schedule=rate, seed=3).fit(model, (x, y))

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    t = 0
    for epoch in range(2):
        order = draws.order(3, epoch, len(x))
        for first in range(0, len(x), 16):
            index = torch.from_numpy(order[first : first + 16])
            optimizer.param_groups[0]["lr"] = rate(t)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.from_numpy(x)[index]), torch.from_numpy(y)[index]).backward()
            optimizer.step()
            t += 1
    assert run.history[-1]["step"] == t == 8
    for (name, weight), began in zip(model.state_dict().items(), start, strict=True):
        assert not torch.equal(weight, began)
        np.testing.assert_allclose(run.weights()[name], weight.numpy(), rtol=ROUNDING, atol=ROUNDING)


def test_batch_norm_statistics_are_those_of_the_shards_averaged():
    x, y = numbers(10, dtype=np.float64)
    model = net(nn.BatchNorm1d(12), nn.Linear(12, 3), dtype=torch.float64)
    run = trainer(max_epochs=1, batch_size=10, shards=3).fit(model, (x, y))
    order = draws.order(0, 0, 10)
    shards = [x[order[lo:hi]] for lo, hi in ((0, 4), (4, 7), (7, 10))]
    mean = 0.1 * sum(len(s) * s.mean(0) for s in shards) / 10
    variance = 0.9 + 0.1 * sum(len(s) * s.var(0, ddof=1) for s in shards) / 10
    np.testing.assert_allclose(run.weights()["0.running_mean"], mean, rtol=ROUNDING)
    np.testing.assert_allclose(run.weights()["0.running_var"], variance, rtol=ROUNDING)
    assert run.weights()["0.num_batches_tracked"] == 1


def test_history_and_evaluation_count_every_example_once():
    x, y = numbers(61)
    data = ss.Data(train=(x, y), test=(x[:37], y[:37]))
    for count in (1, 3):
        run = trainer(devices=count, schedule=0.0, max_epochs=1).fit(net(), data)
        scores = net()(torch.from_numpy(x)).detach()
        losses = F.cross_entropy(scores, torch.from_numpy(y), reduction="none").double().numpy()
        right = (scores.argmax(1).numpy() == y).astype(int)
        [row] = run.history
        assert list(row) == [
            "epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds",
        ]  # fmt: skip
        assert (row["epoch"], row["step"], row["lr"]) == (1, 4, 0.0)
        assert row["train_accuracy"] == right.sum() / 61
        assert row["test_accuracy"] == right[:37].sum() / 37
        np.testing.assert_allclose(row["train_loss"], losses.mean(), rtol=1e-6)
        np.testing.assert_allclose(row["test_loss"], losses[:37].mean(), rtol=1e-6)
        assert run.recipe["initial"] == run.fingerprint  # a rate of zero changes nothing, to the bit
        result = trainer(devices=count).evaluate(run.model, data)
        assert result == {"loss": row["test_loss"], "accuracy": row["test_accuracy"], "examples": 37}


def test_gradient_is_clipped_after_the_sum():
    x, y = numbers(16)
    before = {name: p.detach().numpy().copy() for name, p in net().named_parameters()}
    moved = {}
    for clip in (0.0, 0.01, 1e9):
        run = trainer(max_epochs=1, schedule=1.0, gradient_clip_val=clip).fit(net(), (x, y))
        moved[clip] = np.concatenate([(before[n] - w).ravel() for n, w in run.weights().items()]).astype(np.float64)
    assert np.linalg.norm(moved[0.0]) > 0.1
    np.testing.assert_allclose(np.linalg.norm(moved[0.01]), 0.01, rtol=1e-5)
    np.testing.assert_array_equal(moved[1e9], moved[0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_noise_differs_by_step_and_shard_and_is_the_same_with_checkpointing(kind):
    """torch.utils.checkpoint draws its dropout again in the backward pass: it must draw the same numbers."""
    seen = []

    class Dropped(nn.Module):
        def __init__(self, again):
            super().__init__()
            torch.manual_seed(0)
            self.again, self.first, self.last = again, nn.Linear(12, 8), nn.Linear(8, 3)

        def middle(self, x):
            return F.dropout(torch.tanh(self.first(x)), 0.5, self.training)

        def forward(self, x):
            if self.again:
                return self.last(torch.utils.checkpoint.checkpoint(self.middle, x, use_reentrant=False))
            hidden = self.middle(x)
            seen.append(tuple((hidden[0] == 0).tolist()))
            return self.last(hidden)

    data = numbers(64)
    settings = {"devices": [kind] * 2, "batch_size": 32, "shards": 4}
    plain = trainer(**settings, capture=False).fit(Dropped(False), data)
    assert len(set(seen)) > 10  # of 16 shards, each with 8 units dropped or not
    again = trainer(**settings).fit(Dropped(True), data)
    assert again.fingerprints == plain.fingerprints


class Attends(nn.Module):
    """Attention draws its dropout inside an operation that takes no generator."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.dense = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        x = x.view(-1, 3, 4)
        return self.dense(self.attention(x, x, x, need_weights=False)[0].flatten(1))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_dropout_is_the_same_on_any_number_of_devices(kind):
    prints = {tuple(trainer(devices=[kind] * k).fit(Attends(), numbers()).fingerprints) for k in (1, 2, 3)}
    assert len(prints) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_shared_and_channels_last_parameters(kind):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.second(self.first(self.conv(x.view(-1, 3, 2, 2)).flatten(1))))

    runs = [trainer(devices=[kind] * k).fit(Tied(), numbers()) for k in (1, 2, 3)]
    assert len({run.fingerprint for run in runs}) == 1
    weights, start = runs[0].weights(), Tied().state_dict()
    assert (weights["first.weight"] == weights["second.weight"]).all()
    assert (weights["frozen.weight"] == start["frozen.weight"].numpy()).all()
    assert all((weights[name] != start[name].numpy()).any() for name in ("conv.weight", "first.weight", "first.bias"))
    trained = runs[0].model
    assert trained.first.weight is trained.second.weight
    assert trained.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not trained.frozen.weight.requires_grad


def test_lazy_weights_are_made_from_the_first_example():
    torch.manual_seed(0)
    run = trainer().fit(nn.Sequential(nn.LazyLinear(3)), numbers())
    assert run.weights()["0.weight"].shape == (3, 12)


def test_a_loss_may_give_a_value_per_example_or_their_mean_or_their_sum():
    x, y = numbers(dtype=np.float64)
    losses = {None: 0.1, nn.CrossEntropyLoss(): 0.1, nn.CrossEntropyLoss(reduction="none"): 0.1,
              nn.CrossEntropyLoss(reduction="sum"): 0.1 / 20}  # fmt: skip # which is the sum over a batch of 20
    weights = [trainer(loss=loss, schedule=rate, batch_size=20).fit(net(dtype=torch.float64), (x, y)).weights()["0.weight"]
               for loss, rate in losses.items()]  # fmt: skip
    for other in weights[1:]:
        np.testing.assert_allclose(other, weights[0], rtol=ROUNDING, atol=ROUNDING)


def test_regression_has_no_accuracy():
    x, _ = numbers()
    run = trainer(loss=nn.MSELoss()).fit(net(nn.Linear(12, 1)), ss.Data((x, x[:, :1] * 2), (x, x[:, :1] * 2)))
    first, last = run.history
    assert first["train_accuracy"] is None
    assert last["test_accuracy"] is None
    assert 0 < last["test_loss"] < first["test_loss"]


def test_the_rate_of_update_t_is_schedule_of_t():
    asked = []

    def schedule(t):
        asked.append(t)
        return 0.1 if t < 5 else 0.25

    run = trainer(schedule=schedule).fit(net(), numbers())
    assert asked == list(range(8))
    assert [row["lr"] for row in run.history] == [0.1, 0.25]  # as it was written


# What a fit leaves alone


def test_a_fit_leaves_model_generator_and_settings_alone_and_a_second_one_starts_anew():
    model = net()
    model[0].eval()
    start = {name: p.clone() for name, p in model.state_dict().items()}
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    runs = [trainer(devices=2).fit(model, numbers()) for _ in range(2)]
    assert runs[0].fingerprint == runs[1].fingerprint
    assert all(torch.equal(p, start[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert not model[0].training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    trained = runs[0].model
    assert all((p.numpy() == runs[0].weights()[name]).all() for name, p in trained.state_dict().items())
    trained[0].weight.data.zero_()  # the user's copy: nobody else's
    assert (runs[0].weights()["0.weight"] != 0).any()
    assert (runs[1].model[0].weight != 0).any()


def test_one_fit_at_a_time():
    """PyTorch's settings are the process's own, so a second fit inside the first is refused, and the next one works."""
    inner = []

    def schedule(t):
        with pytest.raises(Invalid, match="^a fit or an evaluation is already going on in this process"):
            trainer().fit(net(), numbers())
        inner.append(t)
        return 0.1

    trainer(max_epochs=1, schedule=schedule).fit(net(), numbers())
    assert inner == [0, 1, 2, 3]
    assert trainer(max_epochs=1).fit(net(), numbers()).history


def test_a_run_keeps_the_weights_and_lets_go_of_the_rest():
    run = trainer(devices=2).fit(net(), numbers())
    assert inspect.getclosurevars(run._maker).nonlocals["first"].lane._held == {}
    assert torch.equal(run.model[0].weight, torch.from_numpy(run.weights()["0.weight"]))


def test_prepare_batch_and_prepare_model():
    model, x = net(), torch.ones(2, 12)
    prepared = trainer().prepare_model(model)
    assert torch.equal(prepared(x), model(x))
    assert prepared[0].weight.data_ptr() != model[0].weight.data_ptr()
    assert trainer().prepare_batch((x, x))[1] is x
    assert isinstance(trainer().prepare_batch([np.ones(3, np.float32)])[0], torch.Tensor)


def test_prepare_takes_the_first_device_and_the_framework_of_the_first_array(monkeypatch):
    asked, of_array = [], find.of_array
    monkeypatch.setattr("samestep.training.trainer.resolve", lambda *given: [ss.cpu(), ss.gpu(99)])
    monkeypatch.setattr("samestep.training.trainer.of_array", lambda array: asked.append(array) or of_array(array))
    x, y = torch.ones(2, 12), np.ones(2)
    assert [array.device.type for array in trainer().prepare_batch((x, y))] == ["cpu", "cpu"]
    assert [array is x for array in asked] == [True]
    assert trainer().prepare_model(net())[0].weight.device.type == "cpu"


def test_evaluation_looks_at_labels_unless_the_loss_is_ones_own(monkeypatch):
    x, y = numbers()
    with pytest.raises(Invalid, match="^train y: labels must be from 0 to 2, .* got labels from 1 to 3$"):
        trainer().evaluate(net(), (x, y + 1))
    monkeypatch.setattr(multiprocessing.current_process(), "name", "somebody else's")  # only samestep's own do not fit
    far = trainer(loss=lambda output, y: (output.sum(1) - y) ** 2).evaluate(net(), (x, y + 1000))
    assert far["loss"] > 1e5


def test_what_a_trainer_is_without_any_setting():
    settings = {name: getattr(ss.Trainer(), name) for name in ss.Trainer.__dataclass_fields__ if name != "_"}
    assert settings == {
        "max_epochs": 10, "batch_size": 256, "shards": 8, "devices": "auto", "optimizer": ss.sgd(), "schedule": None,
        "groups": {}, "gradient_clip_val": 0.0, "gradient_clip_algorithm": "norm", "seed": 0, "average": None, "run_dir": None,
        "checkpoint_every": "1 epoch",
        "keep_checkpoints": 3, "resume": "auto", "progress": None, "threads_per_shard": 1, "loss": None,
        "sampling": "without_replacement", "capture": True, "deterministic": True, "rehearse": True,
        "check_every": "auto", "state": (), "timeout": 300.0, "portable": portable.wanted(), "accept": (), "num_gpus": None,
        "metrics": {}, "monitor": None, "mode": "min", "patience": None, "lr": None, "unit": "step", "profile": None,
            "precision": "float32", "memory_format": "auto", "compile": False, "streams": None,
    }  # fmt: skip


def test_settings_at_the_edge_of_what_is_allowed():
    large = 2**20 + 1
    for name in ("max_epochs", "batch_size", "threads_per_shard", "keep_checkpoints"):
        assert [getattr(ss.Trainer(**{name: count}), name) for count in (1, large)] == [1, large]
    assert ss.Trainer(shards=large - 1).shards == large - 1
    assert ss.Trainer(seed=2**64 - 1).seed == 2**64 - 1
    assert ss.Trainer(resume=False).resume is False
    assert ss.Trainer(accept=["numerics", "code", "data"]).accept == ("numerics", "code", "data")
    assert ss.Trainer(checkpoint_every="30 s").checkpoint_every == "30 s"
    assert ss.Trainer(progress=None, portable=False).progress is None


def test_epochs_and_batch_size_may_be_given_without_their_names():
    assert ss.Trainer(3, 32) == ss.Trainer(max_epochs=3, batch_size=32)
    with pytest.raises(TypeError, match="takes from 1 to 3 positional arguments but 4 were given"):
        ss.Trainer(3, 32, 8)


def test_num_gpus_is_the_chapters_name_for_devices():
    assert len(trainer(num_gpus=2).fit(net(), numbers()).devices) == 2
    assert trainer(num_gpus=0).fit(net(), numbers()).devices == ["cpu"]


def test_overrides_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SAMESTEP_OVERRIDES", json.dumps({"devices": 3, "max_epochs": 1}))
    run = trainer().fit(net(), numbers())
    assert (len(run.devices), len(run.history)) == (3, 1)
    assert trainer(num_gpus=2).devices == 3
    monkeypatch.setenv("SAMESTEP_OVERRIDES", json.dumps({"epochs": 1}))
    with pytest.raises(Invalid, match="Trainer has no 'epochs'"):
        trainer()


def test_lr_is_another_name_for_schedule():
    assert trainer(lr=0.05) == trainer(schedule=0.05)
    assert trainer(lr="cosine(0.3, 20)").schedule == ss.cosine(0.3, 20)
    given = trainer(optimizer=ss.adam(beta1=0.8, lr=ss.cosine(0.3, 20).in_epochs()))
    assert (given.optimizer, given.schedule) == (ss.adam(beta1=0.8), ss.cosine(0.3, 20).in_epochs())
    assert replace(given, schedule=0.5).schedule == ss.constant(0.5)  # what was made can be changed
    run = given.fit(net(), numbers())
    assert [row["lr"] for row in run.history] == [0.3, as_written(ss.cosine(0.3, 20)(1), "float32")]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 0.1, "schedule": 0.2}, "schedule=0.2 and lr=0.1"),
        ({"lr": 0.1, "optimizer": ss.adam(lr=0.2)}, "lr=0.1 and the optimizer's lr=constant(0.2)"),
        ({"schedule": ss.cosine(0.1, 9), "optimizer": ss.sgd(lr=0.1)},
         "schedule=cosine(0.1, 9) and the optimizer's lr=constant(0.1)"),
        ({"lr": 0.1, "schedule": 0.1}, "schedule=0.1 and lr=0.1"),
        ({"lr": 0, "schedule": 0}, "schedule=0 and lr=0"),
    ],
)  # fmt: skip
def test_a_rate_in_two_places_is_refused(settings, told):
    with pytest.raises(Invalid) as caught:
        trainer(**settings)
    assert str(caught.value) == f"the rate must be given in one place, got {told}: leave all but one out"


def test_a_rate_that_is_none_is_refused_by_the_name_it_was_given():
    with pytest.raises(Invalid, match="^lr must be finite and at least 0, got lr=-1.0$"):
        trainer(lr=-1)
    with pytest.raises(WrongType, match="^schedule must be a number, got schedule=True$"):
        trainer(schedule=True)


@pytest.mark.parametrize("name", ["schedule", "lr"])
@pytest.mark.parametrize(
    "written", [{}, {"lr": 0.1}, {"schedule": 0.1}, {"optimizer": ss.adam(lr=0.1)}, {"lr": 0.1, "schedule": 0.2}]
)
def test_the_rate_of_the_command_line_wins_wherever_the_script_has_written_one(name, written, monkeypatch):
    monkeypatch.setenv("SAMESTEP_OVERRIDES", json.dumps({name: 0.03}))
    given = trainer(**written)
    assert (given.schedule, given.lr) == (ss.constant(0.03), None)
    assert given.optimizer == (ss.adam() if "optimizer" in written else ss.sgd())


def test_an_optimizer_of_torch_with_a_rate_takes_a_schedule_as_before():
    run = trainer(optimizer=partial(torch.optim.Adam, lr=0.5), lr=0.03).fit(net(), numbers())
    assert run.recipe["schedule"] == "constant(0.03)"


@pytest.mark.parametrize("text", ["{bad", "3", "[1]", "[" * 100_000])
def test_overrides_that_are_no_json_object_are_refused(text, monkeypatch):
    monkeypatch.setenv("SAMESTEP_OVERRIDES", text)
    with pytest.raises(Invalid, match="^SAMESTEP_OVERRIDES must be a JSON object of settings, got .*: unset it$"):
        trainer()


# What it says to bad input


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"max_epochs": 0}, Invalid, "max_epochs must be at least 1, got max_epochs=0"),
        ({"max_epochs": 1.5}, WrongType, "max_epochs must be a whole number, got max_epochs=1.5"),
        ({"batch_size": 0}, Invalid, "batch_size must be at least 1, got batch_size=0"),
        ({"batch_size": True}, WrongType, "batch_size must be a whole number, got batch_size=True"),
        ({"shards": 0}, Invalid, "shards must be at least 1, got shards=0"),
        ({"shards": 2**20 + 1}, Invalid, "shards must be at most 1048576, got shards=1048577"),
        *(({name: 2}, WrongType, f"{name} must be True or False, got {name}=2")
          for name in ("progress", "capture", "deterministic", "portable", "rehearse")),
        *(({name: None}, WrongType, f"{name} must be True or False, got {name}=None")
          for name in ("capture", "deterministic", "rehearse")),
        ({"run_dir": 3}, WrongType, "run_dir must be a path or None, got run_dir=3"),
        ({"run_dir": "a\0b"}, WrongType, "run_dir must be a path or None, got run_dir='a\\x00b'"),
        ({"check_every": "30 s"}, Invalid, "check_every must be a number of steps or epochs, got '30 s'"),
        ({"checkpoint_every": "auto"}, Invalid,
         "checkpoint_every must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got 'auto'"),
        ({"accept": "nothing"}, Invalid, "accept takes numerics, code, data, got ('nothing',)"),
        (
            {"mode": "max", "monitor": "test_accuracy", "schedule": ss.Plateau(0.1)},
            Invalid,
            "Plateau(mode='min') follows test_accuracy, of which the Trainer says mode='max'",
        ),
        ({"mode": "max"}, Invalid, "mode='max' needs a monitor, such as monitor='test_accuracy': a lower loss is better"),
        ({"mode": "most"}, Invalid, "monitor must be a column of the history, and mode min or max, got None, 'most'"),
        ({"monitor": 3}, Invalid, "monitor must be a column of the history, and mode min or max, got 3, 'min'"),
        ({"patience": 0}, Invalid, "patience must be at least 1, got patience=0"),
        ({"sampling": 3}, Invalid, "sampling must be one of without_replacement, with_replacement, in_order, got sampling=3"),
        ({"threads_per_shard": 0}, Invalid, "threads_per_shard must be at least 1, got threads_per_shard=0"),
        ({"seed": -1}, Invalid, "seed must be at least 0, got seed=-1"),
        ({"seed": 1 << 64}, Invalid, "seed must be at most 18446744073709551615, got seed=18446744073709551616"),
        ({"schedule": -0.1}, Invalid, "schedule must be finite and at least 0, got schedule=-0.1"),
        ({"schedule": float("nan")}, Invalid, "schedule must be finite and at least 0, got schedule=nan"),
        ({"schedule": [0.1]}, WrongType, "schedule must be a number, got schedule=[0.1]"),
        ({"schedule": "cosin(1, 2)"}, Invalid, "schedule: no schedule is called 'cosin'; did you mean cosine?"),
        ({"average": "swa"}, WrongType, "average must be samestep.swa(...), ema(...) or path_average(), got 'swa'"),
        ({"gradient_clip_algorithm": "size"}, Invalid,
         "gradient_clip_algorithm must be one of 'norm', 'value', got gradient_clip_algorithm='size'"),
        ({"gradient_clip_algorithm": None}, WrongType,
         "gradient_clip_algorithm must be a string, got gradient_clip_algorithm=None"),
        ({"gradient_clip_val": -1}, Invalid, "gradient_clip_val must be finite and at least 0, got gradient_clip_val=-1.0"),
        ({"optimizer": "adam"}, WrongType,
         "optimizer must be one of samestep's, such as samestep.sgd(), or the framework's own, or a function that "
         "makes one from parameters, got 'adam'"),
        ({"loss": "mse"}, WrongType, "loss must be a function of (output, y), got 'mse'"),
        ({"sampling": "sorted"}, Invalid,
         "sampling must be one of without_replacement, with_replacement, in_order, got sampling='sorted'"),
        ({"checkpoint_every": "sometimes"}, Invalid,
         "checkpoint_every must be a number of steps, or such as '1 epoch', '30 s' or '5 min', got 'sometimes'"),
        ({"checkpoint_every": 0}, Invalid, "checkpoint_every must be at least 1, got checkpoint_every=0"),
        ({"checkpoint_every": 0.5}, WrongType,
         "checkpoint_every must be a number of steps, or such as '1 epoch' or '30 s', or None, got 0.5"),
        ({"keep_checkpoints": 0}, Invalid, "keep_checkpoints must be at least 1, got keep_checkpoints=0"),
        ({"keep_checkpoints": "all"}, WrongType, "keep_checkpoints must be a whole number, got keep_checkpoints='all'"),
        ({"keep_checkpoints": None}, WrongType, "keep_checkpoints must be a whole number, got keep_checkpoints=None"),
        ({"resume": True}, WrongType, "resume must be 'auto', False or a path, got resume=True"),
        ({"resume": None}, WrongType, "resume must be 'auto', False or a path, got resume=None"),
        ({"resume": 3}, WrongType, "resume must be 'auto', False or a path, got resume=3"),
        ({"resume": "nowhere", "run_dir": "/proc/nope"}, Invalid, "resume: nowhere is not there"),
        ({"resume": "/"}, Invalid, "resume needs a run_dir to go on in: the folder of the run, or a new one"),
        ({"timeout": 0}, Invalid, "timeout must be above 0, got timeout=0"),
        ({"timeout": -1.0}, Invalid, "timeout must be finite and at least 0, got timeout=-1.0"),
        ({"timeout": float("inf")}, Invalid, "timeout must be finite and at least 0, got timeout=inf"),
        ({"timeout": "long"}, WrongType, "timeout must be a number, got timeout='long'"),
        ({"num_gpus": -1}, Invalid, "num_gpus must be at least 0, got num_gpus=-1"),
        ({"devices": 9}, Invalid, "9 devices need at least 9 shards, got shards=8: raise shards or use fewer devices"),
        ({"devices": "tpu"}, Invalid, "unknown device 'tpu': use 'cpu', 'cuda' or 'cuda:i'"),
        ({"schedule": lambda t: float("inf")}, Invalid, "schedule(0) must be finite and at least 0, got schedule(0)=inf"),
    ],
)  # fmt: skip
def test_bad_settings(settings, kind, message):
    with pytest.raises(kind) as caught:
        trainer(**settings).fit(net(), numbers())
    assert str(caught.value) == message


@pytest.mark.parametrize("made", [ss.sgd, ss.adam, ss.adamw, ss.adagrad, ss.sgld])
def test_an_optimizer_without_its_parentheses_is_refused(made):
    with pytest.raises(WrongType, match=r"^optimizer must be one of samestep's, such as samestep.sgd\(\), .*, got <"):
        trainer(optimizer=made)


def test_a_device_that_is_not_there():
    with pytest.raises(Invalid, match=r"^device cuda:7 is not there: torch sees cpu.* on this machine$"):
        trainer(devices="cuda:7").fit(net(), numbers())


def test_models_that_cannot_be_trained():
    with pytest.raises(Invalid, match="^the model Sequential has no parameters to train$"):
        trainer().fit(nn.Sequential(nn.ReLU()), numbers())
    with pytest.raises(WrongType) as caught:
        trainer().fit({}, numbers())
    message = str(caught.value)
    assert message.startswith("model must be a model of torch (a torch.nn.Module), jax (a flax module, or ")
    assert message.endswith("; got builtins.dict")
    assert all(f"{name} (" in message for name in find.FRAMEWORKS)
    with pytest.raises(WrongType, match="must all be float32 or all float64, got bfloat16, float32"):
        trainer().fit(Mixed(), numbers())


def of(module, **attributes):
    """An object that another framework might have made: its class says so, and nothing has to be installed."""
    return type("Thing", (), {"__module__": module, **attributes})()


def array_of(module):
    return of(module, shape=(60,), __len__=lambda self: 60, __getitem__=lambda self, i: self)


MIXED = {
    "optimizer is of jax (optax._src.base.Thing)": {
        "optimizer": of("optax._src.base", init=None, update=None),
    },
    "optimizer is of tensorflow (keras.src.optimizers.Thing)": {
        "optimizer": of("keras.src.optimizers", apply_gradients=None),
    },
    "schedule is of tensorflow (keras.src.optimizers.schedules.Thing)": {
        "schedule": of("keras.src.optimizers.schedules", __call__=lambda self, t: 0.1),
    },
    "schedule is of paddle (paddle.optimizer.lr.Thing)": {"schedule": of("paddle.optimizer.lr", step=None)},
    "schedule is of mxnet (mxnet.lr_scheduler.Thing)": {
        "schedule": of("mxnet.lr_scheduler", __call__=lambda self, t: 0.1),
    },
    "loss is of paddle (paddle.nn.layer.loss.Thing)": {
        "loss": of("paddle.nn.layer.loss", __call__=lambda self, output, y: 0.0),
    },
}


@pytest.mark.parametrize(("message", "settings"), MIXED.items(), ids=MIXED)
def test_objects_of_two_frameworks_are_both_named(message, settings):
    with pytest.raises(WrongType) as caught:
        trainer(**settings).fit(net(), numbers())
    assert str(caught.value) == (
        f"{message} and the model of torch (torch.nn.modules.container.Sequential): a fit takes objects of one framework, "
        "NumPy arrays, and what samestep has itself"
    )


def test_functions_of_another_framework_are_found_by_their_module():
    def adam(rate):
        raise AssertionError("it was called")

    adam.__module__ = "optax._src.alias"
    for given in (adam, partial(adam, b1=0.5)):
        with pytest.raises(
            WrongType, match=r"^optimizer is of jax \(optax\._src\.alias\..*adam\) and the model of torch "
        ):
            trainer(optimizer=given).fit(net(), numbers())
    own = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    run = trainer(optimizer=own, loss=nn.CrossEntropyLoss()).fit(net(), numbers())
    assert len(run.history) == run.recipe["max_epochs"]  # the framework's own will do


@pytest.mark.parametrize(("which", "name"), [(0, "train x"), (1, "train y")])
def test_arrays_of_another_framework_are_named(which, name, monkeypatch):
    monkeypatch.setattr(
        "samestep.backends.arrays.same_device", lambda **arrays: None
    )  # which would ask the other framework
    pair = list(numbers())
    pair[which] = array_of("jaxlib._jax")
    for do in (trainer().fit, trainer().evaluate):
        with pytest.raises(WrongType, match=rf"^{name} is of jax \(jaxlib\._jax\.Thing\) and the model of torch \("):
            do(net(), tuple(pair))


def test_a_model_of_a_framework_that_is_not_installed(monkeypatch):
    there = find.installed
    monkeypatch.setattr("samestep.backends.find.installed", lambda name: None if name == "paddle" else there(name))
    monkeypatch.delitem(sys.modules, "samestep.backends.paddle.backend", raising=False)
    with pytest.raises(
        BackendMissing,
        match=r"^'paddle' is not installed; in a clone of samestep: pip install -c constraints.txt '\.\[paddle\]'$",
    ):
        trainer().fit(of("paddle.nn.layer.layers"), numbers())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 3), nn.Linear(3, 3).bfloat16()

    def forward(self, x):
        return self.first(x) + self.last.weight.float().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_names_step_and_shard(kind):
    x, y = numbers(60)
    x[draws.order(0, 1, 60)[16 + 5]] = np.nan  # epoch 1, second batch of 16, example 5: shard 2 of 8
    first = int(np.flatnonzero(draws.order(0, 0, 60) == draws.order(0, 1, 60)[21])[0])
    step, place = divmod(first, 16)
    with pytest.raises(NotFinite) as caught:
        trainer(devices=kind).fit(net(), (x, y))
    size = 16 if step < 3 else 12
    shard = next(s for s, (lo, hi) in enumerate(cut(size, 8)) if lo <= place < hi)
    assert str(caught.value).startswith(f"the loss is nan at step {step}, shard {shard}, with learning rate 0.1: ")


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_without_a_deterministic_kernel_is_named(kind):
    class Unpools(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(12, 3)

        def forward(self, x):
            pooled, index = F.max_pool1d(x[:, None], 2, return_indices=True)
            return self.dense(F.max_unpool1d(pooled, index, 2)[:, 0])

    with pytest.raises(
        NotDeterministic, match=r"^max_unpooling2d_forward\w* has no deterministic kernel in torch .*"
    ) as caught:
        trainer(devices=kind).fit(Unpools(), numbers())
    assert str(caught.value).endswith("use another operation, or Trainer(deterministic=False), which gives up sameness")
    run = trainer(devices=kind, deterministic=False).fit(Unpools(), numbers())
    assert run.recipe["deterministic"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_says_how_much_was_asked_and_what_to_do(kind):
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(12, 3)

        def forward(self, x):
            room = torch.ones(len(x), 1 << 44, device=x.device) if self.training else 1
            return self.dense(x) * room

    with pytest.raises(OutOfMemory) as caught:
        trainer(devices=kind).fit(Huge(), numbers(64))
    name = "cuda:0" if kind == "cuda" else "the device"
    asked = "131072.00 GiB" if kind == "cuda" else "140737488355328 bytes"
    assert str(caught.value) == (
        f"{name} ran out of memory when {asked} were asked for: raise shards (smaller shards need less), "
        "or lower the batch size"
    )


def test_what_a_model_may_not_do():
    class Forgets(nn.Module):
        def __init__(self, persistent):
            super().__init__()
            torch.manual_seed(0)
            self.dense = nn.Linear(12, 3)
            self.register_buffer("seen", torch.zeros(12), persistent=persistent)

        def forward(self, x):
            if self.training:
                self.seen += x.detach().mean(0)
            return self.dense(x - self.seen)

    with pytest.raises(Invalid, match="'seen' was written to in the forward pass.*a persistent buffer"):
        trainer().fit(Forgets(False), numbers())
    assert len({trainer(devices=k).fit(Forgets(True), numbers()).fingerprint for k in (1, 2, 3)}) == 1
    with pytest.raises(Invalid, match="batch norm needs more than one value per channel in every shard: lower shards"):
        trainer(batch_size=8).fit(net(nn.BatchNorm1d(12), nn.Linear(12, 3)), numbers())


def test_losses_and_outputs_that_make_no_sense():
    x, y = numbers()
    with pytest.raises(WrongType, match="loss must return a tensor"):
        trainer(loss=lambda output, y: 1.0).fit(net(), (x, y))
    with pytest.raises(Invalid, match=r"loss must return one value per example \(1\) or their mean, got shape \(5,\)"):
        trainer(loss=lambda output, y: torch.ones(5)).fit(net(), (x, y))
    with pytest.raises(
        WrongType, match="needs a tensor of scores per class and whole-number labels, got a tensor of shape"
    ):
        trainer().fit(net(), (x, y.astype(np.float32)))


def test_lenet_learns():
    """From the chapter's starting weights, the schedule chapter's LeNet tells ten patterns apart."""
    random = np.random.default_rng(0)
    y = np.arange(100) % 10
    x = (random.random((10, 1, 28, 28)) > 0.5)[y].astype(np.float32)
    run = trainer(max_epochs=12, batch_size=20, schedule=0.1).fit(models.lenet_modern(), (x, y))
    assert run.history[0]["train_accuracy"] < 0.5
    assert run.history[-1]["train_accuracy"] == 1.0


class Rebinds(torch.nn.Module):
    """Counts its calls by putting another tensor in the place of its buffer."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.dense(x) * self.calls


def test_a_buffer_that_is_put_in_another_ones_place_is_a_buffer_all_the_same() -> None:
    x, y = np.random.default_rng(0).random((24, 4), dtype=np.float32), np.arange(24) % 3
    given = Rebinds()
    runs = [trainer(max_epochs=2, batch_size=8, devices=k).fit(given, (x, y)) for k in (1, 2, 3)]
    assert given.calls.item() == 0  # the model that was passed is left as it was
    assert [run.weights()["calls"].item() for run in runs] == [6.0] * 3  # steps
    assert len({run.fingerprint for run in runs}) == len({tuple(run.fingerprints) for run in runs}) == 1
    with pytest.raises(Invalid, match="'calls' was written to in the forward pass.*a persistent buffer"):
        trainer(max_epochs=1, batch_size=8).fit(Rebinds(persistent=False), (x, y))

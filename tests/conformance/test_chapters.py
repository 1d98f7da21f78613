"""The chapters' names and cells, in the framework of this process."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import numpy as np
import pytest

import samestep as ss
from conformance.suite import BACKEND
from samestep import models
from samestep.d2l import chapter
from samestep.d2l.names import Accumulator, Batches
from samestep.data import fashion
from samestep.errors import Invalid

TESTS = Path(__file__).parents[1]
TAB = {framework: tab for tab, framework in chapter.TABS.items()}[BACKEND]
# The book's chapters are not part of this repository. Where they are, every cell of this framework's tab is run.
BOOK = Path(os.environ.get("SAMESTEP_CHAPTERS", TESTS.parents[1] / "shared" / "seeds"))
CHAPTERS = [file for file in sorted(BOOK.glob("*.txt")) if any(TAB in cell.tabs for cell in chapter.read(file))]
d2l = importlib.import_module(f"samestep.d2l.{BACKEND}")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Images that are on every machine, in the place of Fashion-MNIST, and few; and as MXNet's chapters have it."""
    random = np.random.default_rng(0)
    parts = [(random.random((n, 1, 28, 28), dtype=np.float32), random.integers(0, 10, n)) for n in (400, 350)]
    monkeypatch.setattr(fashion, "load", lambda: parts)
    monkeypatch.setattr(Batches, "examples", 300)
    if BACKEND == "mxnet":
        from mxnet import npx

        npx.set_np()
        yield
        npx.reset_np()
    else:
        yield


def bits(arrays) -> list[bytes]:
    return [np.ascontiguousarray(ss.get(array)).tobytes() for array in arrays]


# The chapters


@pytest.mark.filterwarnings("ignore")  # frameworks say what has a new name
@pytest.mark.parametrize("file", CHAPTERS, ids=lambda file: file.name[:3])
def test_every_cell_of_a_chapter_runs(file, tmp_path, capsys):
    """None is left out."""
    space = chapter.run(file, TAB, epochs=1, examples=300, figures=tmp_path)
    wanted = [cell.number for cell in chapter.read(file) if not cell.tabs or TAB in cell.tabs]
    out = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"^\[cell (\d+), line", out, re.M)] == wanted
    assert "left out" not in out
    drawn = {int(re.findall(r"\d+", path.name)[0]) for path in tmp_path.iterdir()}
    draws = re.compile(r"^(train\(|.*(d2l.plot|show_trace_2d)\()", re.M)
    assert drawn == {cell.number for cell in chapter.read(file) if draws.search(cell.code)} & set(wanted)
    assert "d2l" in space


@pytest.mark.filterwarnings("ignore")
def test_a_chapter_that_asks_for_what_is_not_there(capsys):
    space = chapter.run(TESTS / "d2l" / "small_chapter.md", TAB, epochs=2)
    there = space["d2l"].num_gpus()
    assert space["same"] is True
    assert np.array_equal(ss.get(space["X"]), np.ones((2, 3)))
    assert np.array_equal(ss.get(space["Z"]), np.ones((2, 3)))
    assert space["remainder"] == 3
    assert len(space["devices"]) == max(there, 1)
    assert space["animator"].Y == [[0.0, 0.5], []]
    out = capsys.readouterr().out
    assert "left out, as it is for a shell: !nvidia-smi" in out
    assert f"(2, 2, {TAB in ('mxnet', 'paddle')})" in out
    if "sizes" in space:
        assert space["sizes"] in ([3, 2], [3, 3])  # 5 rows in PyTorch, 6 in MXNet, which refuses 5
    if BACKEND == "tensorflow":
        assert space["rate"] == 0.25
        assert "CPU:0" in space["where"] or there


# Devices


def test_devices_are_the_frameworks_own_objects():
    there = d2l.num_gpus()
    assert there == ss.num_gpus(BACKEND)
    assert len(d2l.try_all_gpus()) == max(there, 1)  # the chapters' is empty without a GPU
    x = d2l.to(d2l.ones((2, 3)), d2l.try_gpu())
    assert d2l.to(x, d2l.try_gpu()) is x
    assert ss.device_of(x) == ss.try_gpu(backend=BACKEND)
    assert d2l.names._device(d2l.try_gpu(there)) == ss.cpu()
    assert d2l.names._device(d2l.cpu()) == ss.cpu()


# Data and scores


def test_batches_are_shuffled_anew_and_none_is_lost():
    train, test = d2l.load_data_fashion_mnist(128)
    assert (len(train), len(test)) == (3, 3)
    epochs = [[ss.get(y) for _, y in train] for _ in range(2)]
    assert [len(y) for y in epochs[0]] == [128, 128, 44]
    (_, labels), (test_x, test_y) = fashion.load()
    first, second = (np.concatenate(epoch) for epoch in epochs)
    assert np.array_equal(np.sort(first), np.sort(labels[:300]))
    assert np.array_equal(np.sort(second), np.sort(first))
    assert not np.array_equal(first, second)
    x, y = next(iter(test))
    expected = test_x[:128].transpose(0, 2, 3, 1) if BACKEND == "tensorflow" else test_x[:128]
    assert np.array_equal(ss.get(x), expected)
    assert np.array_equal(ss.get(y), test_y[:128])


def test_images_of_another_size():
    x, _ = next(iter(d2l.load_data_fashion_mnist(4, resize=56)[1]))
    x = ss.get(x).reshape(4, 56, 56)
    small = fashion.load()[1][0][:4, 0]
    assert np.allclose(x[:, 1:-1:2, 1:-1:2][:, 0, 0], 0.75**2 * small[:, 0, 0] + 0.75 * 0.25 * (small[:, 0, 1] + small[:, 1, 0])
                       + 0.25**2 * small[:, 1, 1])  # fmt: skip
    assert np.allclose(x.mean((1, 2)), small.mean((1, 2)), atol=2e-3)


def test_scores_stay_on_the_device_until_they_are_asked_for():
    y_hat, y = d2l.names._array(np.float32([[0, 1], [1, 0], [0, 3]])), d2l.names._array(np.array([1, 1, 1]))
    metric = Accumulator(2)
    metric.add(d2l.accuracy(y_hat, y), 3)
    metric.add(d2l.accuracy(y_hat, y), 3)
    assert not isinstance(metric.data[0], float)
    assert (metric[0], metric[1]) == (4.0, 6.0)


@pytest.mark.skipif(BACKEND != "torch", reason="its numbers may have a graph behind them")
def test_scores_keep_no_graph():
    import torch

    metric = Accumulator(1)
    metric.add(torch.ones(2, requires_grad=True).sum())
    assert not metric.data[0].requires_grad


def test_accuracy_of_a_net_on_one_device_and_on_all():
    _, test = d2l.load_data_fashion_mnist(128)
    params = d2l.init_params(3)
    net = lambda x: d2l.lenet(x, params)  # noqa: E731
    x, y = zip(*((ss.get(net(x)), ss.get(y)) for x, y in test), strict=True)
    expected = float((np.concatenate(x).argmax(1) == np.concatenate(y)).mean())
    assert d2l.evaluate_accuracy_gpu(net, test, d2l.try_gpu()) == expected
    assert d2l.evaluate_accuracy_gpu(net, test) == expected


# LeNet as a function of a list


def test_lenet_is_a_function_of_its_parameters():
    """Of the numbers that the model of this name starts from."""
    x = fashion.load()[1][0][:5]
    params = d2l.init_params(2)
    assert [array.shape for array in models.lenet_params(2)] == [tuple(p.shape) for p in params]
    images = d2l.names._array(x.transpose(0, 2, 3, 1) if BACKEND == "tensorflow" else x)
    found = ss.get(d2l.lenet(images, params))
    w = models.lenet(2)
    for name, size in (("conv1", 3), ("conv2", 5)):
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
        x = np.einsum("nchwij,ocij->nohw", windows, w[f"{name}.weight"], optimize=True)
        x = np.maximum(x + w[f"{name}.bias"][:, None, None], 0)
        side = x.shape[2] // 2
        x = x[:, :, : 2 * side, : 2 * side].reshape(*x.shape[:2], side, 2, side, 2).mean((3, 5))
    x = (
        np.maximum(x.reshape(5, -1) @ w["dense1.weight"].T + w["dense1.bias"], 0) @ w["dense2.weight"].T
        + w["dense2.bias"]
    )
    assert np.abs(found - x).max() < 1e-8 < np.abs(x).max()


# Data-parallel training by hand


def test_a_step_by_hand_has_the_same_bits_on_any_number_of_devices():
    params, batches = d2l.init_params(1), list(d2l.load_data_fashion_mnist(100)[0])
    batches += [(x[:5], y[:5]) for x, y in batches[:1]]  # fewer than shards
    found = {}
    for k in (1, 2, 3, 8):
        replicas = [d2l.get_params(params, d2l.try_gpu(i % (d2l.num_gpus() or 1))) for i in range(k)]
        for x, y in batches:
            d2l.train_batch(x, y, replicas, [d2l.try_gpu(i % (d2l.num_gpus() or 1)) for i in range(k)], lr=0.5)
        found[k] = [bits(replica) for replica in replicas]
    assert all(replica == found[1][0] for replicas in found.values() for replica in replicas)
    assert found[1][0] != bits(params)  # they moved, and the list that they began from did not
    assert bits(params) == bits(d2l.init_params(1))


def test_a_step_by_hand_is_gradient_descent():
    """With another net and loss: of a sum of squares, the gradient is known."""
    w = d2l.names._array(np.float32([1, 2]))
    replicas = [d2l.get_params([w], d2l.cpu()) for _ in range(2)]
    x = d2l.names._array(np.float32([[1, 0], [0, 1], [1, 1]]))
    y = d2l.names._array(np.float32([0, 0, 0]))
    net, loss = (lambda X, params: (X * params[0]).sum(1)), (lambda y_hat, y: y_hat * y_hat / 2)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        net = lambda X, params: tf.reduce_sum(X * params[0], 1)  # noqa: E731
    d2l.train_batch(x, y, replicas, [d2l.cpu()] * 2, 0.3, net=net, loss=loss)
    expected = np.float32([1, 2]) - np.float32(0.3) * np.float32([1 + 3, 2 + 3]) / 3
    assert [np.allclose(ss.get(replica[0]), expected) for replica in replicas] == [True, True]


def test_sums_over_devices():
    data = [d2l.ones((1, 2)) * (i + 1) for i in range(3)]
    d2l.allreduce(data)
    assert [ss.get(array).tolist() for array in data] == [[[6.0, 6.0]]] * 3


def test_a_batch_is_cut_without_a_rest():
    x, y = next(iter(d2l.load_data_fashion_mnist(10)[0]))
    xs, ys = d2l.split_batch(x, y, [d2l.cpu()] * 3)
    assert [len(piece) for piece in xs] == [len(piece) for piece in ys] == [4, 3, 3]
    assert np.array_equal(np.concatenate([ss.get(piece) for piece in ys]), ss.get(y))
    with pytest.raises(Invalid, match="must be of one length, got 10 examples and 9 labels"):
        d2l.split_batch(x, y[:9], [d2l.cpu()])


def test_the_chapters_job_has_the_same_bits_on_one_device_and_on_two(capsys):
    runs = [d2l.train(num_gpus=k, batch_size=128, lr=0.2, num_epochs=2) for k in (1, 2, 0)]
    assert len({run.fingerprint for run in runs}) == 1
    assert [len(run.devices) for run in runs] == [1, 2, 1]
    lines = capsys.readouterr().out.splitlines()
    accuracy = runs[0].history[-1]["test_accuracy"]
    assert [bool(re.fullmatch(rf"test acc: {accuracy:.2f}, \d+\.\d sec/epoch on \[.*\]", line)) for line in lines] == [
        True
    ] * 3
    other = d2l.train(1, 128, 0.2, num_epochs=2, params=d2l.init_params(7))
    same = d2l.train(1, 128, 0.2, num_epochs=2, params=d2l.init_params(0))
    assert (other.fingerprint == runs[0].fingerprint, same.fingerprint == runs[0].fingerprint) == (False, True)


# The chapters' classes


def small_module():
    if BACKEND == "torch":
        import torch

        class Small(d2l.Module):
            def __init__(self, lr=0.1):
                super().__init__()
                self.save_hyperparameters()
                self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    elif BACKEND == "paddle":
        import paddle

        class Small(d2l.Module):
            def __init__(self, lr=0.1):
                super().__init__()
                self.save_hyperparameters()
                self.net = paddle.nn.Sequential(paddle.nn.Flatten(), paddle.nn.Linear(784, 10))
    elif BACKEND == "tensorflow":
        import keras

        class Small(d2l.Module):
            def __init__(self, lr=0.1):
                super().__init__()
                self.save_hyperparameters()
                self.net = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    elif BACKEND == "mxnet":
        from mxnet.gluon import nn

        class Small(d2l.Module):
            def __init__(self, lr=0.1):
                super().__init__()
                self.save_hyperparameters()
                self.net = nn.Dense(10, in_units=784)
                self.net.initialize()
    else:
        from flax import linen as nn

        class Small(d2l.Module):
            lr: float = 0.1

            @nn.compact
            def __call__(self, x):
                return nn.Dense(10)(x.reshape((x.shape[0], -1)))

    return Small()


def test_the_chapters_trainer_uses_as_many_devices_as_it_is_told():
    data = d2l.FashionMNIST(batch_size=100)
    found = []
    for devices in (1, 2):
        d2l.manual_seed(0)
        model, trainer = small_module(), d2l.Trainer(max_epochs=2, num_gpus=devices, gradient_clip_val=1.0)
        found.append(trainer.fit(model, data))
        assert (model.lr, trainer.num_gpus, trainer.gradient_clip_val) == (0.1, devices, 1.0)
        assert model.board.xlim == [0, 2]
        assert model.board.legend == ["train_loss", "val_loss", "val_acc"]
        assert model.trainer is trainer
        if BACKEND != "jax":  # whose models hold no weights
            x, _ = next(iter(data.val_dataloader()))
            trained = np.argmax(ss.get(model(x)), 1)
            again = np.argmax(ss.get(found[-1].model(x)), 1)
            assert np.array_equal(trained, again)
    assert [len(run.devices) for run in found] == [1, 2]
    assert found[0].fingerprints == found[1].fingerprints


@pytest.mark.skipif(BACKEND != "torch", reason="one framework will do")
def test_a_modules_own_optimizer_and_loss_are_used():
    import torch

    class Own(type(small_module())):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.004)

        def loss(self, y_hat, y):
            return torch.nn.functional.cross_entropy(y_hat, y) * 0 + y_hat.square().mean()

    model = Own()
    model(torch.zeros(1, 1, 28, 28))  # an optimizer wants weights
    run = d2l.Trainer(max_epochs=1).fit(model, d2l.FashionMNIST(batch_size=100))
    assert run.history[0]["lr"] == 0.004
    assert run.recipe["optimizer"].startswith("torch.optim.Adam(")
    before = model(torch.ones(1, 1, 28, 28)).square().mean().item()
    d2l.Trainer(max_epochs=3).fit(model, d2l.FashionMNIST(batch_size=100))
    assert model(torch.ones(1, 1, 28, 28)).square().mean().item() < before


def test_methods_are_added_to_classes_as_in_the_chapters():
    class Own(d2l.Trainer):
        pass

    @d2l.add_to_class(Own)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):
        self.save_hyperparameters(ignore=["gradient_clip_val"])
        self.gpus = []

    trainer = Own(7)
    assert (trainer.max_epochs, trainer.num_gpus, hasattr(trainer, "gradient_clip_val")) == (7, 0, False)
    batch = [d2l.ones((1, 2))]
    assert d2l.Trainer(1).prepare_batch(batch)[0] is batch[0]


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    assert {"try_gpu", "train", "Module", "Trainer", "normal", "arange", "plot"} <= set(dir(d2l))
    with pytest.raises(AttributeError, match=rf"samestep.d2l.{BACKEND} has no 'nothing': it has .*try_gpu"):
        _ = d2l.nothing


def test_a_resnet_of_the_chapters():
    net = d2l.resnet18(10)
    if BACKEND == "mxnet":
        net.initialize()
    if BACKEND != "jax":
        x = np.zeros((2, 1, 32, 32), np.float32)
        assert tuple(net(d2l.names._array(x)).shape) == (2, 10)

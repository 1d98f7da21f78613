"""The defects of the chapters' code that samestep settles, in one framework: as the chapter has it, then as it is here.

What every framework must do is asked of the one of this process; a chapter's own code is run where it belongs. The rows of
PyTorch are in d2l/test_defects.py.
"""

import importlib
import re
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain

import numpy as np
import pytest

import samestep as ss
from conformance import suite
from samestep.d2l.names import Batches
from samestep.data import fashion
from samestep.errors import DevicesDiffer

d2l = importlib.import_module(f"samestep.d2l.{suite.BACKEND}").names
LR = 0.2


def only(backend):
    return pytest.mark.skipif(backend != suite.BACKEND, reason=f"the chapter's code is {backend}'s")


@pytest.fixture(autouse=True)
def one_thread():
    """Several threads of PyTorch wait for each other, for long where other tests use the same cores."""
    torch = importlib.import_module("torch") if suite.BACKEND == "torch" else None
    threads = torch and torch.get_num_threads()
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(threads)


@pytest.fixture
def numpy_arrays():
    """The chapters' first line in MXNet, npx.set_np(), for one test."""
    with ExitStack() as stack:
        if suite.BACKEND == "mxnet":
            util = importlib.import_module("mxnet.util")
            stack.enter_context(util.np_shape(True))
            stack.enter_context(util.np_array(True))
        yield


@pytest.fixture
def fashion_mnist(monkeypatch):
    """512 examples of Fashion-MNIST, and figures that are closed in the end."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    missing = "Fashion-MNIST is not on this machine, and tests fetch nothing"
    monkeypatch.setattr(fashion, "_fetch", lambda *_: pytest.skip(missing))
    found = fashion.load()
    monkeypatch.setattr(fashion, "load", lambda: found)
    monkeypatch.setattr(Batches, "examples", 512)
    yield
    pyplot.close("all")


def bits(params):
    return [ss.get(p).tobytes() for p in params]


def batch(n):
    random = np.random.default_rng(n)
    images = random.random((n, 28, 28, 1) if suite.BACKEND == "tensorflow" else (n, 1, 28, 28), dtype=np.float32)
    return d2l._array(images), d2l._array(random.integers(0, 10, n))


def replicas(k):
    params = d2l.init_params()
    return [d2l.get_params(params, d2l.cpu()) for _ in range(k)]


# The chapter's job, with samestep's names


def test_train_gives_the_same_run_on_1_2_and_3_devices(fashion_mnist, capsys):
    """And prints the chapter's line. The chapters' own k=1 and k=2 differ by 0.5 after two epochs."""
    space = {}
    exec(f"from samestep.d2l.{suite.BACKEND} import get_params, allreduce, train_batch, train", space)
    runs = [space["train"](num_gpus=k, batch_size=256, lr=0.2, num_epochs=1) for k in (1, 2, 3)]
    assert [len(run.devices) for run in runs] == [1, 2, 3]
    assert runs[0].fingerprint == runs[1].fingerprint == runs[2].fingerprint != runs[0].recipe["initial"]
    assert runs[0].fingerprints == runs[1].fingerprints == runs[2].fingerprints
    assert len(set(runs[0].fingerprints)) == 2  # of 512 examples, 256 at a time
    said = capsys.readouterr().out.splitlines()
    lines = [re.fullmatch(r"test acc: 0\.\d\d, \d+\.\d sec/epoch on \[(.+)\]", line) for line in said]
    assert [len(line[1].split(", ")) if line else said for line in lines] == [1, 2, 3]


# The rows, in the order of the table


def test_sums_in_device_order_drift_apart(numpy_arrays):
    """Sums in device order: k=1 and k=2 drift apart. One fixed tree over fixed shards: same bits for every k."""
    given, found = [batch(37), batch(20)], []
    for k in (1, 2, 3, 8):
        made = replicas(k)
        for X, y in given:
            d2l.train_batch(X, y, made, [d2l.cpu()] * k, LR)
        found += map(bits, made)
    assert found == [found[0]] * 14
    assert found[0] != bits(d2l.init_params()), "nothing was trained"


@only("mxnet")
@pytest.mark.filterwarnings("ignore:ndarray.as_in_context:DeprecationWarning")  # MXNet's own call
def test_mxnets_own_sums_drift_apart(numpy_arrays, fashion_mnist):
    """Chapter 000's definitions, which copy: k=2 is not k=1, by rounding. With samestep's train_batch it is, to the bit."""
    from mxnet import autograd, gluon, npx
    from mxnet import np as mx

    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def lenet(X, params):
        h1_conv = npx.convolution(data=X, weight=params[0], bias=params[1], kernel=(3, 3), num_filter=20)
        h1 = npx.pooling(data=npx.relu(h1_conv), pool_type="avg", kernel=(2, 2), stride=(2, 2))
        h2_conv = npx.convolution(data=h1, weight=params[2], bias=params[3], kernel=(5, 5), num_filter=50)
        h2 = npx.pooling(data=npx.relu(h2_conv), pool_type="avg", kernel=(2, 2), stride=(2, 2))
        h2 = h2.reshape(h2.shape[0], -1)
        h3 = npx.relu(mx.dot(h2, params[4]) + params[5])
        return mx.dot(h3, params[6]) + params[7]

    def get_params(params, device):
        new_params = [p.copyto(device) for p in params]
        for p in new_params:
            p.attach_grad()
        return new_params

    def allreduce(data):
        for i in range(1, len(data)):
            data[0][:] += data[i].copyto(data[0].ctx)
        for i in range(1, len(data)):
            data[0].copyto(data[i])

    def sgd(params, lr, batch_size):  # the book's d2l.sgd
        for param in params:
            param[:] = param - lr * param.grad / batch_size

    def train_batch(X, y, device_params, devices, lr):
        X_shards, y_shards = (gluon.utils.split_and_load(data, devices) for data in (X, y))
        with autograd.record():
            ls = [
                loss(lenet(X_shard, device_W), y_shard)
                for X_shard, y_shard, device_W in zip(X_shards, y_shards, device_params, strict=True)
            ]
        for l in ls:  # noqa: E741
            l.backward()
        for i in range(len(device_params[0])):
            allreduce([device_params[c][i].grad for c in range(len(devices))])
        for param in device_params:
            sgd(param, lr, X.shape[0])

    def trained(k, train_batch, get_params):
        devices, params = [npx.cpu(i) for i in range(k)], d2l.init_params()
        device_params = [get_params(params, device) for device in devices]
        for X, y in d2l.load_data_fashion_mnist(256)[0]:
            train_batch(X, y, device_params, devices, LR)
        assert all(bits(replica) == bits(device_params[0]) for replica in device_params)
        return device_params[0]

    one, two = (trained(k, train_batch, get_params) for k in (1, 2))
    apart = max(float(abs(p.asnumpy() - q.asnumpy()).max()) for p, q in zip(one, two, strict=True))
    assert 0 < apart <= 1e-5
    ours = [trained(k, d2l.train_batch, d2l.get_params) for k in (1, 2, 3)]
    assert bits(ours[0]) == bits(ours[1]) == bits(ours[2])
    assert all(np.allclose(p.asnumpy(), q.asnumpy(), atol=1e-5) for p, q in zip(one, ours[0], strict=True))


def test_allreduce_leaves_the_sum_on_every_replica(numpy_arrays):
    """Every framework's result is tested on every replica. 1, 2 → 3, 3."""
    arrays = [d2l.ones((1, 2)) * (i + 1) for i in range(3)]
    for k in (1, 2, 3):
        data = [ss.put(ss.get(array).copy(), "cpu", suite.BACKEND) for array in arrays[:k]]
        before = list(data)
        d2l.allreduce(data)
        assert [ss.get(array).tolist() for array in data] == [[[sum(range(1, k + 1))] * 2]] * k
        if suite.BACKEND in ("torch", "paddle", "mxnet"):  # whose arrays can be written to
            assert all(new is old for new, old in zip(data, before, strict=True))


@only("paddle")
@pytest.mark.filterwarnings("ignore")  # the chapter's own line
def test_paddles_allreduce_rebinds_list_entries():
    """Paddle's `allreduce` rebinds list entries, so nothing is summed. Here the gradients themselves have the sum."""
    import paddle

    def allreduce(data):
        for i in range(1, len(data)):
            data[0] += paddle.to_tensor(data[i], place=data[0].place)
        for i in range(1, len(data)):
            data[i] = paddle.to_tensor(data[0], place=data[i].place)

    def gradients():
        params = [paddle.ones([2]), paddle.ones([2])]
        for i, p in enumerate(params):
            p.stop_gradient = False
            ((i + 1) * p).sum().backward()
        return params

    theirs, ours = gradients(), gradients()
    data = [p.grad for p in theirs]
    allreduce(data)
    assert [array.tolist() for array in data] == [[3.0, 3.0]] * 2  # what the chapter prints
    assert [p.grad.tolist() for p in theirs] == [[1.0, 1.0], [2.0, 2.0]]  # what `train_batch` goes on with
    d2l.allreduce([p.grad for p in ours])
    assert [p.grad.tolist() for p in ours] == [[3.0, 3.0]] * 2


class TestUnevenBatches:
    """They raise, drop examples, or give fewer shards than devices. Here sizes differ by at most one, and nothing is lost."""

    @pytest.mark.parametrize(("n", "k"), [(5, 2), (5, 4), (7, 3), (2, 3), (256, 3)])
    def test_sizes_differ_by_at_most_one(self, n, k, numpy_arrays):
        """A batch smaller than the shards leaves some empty."""
        X, y = d2l._array(np.arange(2 * n).reshape(n, 2)), d2l._array(np.arange(n))
        pieces = d2l.split_batch(X, y, [d2l.cpu()] * k)
        for whole, parts in zip((X, y), pieces, strict=True):
            sizes = [len(part) for part in parts]
            assert len(sizes) == k
            assert max(sizes) - min(sizes) <= 1
            assert np.concatenate([ss.get(part) for part in parts if len(part)]).tolist() == ss.get(whole).tolist()

    def test_a_step_on_fewer_examples_than_devices(self, numpy_arrays):
        X, y = batch(5)
        one, eight = replicas(1), replicas(8)
        d2l.train_batch(X, y, one, [d2l.cpu()], LR)
        d2l.train_batch(X, y, eight, [d2l.cpu()] * 8, LR)
        assert [bits(replica) for replica in eight] == [bits(one[0])] * 8
        assert bits(one[0]) != bits(d2l.init_params())

    @only("torch")
    def test_torch_gives_fewer_shards_than_devices(self):
        """`scatter` cuts with it; the chapter's own step, in d2l/test_defects.py, fails on the device that gets none."""
        import torch

        assert [len(piece) for piece in torch.arange(5).chunk(4)] == [2, 2, 1]

    @only("mxnet")
    def test_mxnet_raises(self, numpy_arrays):
        from mxnet import gluon, npx

        with pytest.raises(ValueError, match="cannot be evenly split"):
            gluon.utils.split_and_load(d2l.arange(5), [npx.cpu(0), npx.cpu(1)])

    @only("paddle")
    @pytest.mark.filterwarnings("ignore")
    def test_paddle_drops_examples(self):
        import paddle

        def paddlescatter(XY, devices):
            xy = XY.shape[0] // len(devices)
            return [paddle.to_tensor(XY[i * xy : (i + 1) * xy], place=device) for i, device in enumerate(devices)]

        pieces = paddlescatter(paddle.arange(5), [paddle.CPUPlace()] * 2)
        assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3]]  # and 4 is lost


@only("mxnet")
def test_the_schedule_counts_minibatches_in_mxnet():
    """The schedule counts minibatches in MXNet, epochs elsewhere. Here the unit is explicit."""
    from mxnet import autograd, gluon, lr_scheduler, nd

    net = gluon.nn.Dense(1)
    net.initialize()
    scheduler = lr_scheduler.MultiFactorScheduler(step=[2], factor=0.5, base_lr=0.5)
    trainer, theirs = gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": scheduler}), []
    for _ in range(3):  # epochs
        for _ in range(4):
            with autograd.record():
                value = net(nd.ones((2, 3)))
            value.backward()
            trainer.step(2)
            theirs.append(trainer.learning_rate)
    assert theirs == [0.5] * 2 + [0.25] * 10  # PyTorch and TensorFlow: [0.5] * 8 + [0.25] * 4

    schedule = ss.drops(0.5, [2], 0.5)
    assert (schedule.unit, schedule.in_epochs().unit) == ("steps", "epochs")
    model, runs = "mlp_with_dropout", []
    for given in (schedule, schedule.in_epochs()):
        trainer = ss.Trainer(3, 6, schedule=given, progress=False)
        runs.append(trainer.fit(suite.zoo.mlp_with_dropout(), suite.data(model, 24)))
    steps, epochs = runs
    assert steps.schedule.values(12).tolist() == theirs
    assert epochs.schedule.values(12).tolist() == [0.5] * 8 + [0.25] * 4
    assert [row["lr"] for row in epochs.history] == [0.5, 0.5, 0.25]
    assert steps.fingerprints[:2] == epochs.fingerprints[:2]
    assert steps.fingerprints[2] != epochs.fingerprints[2]


class TestDevicesAreMixed:
    """TensorFlow and MXNet add across devices silently; JAX's `device_put` returns another object.

    Here `put` returns the same object when nothing is to be done; there is `device_of`, and a clear error.
    """

    def test_put_returns_the_same_object_when_nothing_is_to_be_done(self, numpy_arrays):
        x = d2l.ones((2, 3))
        assert ss.device_of(x) == ss.cpu()
        assert ss.put(x, "cpu") is x
        assert d2l.to(x, d2l.cpu()) is x

    @only("jax")
    def test_jaxs_device_put_returns_another_object(self):
        import jax

        x = d2l.ones((2, 3))
        assert jax.device_put(x, jax.devices("cpu")[0]) is not x
        assert ss.put(x, "cpu") is x

    @only("mxnet")
    def test_mxnet_adds_silently(self, numpy_arrays):
        from mxnet import np, npx

        X, Y = np.ones(2, ctx=npx.cpu(0)), np.ones(2, ctx=npx.cpu(1))
        assert ((X + Y).tolist(), (X + Y).ctx) == ([2.0, 2.0], npx.cpu(0))
        assert (ss.device_of(X), ss.device_of(Y)) == (ss.cpu(), ss.cpu(1))
        assert ss.put(Y, "cpu:1") is Y
        with pytest.raises(DevicesDiffer, match=r"\(x on cpu, y on cpu:1\): move them to one"):
            ss.split_batch(X, Y, 1)

    @only("tensorflow")
    def test_tensorflow_adds_silently(self):
        """In a process of its own: the CPU can be cut into two only before TensorFlow starts."""
        code = """
import samestep as ss
import tensorflow as tf
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [half, half])
with tf.device("/CPU:0"):
    X = tf.ones(2)
with tf.device("/CPU:1"):
    Y = tf.ones(2) + 0
Z = X + Y
print(Z.numpy().tolist(), ss.device_of(Z), ss.device_of(X), ss.device_of(Y), ss.put(Y, "cpu:1") is Y)
try:
    ss.split_batch(X, Y, 1)
except ss.SamestepError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines() == [
            "[2.0, 2.0] cpu cpu cpu:1 True",
            "arrays are on different devices (x on cpu, y on cpu:1): move them to one with samestep.put(x, device)",
        ], done.stderr


class TestTheLoaderBatchesBeforeItShuffles:
    """TensorFlow's loader does: the same batches in every epoch. Here, a fresh order of examples every epoch."""

    N, SIZE = 40, 8

    def passes(self, loader):
        """The labels of each batch, in two passes. An example's label is its number."""
        return [[ss.get(y).tolist() for _, y in loader] for _ in range(2)]

    @only("tensorflow")
    def test_tensorflows_loader(self):
        import tensorflow as tf

        labels = np.arange(self.N)
        train = tf.data.Dataset.from_tensor_slices((labels, labels)).batch(self.SIZE).shuffle(self.N)
        together = {tuple(range(i, i + self.SIZE)) for i in range(0, self.N, self.SIZE)}
        assert [set(map(tuple, batches)) for batches in self.passes(train)] == [together, together]

    def test_a_fresh_order_every_epoch(self, monkeypatch, numpy_arrays):
        part = np.zeros((self.N, 1, 28, 28), np.float32), np.arange(self.N)
        monkeypatch.setattr(fashion, "load", lambda: (part, part))
        train, test = d2l.load_data_fashion_mnist(self.SIZE)
        first, second = self.passes(train)
        everyone = list(range(self.N))
        assert sorted(chain(*first)) == sorted(chain(*second)) == everyone
        assert not set(map(frozenset, first)) & set(map(frozenset, second))
        assert [list(chain(*batches)) for batches in self.passes(test)] == [everyone, everyone]

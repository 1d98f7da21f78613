"""Arrays and models on a device: made there, and asked where they are."""

import numpy as np
import pytest

import samestep as ss
from conformance import suite
from samestep import models
from samestep.backends import find
from samestep.errors import DevicesDiffer, Invalid, NotBuilt, WrongType

BACKEND = find.load(suite.BACKEND)
HERE = ss.try_gpu(backend=suite.BACKEND)
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "value", "dtype"),
    [((2, 3), 0.1, "float32"), (4, -7, "int32"), ([2], 0.1, "float16"), ((3, 0), 1, "float32"), ((2,), 3, "uint8")],
)
def test_full(shape, value, dtype):
    array = ss.full(shape, value, HERE, dtype, suite.BACKEND)
    assert BACKEND.owns(array)
    assert ss.device_of(array) == HERE
    expected = np.full(shape, value, dtype)
    found = ss.get(array)
    assert (found.shape, found.dtype, found.tobytes()) == (expected.shape, expected.dtype, expected.tobytes())


def test_full_goes_through_no_copy(monkeypatch):
    for name in ("put", "copy"):
        monkeypatch.setattr(type(BACKEND), name, None)
    array = ss.full((2,), 0.5, str(HERE), backend=suite.BACKEND)
    monkeypatch.undo()
    assert ss.get(array).tolist() == [0.5, 0.5]
    assert ss.same_device(a=array, b=ss.put(X, HERE, suite.BACKEND)) == HERE


def test_what_cannot_be_made():
    for given, error, said in (
        (((2,), 1.0, "cuda:9"), Invalid, f"^device cuda:9 is not there: {suite.BACKEND} sees "),
        (((2,), 1.0, "tpu"), Invalid, "^unknown device 'tpu'"),
        (
            ((2,), "many", "cpu"),
            WrongType,
            "^full: a number is needed, and a type that holds it, got 'many' and 'float32'",
        ),
        (((2,), 1.0, "cpu", "float33"), WrongType, "got 1.0 and 'float33'$"),
        (((2,), 1.0, "cpu", None), WrongType, "got 1.0 and None$"),
        (((-2,), 1.0, "cpu"), Invalid, "^full: shape must be at least 0, got shape=-2"),
    ):
        with pytest.raises(error, match=said) as raised:
            ss.full(*given, backend=suite.BACKEND)
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(suite.BACKEND not in ("paddle", "mxnet"), reason="the others have these arrays")
def test_arrays_that_a_framework_does_not_have():
    given = ((2,), 1, "cpu", "uint16") if suite.BACKEND == "paddle" else ((), 1, "cpu")
    with pytest.raises(
        (Invalid, WrongType), match="(paddle has no uint16 arrays|no arrays without a dimension: use shape)"
    ):
        ss.full(*given, backend=suite.BACKEND)


def test_arrays_on_several_devices_are_named(monkeypatch):
    a, b = (ss.full((1,), i, HERE, backend=suite.BACKEND) for i in range(2))
    monkeypatch.setattr(type(BACKEND), "device_of", lambda self, array: HERE if array is a else ss.gpu(5))
    with pytest.raises(DevicesDiffer, match=rf"\(x on {HERE}, w on cuda:5\)"):
        ss.same_device(x=a, w=b)


# Models


def unmade():
    """Models whose weights are made when they meet an example, and a call that gives their output as NumPy."""
    if suite.BACKEND == "torch":
        import torch

        torch.manual_seed(0)
        return {"LazyLinear": torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.BatchNorm1d(3))}
    if suite.BACKEND == "jax":
        import flax.linen as nn
        import jax

        from samestep.models.jax import Pair

        def init(key, x):
            return {"w": jax.random.normal(key, (x.shape[1], 3))}

        return {"linen": nn.Dense(3), "Pair": Pair(lambda w, x: x @ w["w"], init)}
    if suite.BACKEND == "tensorflow":
        import keras

        keras.utils.set_random_seed(0)
        return {"Sequential": keras.Sequential([keras.layers.Dense(3)])}
    if suite.BACKEND == "mxnet":
        import mxnet

        mxnet.random.seed(0)
        dense = mxnet.gluon.nn.Dense(3)
        dense.initialize()
        return {"deferred": dense}
    return {}


def weights_of(model):
    return BACKEND.replica(model, None, ss.cpu(), 1).tensors()


@pytest.mark.parametrize("name", unmade() or [pytest.param("", marks=pytest.mark.skip("Paddle has no lazy layers"))])
def test_prepare_model_makes_weights_from_a_batch(name):
    trainer = ss.Trainer(devices=[HERE])
    with pytest.raises(
        NotBuilt, match=r"(no weights|no variables|no value|not made).*; or pass a batch, prepare_model\(model, x\)$"
    ):
        trainer.prepare_model(unmade()[name])
    for x in (X, ss.put(X, HERE, suite.BACKEND)):
        model = trainer.prepare_model(unmade()[name], x)
        found = weights_of(model)
        assert any(set(tensor.shape) == {3, 6} for tensor in found.values())
        again = weights_of(trainer.prepare_model(unmade()[name], X[:1]))
        assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in again.items()}
    given = unmade()[name]
    wide = trainer.prepare_model(given, np.zeros((2, 6), np.float32))
    assert weights_of(wide).keys() == found.keys()
    if suite.BACKEND == "jax":  # what was made is the prepared model's alone
        narrow = weights_of(trainer.prepare_model(given, X[:, :5]))
        assert any(set(tensor.shape) == {3, 5} for tensor in narrow.values())
    with pytest.raises(
        WrongType, match=r"^prepare_model: x must be a batch, an array with one row per example, got 1.0"
    ):
        trainer.prepare_model(unmade()[name], [1.0, 2.0])


def test_prepare_model_of_one_that_has_weights():
    model, x = suite.zoo.mlp_with_dropout(), suite.data("mlp_with_dropout", 4).train.x
    before = {name: tensor.tobytes() for name, tensor in weights_of(model).items()}
    for given in ((model,), (model, x)):
        found = weights_of(ss.Trainer(devices=[HERE]).prepare_model(*given))
        assert {name: tensor.tobytes() for name, tensor in found.items()} == before


def test_a_model_is_loaded_to_a_device():
    weights = models.lenet(seed=7)
    for device in (None, HERE, str(HERE)):
        loaded = models.load(suite.zoo.models.lenet(), weights, device)
        assert {k: v.tobytes() for k, v in weights_of(loaded).items()} == {k: v.tobytes() for k, v in weights.items()}
        arrays = BACKEND.state_dict(loaded)
        arrays = list(arrays.values()) if isinstance(arrays, dict) else list(arrays)
        where = {ss.device_of(array) for array in arrays if BACKEND.is_array(array)}
        assert where in ({ss.cpu()} if device is None else {HERE}, set())
    with pytest.raises(Invalid, match=f"^device cuda:9 is not there: {suite.BACKEND} sees "):
        models.load(suite.zoo.models.lenet(), weights, "cuda:9")
    if BACKEND.usable(ss.cpu(1)):  # MXNet has many
        loaded = models.load(suite.zoo.models.lenet(), weights, ss.cpu(1))
        assert {ss.device_of(array) for array in BACKEND.state_dict(loaded).values()} == {ss.cpu(1)}

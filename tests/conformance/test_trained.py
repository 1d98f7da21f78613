"""What a fit gives back: one model in evaluation mode, weights for the framework's own loader, the best epoch, a loaded run."""

import copy

import numpy as np
import pytest
from patience import be_patient

import samestep as ss
from conformance import suite
from samestep.backends import find
from samestep.errors import Invalid
from samestep.fingerprint import of_weights
from samestep.runs import checkpoint

N, MODEL = 46, "mlp_with_dropout"
BACKEND = find.load(suite.BACKEND)


def fit(**settings):
    given = {"max_epochs": 3, "batch_size": 16, "devices": "cpu", "schedule": 0.05, "progress": False} | settings
    return ss.Trainer(**given).fit(getattr(suite.zoo, MODEL)(), suite.data(MODEL, N))


def make():
    return suite.zoo.models.mlp((784, 32, 10), seed=5)


def scores(model):
    """What a user computes with a model, without a word about modes."""
    x = suite.data(MODEL, N).test.x
    if suite.BACKEND == "torch":
        import torch

        return model(torch.from_numpy(x)).detach().numpy()
    if suite.BACKEND == "paddle":
        import paddle

        return model(paddle.to_tensor(x)).numpy()
    if suite.BACKEND == "mxnet":
        import mxnet

        return model(mxnet.nd.array(x)).asnumpy()
    return np.asarray(model(x))


def test_the_trained_model_is_one_object_in_evaluation_mode():
    run = fit()
    assert run.model is run.model
    assert scores(run.model).tobytes() == scores(run.model).tobytes()  # with dropout, no two would be alike
    y = suite.data(MODEL, N).test.y
    assert float((scores(run.model).argmax(1) == y).mean()) == run.history[-1]["test_accuracy"]


@pytest.mark.skipif(suite.BACKEND != "torch", reason="the model is trained further by hand, in PyTorch")
def test_weights_are_those_of_the_fit_whatever_becomes_of_the_model():
    run = fit()
    for parameter in run.model.parameters():
        parameter.data.zero_()
    assert of_weights({name: array.numpy() for name, array in run.state_dict().items()}) == run.fingerprint


def test_weights_for_the_frameworks_own_loader(tmp_path):
    run, model = fit(), make()
    state = run.state_dict()
    if suite.BACKEND == "torch":
        model.load_state_dict(state)
    elif suite.BACKEND == "paddle":
        model.set_state_dict(state)
    elif suite.BACKEND == "tensorflow":
        model.set_weights(state)
    elif suite.BACKEND == "jax":
        model = type(model)(model.apply, state)
    else:
        import mxnet

        mxnet.nd.save(str(tmp_path / "net.params"), state)
        model.load_parameters(str(tmp_path / "net.params"))
    assert scores(BACKEND.evaluating(model)).tobytes() == scores(run.model).tobytes()


def test_a_loaded_run_puts_its_weights_into_a_model(tmp_path):
    run = fit(run_dir=tmp_path / "run")
    back = ss.Run.load(tmp_path / "run")
    model = make()
    before = scores(BACKEND.evaluating(model))
    trained = back.model(model)
    assert scores(trained).tobytes() == scores(run.model).tobytes() != before.tobytes()
    assert scores(model).tobytes() == before.tobytes()  # the user's own is left as it was
    assert "model(my_model)" in repr(back.model)
    named = back.state_dict()
    assert {name: ss.get(tensor).tobytes() for name, tensor in named.items()} == {
        name: tensor.tobytes() for name, tensor in run.weights().items()
    }


@pytest.mark.parametrize("folder", [False, True])
def test_the_run_at_its_best_epoch(folder, tmp_path):
    """The rate of the last epoch spoils what was learned; so does that after a resume."""
    settings = {"schedule": ss.piecewise([2], [0.05, 30.0]).in_epochs()}
    run = fit(**settings, **({"run_dir": tmp_path / "run"} if folder else {}))
    losses = [row["test_loss"] for row in run.history]
    epochs = losses.index(min(losses)) + 1
    assert epochs < 3
    short = fit(max_epochs=epochs)
    best = [run.best]
    if folder:
        best += [ss.Run.load(tmp_path / "run").best, fit(**settings, max_epochs=4, run_dir=tmp_path / "run").best]
        assert scores(best[1].model(make())).tobytes() == scores(short.model).tobytes()
    for one in best:
        assert (one.fingerprint, one.fingerprints) == (short.fingerprint, short.fingerprints)
        assert [row["test_loss"] for row in one.history] == losses[:epochs]
    assert run.best.model is run.best.model is not run.model
    assert scores(run.best.model).tobytes() == scores(short.model).tobytes() != scores(run.model).tobytes()
    assert fit(**settings, monitor="test_loss", mode="max").best.history[-1]["epoch"] == 3


def test_a_loaded_run_takes_a_model_and_no_array(tmp_path):
    fit(run_dir=tmp_path / "run", max_epochs=1)
    back = ss.Run.load(tmp_path / "run")
    with pytest.raises(TypeError, match=r"^a loaded run has no model yet: model\(my_model\) takes one of yours, got "):
        back.model(ss.put(np.zeros(3, "float32"), "cpu", suite.BACKEND))
    assert repr(copy.deepcopy(back.model)) == repr(back.model)
    assert back == ss.Run.load(tmp_path / "run")
    for tensor in back.state_dict().values():
        if (array := ss.get(tensor)).flags.writeable:  # JAX's are not
            array[...] = 7  # the user's own
    assert back == ss.Run.load(tmp_path / "run")
    assert of_weights(back.weights()) == back.fingerprint


def test_a_damaged_best_checkpoint_is_passed_over(tmp_path, monkeypatch):
    be_patient(monkeypatch)
    run = fit(run_dir=tmp_path / "run", keep_checkpoints=3)
    files = {len(checkpoint.read(path).about["history"]): path for path in checkpoint.paths(tmp_path / "run")}
    losses = {epochs: run.history[epochs - 1]["test_loss"] for epochs in files}
    best, second = sorted(losses, key=losses.get)[:2]
    assert len(ss.Run.load(tmp_path / "run").best.history) == best
    files[best].write_bytes(files[best].read_bytes()[:-1] + b"?")
    assert len(ss.Run.load(tmp_path / "run").best.history) == second


def test_a_run_without_an_epoch_has_no_best_one():
    with pytest.raises(Invalid, match="^this run has no best epoch: none has ended yet$"):
        _ = ss.Run({}, ["cpu"]).best

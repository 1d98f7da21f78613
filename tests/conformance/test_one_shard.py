"""Steps of one shard, which some backends make in one go: resumed or read from elsewhere they have the same bits, and they are
what a step by parts is, up to rounding."""

import numpy as np
import pytest

import samestep as ss
from conformance import suite
from samestep.data.examples import Feed
from samestep.optimizers.updating import FlatUpdater

OPTIMIZERS = {
    "plain": ss.sgd(),
    "momentum": ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": ss.adagrad(),
    "adam": ss.adamw(),
}
IN_ONE_GO = {
    "torch": {"plain", "momentum", "adagrad", "adam"},
    "jax": {"plain", "momentum", "adagrad"},  # Adam looks at t
    "paddle": {"plain", "momentum", "adagrad", "adam"},
    "mxnet": {"plain", "momentum", "adagrad", "adam"},
    "tensorflow": set(),
}[suite.BACKEND]


def fit(model="mlp_with_dropout", optimizer="momentum", **settings):
    given = {"shards": 1, "gradient_clip_val": 0.0, "optimizer": OPTIMIZERS[optimizer], "schedule": 0.01}
    return suite.fit(model, 1, 20, 8, **given | settings)


def by_parts(patch):
    """Have no step made in one go."""
    make = FlatUpdater.__init__

    def init(self, *given, **named):
        make(self, *given, **named)
        self.whole = False

    patch.setattr(FlatUpdater, "__init__", init)


def near(a, b):
    mine, theirs = a.weights(), b.weights()
    return all(np.allclose(mine[name], theirs[name], rtol=1e-4, atol=1e-5) for name in mine)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_which_are_made_in_one_go(optimizer, monkeypatch):
    steps = []
    step = FlatUpdater.step
    monkeypatch.setattr(FlatUpdater, "step", lambda self, *given: steps.append(1) or step(self, *given))
    fit("mlp_with_dropout" if suite.BACKEND != "paddle" else "lenet", optimizer)
    assert len(steps) == (6 if optimizer in IN_ONE_GO else 0)  # 2 epochs of 3 batches
    fit(optimizer=optimizer, gradient_clip_val=1.0)
    assert len(steps) <= 6  # the norm is that of the whole gradient


@pytest.mark.parametrize("model", ["mlp_with_dropout", suite.NORMED])
def test_one_go_is_what_a_step_by_parts_is(model, monkeypatch):
    whole = fit(model)
    with monkeypatch.context() as patch:
        by_parts(patch)
        parts = fit(model)
    assert near(whole, parts)
    assert whole.recipe == parts.recipe
    assert not near(whole, fit(model, schedule=0.011))  # a broken twin: another rate


def kept(folder):
    """Step and path of the checkpoints in the middle of an epoch; while one is being written, the next may be left out."""
    found = sorted((folder / "whole" / "checkpoints").glob("*.safetensors"))
    steps = [(int(path.stem.rpartition("-")[2]), path) for path in found]
    return [(step, path) for step, path in steps if step % 3]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_resumed_and_read_from_elsewhere(optimizer, tmp_path, monkeypatch):
    whole = fit(suite.NORMED, optimizer, run_dir=tmp_path / "whole", checkpoint_every=1, keep_checkpoints=100)
    for step, path in (kept(tmp_path)[0], kept(tmp_path)[-1]):
        resumed = fit(suite.NORMED, optimizer, run_dir=tmp_path / path.stem, resume=path)
        assert resumed.resumed == step
        suite.same(whole, resumed)
    monkeypatch.setattr(Feed, "_fits", lambda *about: False)
    suite.same(whole, fit(suite.NORMED, optimizer))


def test_a_resume_without_momentum_is_seen(tmp_path, monkeypatch):
    whole = fit(run_dir=tmp_path / "whole", checkpoint_every=1, keep_checkpoints=100)
    monkeypatch.setattr(FlatUpdater, "load", lambda self, tensors: None)
    with pytest.raises(AssertionError):
        suite.same(whole, fit(run_dir=tmp_path / "resumed", resume=kept(tmp_path)[0][1]))

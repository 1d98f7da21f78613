"""Steps of one shard: resumed, or with examples read from elsewhere, they have the same bits."""

import pytest

import samestep as ss
from conformance import suite
from samestep.data.feed import Feed
from samestep.optimizers.updating import FlatUpdater

OPTIMIZERS = {"momentum": ss.sgd(momentum=0.9, nesterov=True, weight_decay=0.01), "adam": ss.adamw()}


def fit(model="mlp_with_dropout", optimizer="momentum", **settings):
    given = {"shards": 1, "gradient_clip_val": 0.0, "optimizer": OPTIMIZERS[optimizer], "schedule": 0.01}
    return suite.fit(model, 1, 20, 8, **given | settings)


def kept(folder):
    """Step and path of the checkpoints in the middle of an epoch; while one is being written, the next may be left out."""
    found = sorted((folder / "unbroken" / "checkpoints").glob("*.safetensors"))
    steps = [(int(path.stem.rpartition("-")[2]), path) for path in found]
    return [(step, path) for step, path in steps if step % 3]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_resumed_and_read_from_elsewhere(optimizer, tmp_path, monkeypatch):
    unbroken = fit(suite.NORMED, optimizer, run_dir=tmp_path / "unbroken", checkpoint_every=1, keep_checkpoints=100)
    for step, path in sorted({kept(tmp_path)[0], kept(tmp_path)[-1]}):  # a slow disk may have kept one only
        resumed = fit(suite.NORMED, optimizer, run_dir=tmp_path / path.stem, resume=path)
        assert resumed.resumed == step
        suite.same(unbroken, resumed)
    monkeypatch.setattr(Feed, "_fits", lambda *about: False)
    suite.same(unbroken, fit(suite.NORMED, optimizer))


def test_a_resume_without_momentum_is_seen(tmp_path, monkeypatch):
    unbroken = fit(run_dir=tmp_path / "unbroken", checkpoint_every=1, keep_checkpoints=100)
    monkeypatch.setattr(FlatUpdater, "load", lambda self, tensors: None)
    with pytest.raises(AssertionError):
        suite.same(unbroken, fit(run_dir=tmp_path / "resumed", resume=kept(tmp_path)[0][1]))

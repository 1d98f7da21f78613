"""The same weights, to the last bit, on any number of devices."""

import pytest

import samestep as ss
from conformance import suite
from samestep.training.replicas import Replicas

GPU = pytest.param("cuda", marks=pytest.mark.skipif(ss.num_gpus() == 0, reason="needs a CUDA GPU"))


CASES = [(model, batches) for model in suite.MODELS for batches in suite.BATCHES]
CASES += [("resnet_with_batch_norm", "5 and a last 2")] * suite.COMPILES


@pytest.mark.parametrize(("model", "batches"), CASES)
@pytest.mark.parametrize("kind", ["cpu", GPU])
def test_same_bits_on_any_number_of_devices(kind, model, batches):
    n, batch_size = suite.BATCHES[batches]
    counts = ((2, 3, 8) if suite.COMPILES else (2, 3, 5, 7, 8)) if kind == "cpu" else (2, 3, 4)
    counts = (3,) if suite.COMPILES and model == "resnet_with_batch_norm" else counts  # compiled for a long time
    suite.check(lambda k: suite.fit(model, [kind] * k, n, batch_size), counts)


class Stopped(Exception):
    pass


def stop_after(patch, steps):
    """Fail between two steps, as whatever ends a fit from outside does."""
    step = Replicas.step

    def fail(self, batch, lr, t):
        if t == steps:
            raise Stopped
        return step(self, batch, lr, t)

    patch.setattr(Replicas, "step", fail)


@pytest.mark.parametrize("model", ["embedding", "mlp_with_dropout", suite.NORMED])
@pytest.mark.parametrize("kind", ["cpu", GPU])
def test_same_bits_when_stopped_and_resumed_on_another_number_of_devices(kind, model, tmp_path):
    """Stopped after the first of four steps on two devices, in the second epoch on three, and finished on one."""
    whole = suite.fit(model, kind)
    for steps, count in ((1, 2), (3, 3)):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, steps)
            with pytest.raises(Stopped):
                suite.fit(model, [kind] * count, run_dir=tmp_path, checkpoint_every=1)
    run = suite.fit(model, kind, run_dir=tmp_path)
    assert (whole.resumed, run.resumed) == (None, 3)
    suite.same(run, whole)


@pytest.mark.parametrize("shards", [1, 2, 7, 16])
def test_same_bits_for_any_number_of_shards(shards):
    suite.check(lambda k: suite.fit("mlp_with_dropout", k, shards=shards), [k for k in (2, 3, 16) if k <= shards])


def test_shards_seed_and_batch_size_do_change_the_bits():
    """What is in the recipe may change the result; were it not so, the comparisons above would show nothing."""
    base = suite.fit("mlp_with_dropout", 1)
    for change in (
        {"shards": 4},
        {"seed": 1},
        {"batch_size": suite.LARGE[1] + 1},
        {"schedule": 0.05},
        {"sampling": "with_replacement"},
    ):
        assert suite.fit("mlp_with_dropout", 1, **change).fingerprint != base.fingerprint, change


def test_two_threads_per_shard_are_the_same_on_any_number_of_devices():
    suite.check(lambda k: suite.fit("lenet", k, threads_per_shard=2), (3,))


@pytest.mark.parametrize("cores", [1, 5])
def test_the_number_of_cores_has_no_way_in(cores, monkeypatch):
    here = suite.fit(suite.NORMED, 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    suite.same(here, suite.fit(suite.NORMED, 2))

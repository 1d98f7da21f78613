"""Groups of weights, weights to start from, a moving average and clipping by value: in every framework, the same bits."""

import fnmatch
import functools

import numpy as np
import pytest

import samestep as ss
from conformance import suite
from samestep import fingerprint

EMBEDDING, BIAS, DENSE = (
    "[Ee]mbed*",
    "*bias",
    "[Dd]ense*[!s]",
)  # the three weights of the model, as each framework calls them


def fit(devices=1, weights=None, **settings):
    """One step, if nothing else is said."""
    given = {"max_epochs": 1, "batch_size": 12, "schedule": 0.25, "optimizer": ss.adamw()} | settings
    trainer = ss.Trainer(devices=devices, progress=False, rehearse=False, **given)
    return trainer.fit(suite.zoo.embedding(), suite.data("embedding", 12), weights=weights)


@functools.cache
def start():
    return fit(schedule=0.0)


def one(tensors, pattern):
    [name] = fnmatch.filter(tensors, pattern)
    return np.array(tensors[name])


@pytest.mark.parametrize("optimizer", [ss.adamw(), ss.sgld(temperature=0.01)], ids=repr)
def test_a_group_moves_as_all_weights_do_with_its_settings(optimizer):
    """After one step, to the bit; and weights of no group as if there were no groups."""
    plain, half = fit(optimizer=optimizer), fit(optimizer=optimizer, schedule=0.125)
    found = fit(
        optimizer=optimizer, groups={BIAS: ss.group(frozen=True), DENSE: ss.group(lr_scale=0.5), "*": ss.group()}
    )
    for pattern, same, other in ((EMBEDDING, plain, half), (DENSE, half, plain), (BIAS, start(), plain)):
        assert one(found.weights(), pattern).tobytes() == one(same.weights(), pattern).tobytes()
        assert one(found.weights(), pattern).tobytes() != one(other.weights(), pattern).tobytes()
    if optimizer == ss.adamw():
        decayed = fit(optimizer=ss.adamw(weight_decay=0.5))
        found = fit(optimizer=optimizer, groups={EMBEDDING: ss.group(weight_decay=0.5)})
        assert one(found.weights(), EMBEDDING).tobytes() == one(decayed.weights(), EMBEDDING).tobytes()
        assert one(found.weights(), DENSE).tobytes() == one(plain.weights(), DENSE).tobytes()
        assert one(found.weights(), DENSE).tobytes() != one(decayed.weights(), DENSE).tobytes()


def test_frozen_weights_have_no_part_in_the_norm():
    def moved(**settings):
        run = fit(optimizer=ss.sgd(), schedule=1.0, gradient_clip_val=0.01, **settings)
        return [one(run.weights(), pattern) - one(start().weights(), pattern) for pattern in (DENSE, BIAS)]

    alone, together = moved(groups={EMBEDDING: ss.group(frozen=True)}), moved()
    assert np.sqrt(sum((change.astype(float) ** 2).sum() for change in alone)) == pytest.approx(0.01, rel=1e-4)
    assert all(np.abs(a).max() > np.abs(b).max() > 0 for a, b in zip(alone, together, strict=True))


def test_clipping_by_value():
    settings = {"optimizer": ss.sgd(), "schedule": 1.0}
    before, plain = start().weights(), fit(**settings).weights()
    run = fit(**settings, gradient_clip_val=0.02, gradient_clip_algorithm="value")
    assert run.recipe["gradient_clip_algorithm"] == "value"
    seen = set()
    for name, found in run.weights().items():
        change = before[name] - plain[name]
        large = np.abs(change) > 0.0201  # but for rounding, the gradient
        small, limited = np.abs(change) < 0.0199, before[name] - np.sign(change) * np.float32(0.02)
        assert (found[small] == plain[name][small]).all()
        assert (found[large] == limited[large]).all()
        seen |= {*large.flat}
    assert seen == {True, False}


def test_weights_to_start_from(tmp_path):
    own, other = start(), fit(run_dir=tmp_path / "run", checkpoint_every=None)
    [name] = fnmatch.filter(own.weights(), EMBEDDING)
    run = fit(schedule=0.0, weights={name: other.weights()[name].astype(np.float64)}, devices=2)
    expected = own.weights() | {name: other.weights()[name]}
    assert all(run.weights()[key].tobytes() == tensor.tobytes() for key, tensor in expected.items())
    assert run.recipe["initial"] == run.fingerprint == fingerprint.of_weights(expected) != own.fingerprint
    for weights in (other, tmp_path / "run", str(tmp_path / "run" / "weights.safetensors")):
        assert fit(schedule=0.0, weights=weights).fingerprint == other.fingerprint


def test_all_of_it_on_any_number_of_devices_and_resumed(tmp_path):
    groups = {EMBEDDING: ss.group(lr_scale=0.5), BIAS: ss.group(frozen=True), DENSE: ss.group(weight_decay=0.5)}
    settings = {
        "max_epochs": 2,
        "batch_size": 5,
        "gradient_clip_val": 0.05,
        "groups": groups,
        "average": ss.ema(0.5, 2),
    }
    whole, *others = [fit(k, **settings) for k in (1, 2, 3)]
    fit(2, **settings | {"max_epochs": 1}, run_dir=tmp_path)
    others.append(fit(3, **settings, run_dir=tmp_path))
    assert others[-1].resumed == 3
    for run in others:
        suite.same(run, whole)
        assert run.average_metrics == whole.average_metrics
        assert all(run.average[name].tobytes() == tensor.tobytes() for name, tensor in whole.average.items())
    assert len(set(whole.fingerprints)) == 6
    assert one(whole.average, DENSE).tobytes() != one(whole.weights(), DENSE).tobytes()

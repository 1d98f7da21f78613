"""What every backend must show of modes that are set around a fit, and of state of any type."""

from __future__ import annotations

import numpy as np

import samestep as ss


def outcome(monkeypatch, around, run):
    """What `run(devices)` gives inside `around()`: (fingerprints, recipe), or the text of its refusal.

    It must be one and the same on 1 and 2 cores and on 1 and 2 devices.
    """
    found = []
    for cores in (1, 2):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        for devices in (1, 2):
            with around():
                try:
                    result = run(devices)
                    found.append((result.fingerprints, result.recipe))
                except ss.SamestepError as error:
                    found.append(str(error))
    for one in found[1:]:
        assert one == found[0]
    return found[0]


def survives(fit, make, name, value, folder, **settings):
    """Assert that state is `value` after three epochs, on 1, 2 and 3 devices and after a resume; returns the last run."""
    whole, *others = [fit(make(), devices=k, max_epochs=3, **settings) for k in (1, 2, 3)]
    first = fit(make(), devices=1, max_epochs=1, run_dir=folder, **settings)
    others.append(fit(make(), devices=2, max_epochs=3, run_dir=folder, **settings))
    assert others[-1].resumed == len(first.fingerprints) > 0
    for run in (whole, *others):
        found = run.weights()[name]
        assert found.tobytes() == np.asarray(value, found.dtype).tobytes()
        assert run.fingerprints == whole.fingerprints
    assert whole.recipe["initial"] != whole.fingerprint
    return others[-1]

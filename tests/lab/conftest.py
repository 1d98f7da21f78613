"""Made-up clothes in place of Fashion-MNIST, and figures that are closed."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from samestep.data import fashion
from samestep.lab import objectives


@pytest.fixture(autouse=True)
def clothes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    mpl.use("agg")
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 10, 3000)
    images = rng.random((3000, 1, 28, 28), np.float32) * rng.random((3000, 1, 1, 1), np.float32)
    lower = np.where(labels == 3, 0.8, 0.5) * rng.uniform(0.5, 1.5, 3000)  # no plane separates them
    images[:, :, 14:] *= lower.astype(np.float32)[:, None, None, None]
    monkeypatch.setattr(fashion, "load", lambda: ((images, labels), (images[:10], labels[:10])))
    objectives.clothes.cache_clear()
    yield
    objectives.clothes.cache_clear()
    plt.close("all")

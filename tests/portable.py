"""Fingerprints of portable runs, which are everybody's: of the conformance zoo, and of layers large enough for every kernel.

    python tests/portable.py                    compare with those in tests/portable.json
    python tests/portable.py --write            write them there: a change of bits that a review will see
    SAMESTEP_TEST_BACKEND=jax python tests/portable.py

A machine that has no AVX512, or is of another maker, can be had with `qemu-x86_64 -cpu Haswell-v4 python tests/portable.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


def fingerprints(backend: str) -> dict[str, str]:
    os.environ["SAMESTEP_PORTABLE"] = "1"  # before the imports, which take it to heart
    import numpy as np
    from conformance import suite

    import samestep as ss

    models = importlib.import_module(f"samestep.models.{backend}")
    # Products of matrices that do not fit into a CPU's caches, and many convolutions with batch norm.
    large = {"wide mlp": (lambda: models.mlp((784, 1024, 1024, 10)), 128, (1, 28, 28)),
             "resnet18 of width 16": (lambda: models.resnet18(width=16), 4, (1, 40, 40))}  # fmt: skip
    found = {}

    def tell(name: str, run: ss.Run) -> None:
        assert run.recipe["portable"]
        found[name] = run.fingerprint
        print(f"{name:<24} {found[name][:16]}", flush=True)

    for name in suite.MODELS:
        tell(name, suite.fit(name, 1, n=20, batch_size=12, shards=3))
    for name, (make, n, shape) in (large | getattr(suite.zoo, "LARGE", {})).items():
        data = np.random.default_rng(0).standard_normal((n, *shape), dtype=np.float32), np.arange(n) % 10
        tell(name, ss.Trainer(2, n, shards=2, devices=1, schedule=0.01, progress=False).fit(make(), data))
    return found


def main() -> int:
    backend = os.environ.get("SAMESTEP_TEST_BACKEND", "torch")
    known = json.loads(FILE.read_text())
    found = fingerprints(backend)
    from samestep.backends.find import installed

    version = installed(backend)
    if "--write" in sys.argv:
        known[backend] = {"version": version, "fingerprints": found}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        return 0
    expected = known.get(backend, {}).get("fingerprints", {})
    different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    print(f"{len(found)} runs of {backend} {version}, {len(different)} differences: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

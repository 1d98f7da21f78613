"""Fits every model of the suite in one of several processes: `many_processes.py FOLDER DEVICE`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance import suite

if __name__ == "__main__":
    for name in suite.MODELS:
        suite.fit(name, [sys.argv[2]], run_dir=f"{sys.argv[1]}/{name}")

"""What one of two processes does in test_wild.py: `job.py FOLDER NAME...` fits these models.

It leaves in FOLDER/rank-R.json what became of each. One start does all models, as some frameworks take long to start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from samestep.errors import SamestepError
from samestep.processes.place import find
from wild import suite


def main(folder: str, *names: str) -> None:
    suite.offline()
    seen: dict[str, Any] = {}
    for name in names:
        try:
            seen[name] = suite.outcome(suite.fit(name, ["cpu"]))
        except SamestepError as error:  # with PyTorch the next fit can go on; with MPI it says that it cannot
            seen[name] = {"refused": str(error)}
        Path(folder, f"rank-{find().rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])

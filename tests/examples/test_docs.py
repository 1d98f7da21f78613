"""Every snippet of README.md and docs/ runs as it stands: in order, in an empty folder, in a process of its own per page."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import snippets
from commands import OUTSIDE

ROOT = Path(__file__).parents[2]
PAGES = [path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]]
LIMIT = 300.0  # seconds for the blocks of one framework on one page
# Fashion-MNIST of 1,000 and 200 images stands in for the real one, which is not on every machine and takes minutes. Its
# hashes are put where those of the real one are, in every process: the snippets, the commands and the files stay as they are.
SITE = """
import json, os
from samestep.data import fashion
fashion.FILES.update({name: tuple(about) for name, about in json.load(open(os.environ["TINY_FILES"])).items()})
"""


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that runs a page."""
    folder, rng, files = tmp_path_factory.mktemp("tiny"), np.random.default_rng(0), {}
    for kind, count in (("train", 1000), ("t10k", 200)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 40, (count, 28, 28), dtype=np.uint8)
        for i, label in enumerate(labels):
            images[i, 2 * label + 2 : 2 * label + 6] += 200  # a band at the height of the class
        for name, header, array in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = bytes(header) + array.tobytes()
            files[f"{kind}-{name}-ubyte.gz"] = len(content), hashlib.sha256(content).hexdigest()
            (folder / f"{kind}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    (folder / "files.json").write_text(json.dumps(files))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return OUTSIDE | {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT / "src")]), "OPENBLAS_NUM_THREADS": "1",
        "SAMESTEP_DATA": str(folder), "TINY_FILES": str(folder / "files.json"), "COLUMNS": "120",
    }  # fmt: skip


def python_of(framework: str) -> str:
    return str(ROOT / ".venv-mxnet" / "bin" / "python") if framework == "mxnet" else sys.executable


def ran(page: Path, name: str, framework: str, folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """The status, and all that was said."""
    command = [python_of(framework), str(ROOT / "tests" / "snippets.py"), str(page), name, framework]
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the commands that it has started
    return process.returncode, said


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name: str, tmp_path: Path, environ: dict[str, str]) -> None:
    found = [block for block in snippets.blocks((ROOT / name).read_text()) if block.runs]
    for framework in dict.fromkeys(block.framework for block in found):
        if Path(python_of(framework)).exists():  # MXNet's environment is not made everywhere
            status, said = ran(ROOT / name, name, framework, tmp_path, environ)
            assert status == 0, said


def test_most_blocks_are_run() -> None:
    found = [block for name in PAGES for block in snippets.blocks((ROOT / name).read_text()) if block.why_not]
    assert len(found) <= 8, "\n".join(f"{block.line}: {block.why_not}" for block in found)


PAGE = """
<!-- setup
import os
number = 3
-->

```python
import sys
assert "torch" not in sys.modules
number += 1
```

```python title="sub/my.py"
print("ran", 1)
```

```sh
# a comment
samestep --help | grep train
python \\
    sub/my.py > told.txt
```

```console
$ echo more >> told.txt
this was printed
```

<!-- framework: jax -->
```python
import sys
from pathlib import Path
assert Path("told.txt").read_text() == "ran 1\\nmore\\n"
assert "number" not in globals()
Path("jax.txt").write_text("too")
```

<!-- not run: needs a GPU -->
```python
1 / 0
```

- in a list:

  ```python
  class Own:
      pass
  import pickle
  assert type(pickle.loads(pickle.dumps(Own()))) is Own and __name__ == "__main__"
  ```

```text
only shown
```
"""


def test_how_a_page_is_run(tmp_path: Path, environ: dict[str, str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = list(snippets.blocks(PAGE))
    assert [block.runs for block in found] == [True, True, True, True, True, True, False, True, False]
    assert [block.why_not for block in found if block.why_not] == ["needs a GPU"]
    (folder := tmp_path / "work").mkdir()
    for framework in ("torch", "jax"):
        status, said = ran(page, "page.md", framework, folder, environ)
        assert status == 0, said
    assert {path.name for path in folder.iterdir()} == {"sub", "told.txt", "jax.txt"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("number += 1", "number += one", "page.md:10: NameError: name 'one' is not defined"),
        ("number += 1", "number +=", "page.md:10: SyntaxError: invalid syntax"),
        ("number = 3", "number = 1 / 0", "page.md:4: ZeroDivisionError: division by zero"),
        ("grep train", "grep tram", "line 19: "),
        ("sub/my.py >", "sub/your.py >", "page.md: status 2 of the commands from line 18 on"),
        ("echo more", "ehco more", "line 25: ehco more"),
    ],
)
def test_a_broken_snippet_fails(old: str, new: str, told: str, tmp_path: Path, environ: dict[str, str]) -> None:
    page = tmp_path / "page.md"
    assert old in PAGE
    page.write_text(PAGE.replace(old, new))
    (folder := tmp_path / "work").mkdir()
    status, said = ran(page, "page.md", "torch", folder, environ)
    assert status == 1
    assert told in said


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("text\n```\nsamestep train\n```\n", "line 2: a block needs a language"),
        ("text\n\n    samestep train my.py\n", "line 3: a command must stand in a block of sh"),
        ("<!-- not run -->\n```python\n1\n```\n", "line 1: a mark is"),
        ("<!-- not run: later -->\nA word.\n```python\n1\n```\n", "line 2: a mark must stand right before its block"),
        ("```python\n1\n", "line 1: the block does not end"),
    ],
)
def test_a_block_that_would_be_overlooked_is_refused(page: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        list(snippets.blocks(page))

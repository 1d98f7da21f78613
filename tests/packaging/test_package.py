"""The wheel and the source archive: built, checked, and installed in a clean environment, as a user would; no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from commands import OUTSIDE

from samestep.errors import install

pytest.importorskip("build", reason="build is not installed")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "safetensors", "rich", "typer")
ENVIRONMENT = {name: value for name, value in OUTSIDE.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
FIT = """
import numpy as np, torch, samestep as ss
x = np.random.default_rng(0).standard_normal((64, 6)).astype("float32")
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
data = x, (x[:, 0] > 0).astype("int64")
prints = {ss.Trainer(2, 16, devices=n).fit(model, data).fingerprint for n in (1, 3)}
print(ss.__file__, len(prints), *(len(one) for one in prints))
"""


def run(*command: object, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], env=ENVIRONMENT | environ, cwd=folder, capture_output=True, text=True, timeout=300
    )


def done(*command: object, folder: Path | None = None, **environ: str) -> str:
    """What a command prints that must succeed."""
    found = run(*command, folder=folder, **environ)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def clone(folder: Path) -> Path:
    """A copy of the checkout, with what must not get into a package."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in (".venv", "runs"):
        (folder / name).mkdir()
        (folder / name / "stray.py").write_text("")
    return folder


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """The wheel, made from the source archive, and that archive."""
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(clone(tmp_path_factory.mktemp("clone")), tmp_path_factory.mktemp("dist"))


def requires(name: str) -> Iterator[str]:
    """A distribution and all that it needs."""
    yield name
    for text in metadata.requires(name) or []:
        needed = requirements.Requirement(text)
        if not needed.marker or needed.marker.evaluate({"extra": ""}):
            yield from requires(needed.name)


def links(folder: Path, *names: str) -> Path:
    """A folder with links to distributions of this environment and to all that they need, and to nothing else."""
    folder.mkdir()
    for needed in {one for name in names for one in requires(name)}:
        there = metadata.distribution(needed)
        for top in {file.parts[0] for file in there.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(there.locate_file(top))))
    return folder


def environment(folder: Path, archive: Path, seen: Path) -> Path:
    """The scripts of a new environment, which sees the packages of a folder, with samestep installed from an archive."""
    done(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "seen.pth").write_text(f"{seen}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    done(
        *pip, "install", "--no-index", "--no-build-isolation", archive, PIP_NO_CACHE_DIR="1", PIP_CONFIG_FILE=os.devnull
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """samestep from the wheel, with what it needs, and no framework."""
    folder = tmp_path_factory.mktemp("bare")
    return environment(folder / "venv", built[0], links(folder / "seen", *NEEDED))


def contents(wheel: Path, archive: Path) -> tuple[set[str], set[str]]:
    with zipfile.ZipFile(wheel) as zipped, tarfile.open(archive) as tarred:
        return set(zipped.namelist()), {name.partition("/")[2] for name in tarred.getnames()}


def strays(names: set[str]) -> set[str]:
    """What belongs in no package."""
    return {name for name in names if re.match(r"(.*/)?(\.venv|tests|runs|__pycache__)(/|$)", name)} - {
        name for name in names if name.startswith(("samestep/runs", "src/samestep/runs"))
    }


def test_what_is_in_them(built: tuple[Path, Path]) -> None:
    wheel, archive = contents(*built)
    code = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")} | {"samestep/py.typed"}
    assert {name for name in wheel if ".dist-info/" not in name} == code
    assert {f"src/{name}" for name in code} | {"pyproject.toml", "LICENSE", "README.md"} <= archive
    assert strays(wheel) | strays(archive) == set()
    assert strays({"tests/test_x.py", ".venv/stray.py", "runs/a", "src/samestep/runs/run.py"}) == {
        "tests/test_x.py", ".venv/stray.py", "runs/a",
    }  # fmt: skip


def test_what_they_say_of_themselves(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as zipped:
        (place,) = (name for name in zipped.namelist() if name.endswith(".dist-info/METADATA"))
        assert any(name.endswith("licenses/LICENSE") for name in zipped.namelist())
        told = Parser().parsestr(zipped.read(place).decode())
    assert told["Name"] == "samestep"
    assert told["License-Expression"] == "MIT"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload() == (ROOT / "README.md").read_text()
    kinds = told.get_all("Classifier") or []
    assert [kind.rpartition(" ")[2] for kind in kinds if "Python :: 3" in kind] == ["3.11", "3.12", "3.13"]
    needed = [text for text in told.get_all("Requires-Dist") or [] if "extra ==" not in text]
    assert {requirements.Requirement(text).name for text in needed} == set(NEEDED)


def test_twine_finds_no_fault(built: tuple[Path, Path]) -> None:
    assert done(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built).count("PASSED") == 2


def test_twine_finds_a_readme_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "twin"\nversion = "0"\n'
    )
    twin = build(tmp_path / "twin", tmp_path)
    assert run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *twin).returncode == 1


def test_the_command_without_a_framework(bare: Path, tmp_path: Path) -> None:
    said = done(bare / "samestep", "--help", folder=tmp_path)
    assert "The same training step, on any number of devices, in any framework." in said
    assert {"train", "verify", "devices"} <= set(said.split())
    said = done(bare / "samestep", "devices", folder=tmp_path)
    assert said.startswith(f"no framework is installed; {install('torch')}\n")
    assert said.count("not installed") == 5
    said = done(bare / "samestep", "schedule", "cosine(0.3, 15).warmup(5)", folder=tmp_path)  # needs no framework
    assert "0.3" in said
    for name in ("torch", "mxnet"):
        found = run(bare / "samestep", "train", "--backend", name, folder=tmp_path)
        assert (found.returncode, found.stderr) == (2, f"samestep: '{name}' is not installed; {install(name)}\n")
    assert list(tmp_path.iterdir()) == []


def test_python_without_a_framework(bare: Path, tmp_path: Path) -> None:
    code = "import numpy as np, samestep as ss\nss.Trainer().fit({}, (np.ones((4, 2)), np.zeros(4, int)))"
    last = run(bare / "python", "-c", code, folder=tmp_path).stderr.splitlines()[-1]
    assert last.startswith("samestep.errors.WrongType: model must be a model of torch (a torch.nn.Module)")
    last = run(bare / "python", "-c", "import samestep; samestep.num_gpus()", folder=tmp_path).stderr.splitlines()[-1]
    assert last == f"samestep.errors.BackendMissing: no framework is installed; {install('torch')}"
    last = run(bare / "python", "-c", "from samestep.models import torch", folder=tmp_path).stderr.splitlines()[-1]
    assert last == f"samestep.errors.BackendMissing: 'torch' is not installed; {install('torch')}"


def test_a_fit_with_the_wheel(bare: Path, tmp_path: Path) -> None:
    (here,) = {str(metadata.distribution(name).locate_file("")) for name in ("torch", "numpy")}
    said = done(bare / "python", "-c", FIT, folder=tmp_path, PYTHONPATH=here)
    file, *numbers = said.split()
    assert Path(file).is_relative_to(bare.parent)
    assert numbers == ["1", "64"]


def test_the_source_archive_installs(built: tuple[Path, Path], tmp_path: Path) -> None:
    there = environment(tmp_path / "venv", built[1], links(tmp_path / "seen", *NEEDED, "setuptools"))
    assert done(there / "python", "-m", "samestep", "devices", folder=tmp_path).startswith("no framework is installed")


def test_what_is_needed_is_said(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The twin: an environment that lacks rich is refused, so the others had all that the package asks for."""
    with pytest.raises(AssertionError, match="No matching distribution found for rich"):
        environment(tmp_path / "venv", built[0], links(tmp_path / "seen", "numpy", "safetensors"))


@pytest.mark.parametrize("extra", ["torch", "jax", "tensorflow", "paddle", "mxnet", "mpi", "plot"])
def test_hints_name_what_is_there(extra: str) -> None:
    """Each was also given by hand, in a new environment; a test cannot, as it has no network."""
    said = install(extra)
    assert f"'.[{extra}]'" in said
    assert (ROOT / "pyproject.toml").read_text().count(f"\n{extra} = [") == 1
    for pins in re.findall(r"-c (\S+)", said):
        assert f"{extra}" in (ROOT / pins).read_text()
    assert ("environment of its own" in said) == (extra == "mxnet")

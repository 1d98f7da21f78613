"""What a benchmark ran on, and where its figures are kept."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = Path(os.environ.get("OUT") or HERE / "results")


def gpu() -> str:
    """The GPU that the framework in use sees, if any. No framework is imported for it: some cannot be loaded together."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return str(jax.devices()[0].device_kind) if jax and jax.default_backend() == "gpu" else ""


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine() -> dict[str, str]:
    if found := gpu():
        name, short = found, "gpu"
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cores = len(os.sched_getaffinity(0))
        name = f"{cores} cores of {models[0] if models else platform.machine()}"
        short = "cpu" if cores == 2 else f"cpu{cores}"
    return {"name": name, "short": short, "torch": version("torch"), "python": platform.python_version()}


def keep(name: str, rows: list[dict], quiet: bool = False, **about: object) -> None:
    """Write figures down; quiet: those so far, as a machine that is lent may be taken back."""
    where = machine()
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}-{where['short']}.json"
    path.write_text(
        json.dumps({"machine": where, "date": time.strftime("%Y-%m-%d"), **about, "rows": rows}, indent=1) + "\n"
    )
    if not quiet:
        print(f"kept in {path.name}")


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)

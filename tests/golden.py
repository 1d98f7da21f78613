"""Proof that a change of the code changes no bit: every framework and its zoo, on 1, 2, 3 and 8 devices, in 1 and 3 processes.

    python tests/golden.py --write     before the change: keeps every step's fingerprint and a checkpoint of each run
    python tests/golden.py --check     after it: the same again, compared with ==; and the old checkpoints are resumed

Bits depend on the kind of CPU, so the folder .golden is made and checked on one machine, and is not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("torch", "jax", "tensorflow", "paddle", "mxnet")
DEVICES = {1: (1, 2, 3, 8), 3: (1, 2)}  # processes → devices in each: eight shards are for eight devices at most
KEPT = 1  # the step whose checkpoint is kept


def settings(model: str) -> dict:
    """Each model has another optimizer, so that every way to update is taken."""
    import samestep as ss

    plain = {"gradient_clip_val": 0.0}
    return {"lenet": plain | {"optimizer": ss.sgd()}, "embedding": plain | {"optimizer": ss.adagrad()},
            "lenet_modern": plain | {"optimizer": ss.adam(), "schedule": 0.003}}.get(model, {})  # fmt: skip


def job(mode: str, kept: Path, results: Path, processes: int) -> None:
    """In one process, or in each of several: fit everything in every way, and leave what came of it in `results`."""
    sys.path.insert(0, str(ROOT / "tests"))
    from conformance import suite

    seen, rank = {}, 0
    for model in suite.MODELS:
        for count in DEVICES[processes]:
            case = f"{model}-{count}-devices-{processes}-processes"
            folder = kept / case if mode == "write" else results / case
            options = settings(model) | {"checkpoint_every": 1, "keep_checkpoints": 99, "timeout": 120.0}
            run = suite.fit(model, ["cpu"] * count, run_dir=folder, **options)
            seen[case] = {"steps": run.fingerprints, "end": run.fingerprint, "history": suite.numbers(run)}
            rank = run.rank
            if mode == "write" and not rank:
                for file in (folder / "checkpoints").iterdir():
                    if int(file.stem.removeprefix("step-")) != KEPT:
                        file.unlink()
            elif mode == "check":
                # on another number of devices than the one that wrote it
                options["accept"] = ("numerics", "code", "data")  # older recipes know less
                options["resume"] = kept / case / "checkpoints" / f"step-{KEPT:09d}.safetensors"
                again = suite.fit(model, ["cpu"] * (count % 2 + 1), run_dir=results / f"{case}-again", **options)
                assert again.resumed == KEPT
                seen[f"{case}, resumed"] = {"steps": again.fingerprints, "end": again.fingerprint}
    if not rank:
        (results / f"{processes}.json").write_text(json.dumps(seen))


def python_of(framework: str) -> Path:
    return Path(sys.executable) if framework != "mxnet" else ROOT / ".venv-mxnet" / "bin" / "python"


def run(mode: str, framework: str, kept: Path) -> dict:
    """All cases of a framework: case → what came of it."""
    seen: dict = {}
    kept.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"SAMESTEP_TEST_BACKEND": framework}
    with tempfile.TemporaryDirectory() as folder:
        for processes in DEVICES:
            arguments = ["--job", mode, str(kept), folder, str(processes)]
            command = [str(python_of(framework)), "-m", "samestep", "train", __file__, f"--processes={processes}", "--"]
            subprocess.run([*command, *arguments], env=env, check=True)
            seen |= json.loads(Path(folder, f"{processes}.json").read_text())
    return seen


def compare(old: dict, new: dict) -> list[str]:
    """The cases that differ. A resumed run is compared with the one that was never stopped."""
    wrong = [case for case in old if case not in new]
    for case, found in new.items():
        expected = old[case.removesuffix(", resumed")]
        wrong += [f"{case}: {what}" for what in found if found[what] != expected[what]]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--backend", choices=FRAMEWORKS, action="append", help="only this one; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / ".golden")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        mode, kept, results, processes = options.job
        job(mode, Path(kept), Path(results), int(processes))
        return 0
    if options.write == options.check:
        parser.error("say --write or --check")
    failed = 0
    for framework in options.backend or FRAMEWORKS:
        kept = options.folder.resolve() / framework
        if options.write:
            shutil.rmtree(kept, ignore_errors=True)
            (kept.parent / f"{framework}.json").write_text(json.dumps(run("write", framework, kept), indent=1))
            print(f"{framework}: written", flush=True)
            continue
        old = json.loads((kept.parent / f"{framework}.json").read_text())
        new = run("check", framework, kept)
        wrong = compare(old, new)
        failed += bool(wrong)
        print(f"{framework}: {len(new)} runs, {len(wrong)} differences", *wrong[:20], sep="\n  ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

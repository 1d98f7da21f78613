"""The command `samestep`: train, devices, data. Bad input is one line on standard error and exit status 2."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from samestep import __version__
from samestep.errors import Invalid, SamestepError
from samestep.models import NAMES

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
out = Console(highlight=False, soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"samestep {__version__}")
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """The same training step, on any number of devices, in any framework."""


@app.command(context_settings={"allow_extra_args": True})
def train(
    context: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(help="Your own script, with a Trainer in it; its arguments follow --.")
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"{', '.join(NAMES)}  [lenet]")] = None,
    devices: Annotated[str | None, typer.Option(help="auto, a count, or names: cuda:0,cuda:1  [auto]")] = None,
    shards: Annotated[int | None, typer.Option(help="Pieces a batch is cut into  [8]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples per update  [256]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data  [10]")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate  [0.2]")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD  [0]")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient; 0: no limit  [0]")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides weights, order and noise  [0]")] = None,
    threads_per_shard: Annotated[
        int | None, typer.Option(help="Threads of arithmetic per shard on the CPU  [1]")
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="without_replacement or with_replacement")] = None,
    deterministic: Annotated[bool | None, typer.Option(help="--no-deterministic gives up sameness")] = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Folder of the run; 'none' writes nothing  [runs/TIME-MODEL]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress")] = False,
) -> None:
    """Train LeNet on Fashion-MNIST on every device here, or run your own SCRIPT with these settings."""
    from samestep.optimizers import sgd

    settings: dict[str, Any] = {
        "devices": devices, "shards": shards, "batch_size": batch_size, "max_epochs": epochs, "schedule": lr,
        "gradient_clip_val": clip, "seed": seed, "threads_per_shard": threads_per_shard, "sampling": sampling,
        "deterministic": deterministic, "run_dir": run_dir, "progress": False if quiet else None,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    if script is not None:
        for option, value in (("--model", model), ("--momentum", momentum)):
            if value is not None:
                raise Invalid(f"{option} goes with the built-in job; {script} has a model and an optimizer of its own")
        return _run_script(script, context.args, given)
    if context.args:
        raise Invalid(f"unexpected arguments: {' '.join(context.args)}")
    name = model or "lenet"
    if name not in NAMES:
        raise Invalid(f"unknown model {name!r}: choose one of {', '.join(NAMES)}")
    _built_in(name, sgd(momentum=momentum or 0.0), {"progress": True} | given)


def _built_in(name: str, optimizer: Any, given: dict[str, Any]) -> None:
    from samestep.backends import load
    from samestep.devices import resolve
    from samestep.fashion import fashion_mnist
    from samestep.trainer import Trainer, whole

    whole("seed", given.get("seed", 0), 0)  # the model is drawn from it before the Trainer looks at it
    folder = given.pop("run_dir", f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    trainer = Trainer(
        optimizer=optimizer, run_dir=None if folder == "none" else folder, **{"max_epochs": 10, "schedule": 0.2} | given
    )
    from samestep.models import torch as models

    resolve(trainer.devices, trainer.shards, load("torch"))  # before the data is fetched
    run = trainer.fit(getattr(models, name)(seed=trainer.seed), fashion_mnist())
    last, seconds = run.history[-1], [row["seconds"] for row in run.history]
    out.print(
        f"test accuracy {last['test_accuracy']:.4f}, {sum(seconds) / len(seconds):.2f} s/epoch, "
        f"on {', '.join(run.devices)}\nfingerprint {run.fingerprint}"
        + (f"\nrun folder {run.folder}" if run.folder else "")
    )


def _run_script(script: Path, arguments: list[str], given: dict[str, Any]) -> None:
    from samestep.trainer import OVERRIDES

    if not script.is_file():
        raise Invalid(f"{script} is not a file")
    if given.get("run_dir") == "none":
        given["run_dir"] = None
    os.environ[OVERRIDES] = json.dumps(given)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@app.command()
def devices() -> None:
    """Every device with its memory, and which frameworks are installed."""
    from samestep import backends

    table = Table("device", "memory", "used", box=None, pad_edge=False)
    try:
        backend = backends.default()
        for device in backend.devices():
            total, used = backend.memory(device)
            table.add_row(str(device), f"{total / 2**30:.1f} GiB", f"{used / 2**30:.1f} GiB")
        out.print(table, "")
    except SamestepError as error:
        out.print(f"{error}\n")
    table = Table("framework", "version", "backend", box=None, pad_edge=False)
    for name in backends.FRAMEWORKS:
        table.add_row(
            name, backends.installed(name) or "not installed", "yes" if name in backends.available() else "not yet"
        )
    out.print(table)


@app.command()
def data() -> None:
    """Where each file of Fashion-MNIST is, and whether its hash holds. Nothing is downloaded."""
    from samestep import fashion

    files = fashion.status()
    for file in files:  # not a table, which would cut or fold the paths
        size = f"{file.bytes:,} bytes" if file.path else "-"
        out.print(f"{file.name:<26}  {file.state:<7}  {size:>16}  {file.path or '-'}", markup=False)
    if any(file.state == "damaged" for file in files):
        raise Invalid("a file is damaged: delete it, and the next run fetches it again")


def run() -> None:
    """The entry point: turns errors that samestep raises on purpose into one line."""
    try:
        app(prog_name="samestep")
    except SamestepError as error:
        print(f"samestep: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

"""The command `samestep`: train, verify, diff, export, chapter, schedule, devices, data, bench, lab.

Bad input gives one line on standard error and exit status 2 (ending.py).
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from samestep import __version__
from samestep import portable as switch
from samestep.backends import find
from samestep.backends.making import FORMATS, PRECISIONS
from samestep.checks import whole
from samestep.errors import Invalid, SamestepError
from samestep.models import NAMES
from samestep.processes.launch import engine_for, launch
from samestep.processes.place import COMMAND, MEET
from samestep.screen import job, lab
from samestep.screen.ending import report
from samestep.screen.lab import option
from samestep.screen.plot import check_figure
from samestep.signals import Signals

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
benches = typer.Typer(no_args_is_help=True, help="Measure this machine.")
app.add_typer(benches, name="bench")
app.add_typer(lab.app, name="lab")
out = Console(highlight=False, soft_wrap=True)


def argument(help: str) -> Any:
    return typer.Argument(help=help)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"samestep {__version__}")
        raise typer.Exit


@app.callback()
def main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """The same training step, on any number of devices, in any framework.

    An error shows the lines of your own that led to it; with SAMESTEP_TRACEBACK=1, all lines.
    """


@app.command(context_settings={"allow_extra_args": True})
def train(
    context: typer.Context,
    script: Annotated[Path | None, argument("Your own script, with a Trainer in it; its arguments follow --.")] = None,
    model: Annotated[str | None, option(f"{', '.join(NAMES)}  [{job.USUAL}]", among=NAMES)] = None,
    backend: Annotated[
        str | None, option(f"Framework: {', '.join(find.FRAMEWORKS)}  [torch]", among=find.FRAMEWORKS)
    ] = None,
    devices: Annotated[str | None, option("auto, a count, or names: cuda:0,cuda:1  [auto]")] = None,
    shards: Annotated[int | None, option("Pieces a batch is cut into  [8]")] = None,
    batch_size: Annotated[int | None, option("Examples per update  [256]")] = None,
    epochs: Annotated[int | None, option("Passes over the data  [10]")] = None,
    lr: Annotated[float | None, option("A constant learning rate  [the model's schedule]")] = None,
    schedule: Annotated[str | None, option("Instead of --lr: such as 'cosine(0.3, 10).in_epochs()'")] = None,
    momentum: Annotated[float | None, option("Momentum of SGD  [the model's]")] = None,
    clip: Annotated[float | None, option("Largest norm of the gradient; 0: no limit  [0]")] = None,
    seed: Annotated[int | None, option("Decides weights, order and noise  [0]")] = None,
    threads_per_shard: Annotated[int | None, option("Threads of arithmetic per shard on the CPU  [1]")] = None,
    precision: Annotated[str | None, option(f"{', '.join(PRECISIONS)}  [float32]", among=PRECISIONS)] = None,
    memory_format: Annotated[str | None, option(f"Of images: {', '.join(FORMATS)}  [auto]", among=FORMATS)] = None,
    compiled: Annotated[bool, option("Compile shards and update (torch.compile)", "--compile")] = False,
    sampling: Annotated[str | None, option("without_replacement, with_replacement or in_order")] = None,
    deterministic: Annotated[bool | None, option("--no-deterministic gives up sameness")] = None,
    portable: Annotated[bool, option("The same bits on every x86-64 CPU with AVX2", "--portable")] = False,
    accept: Annotated[str | None, option("What may have changed since: numerics, code, data, or several")] = None,
    run_dir: Annotated[str | None, option("Folder of the run; 'none' writes nothing  [runs/TIME-MODEL]")] = None,
    checkpoint_every: Annotated[str | None, option("Steps, or a text such as '1 epoch' or '30 s'  [1 epoch]")] = None,
    resume: Annotated[str | None, option("auto, never, or a checkpoint or run folder to resume from  [auto]")] = None,
    processes: Annotated[int | None, option("Number of processes on this machine  [1]")] = None,
    profile: Annotated[bool, option("Show where a step's time goes (docs/speed.md)", "--profile")] = False,
    quiet: Annotated[bool, option("No progress", "--quiet", "-q")] = False,
) -> None:
    """Train a model on Fashion-MNIST on every device here, or run your own SCRIPT with these settings.

    The models come with recipes: lenet_modern has SGD with momentum 0.9 and a rate that warms up for an epoch, to 0.1 with
    batches of 256, and falls along a cosine. The others have plain SGD with a rate of 0.2. --model lenet is the job of the
    book "Dive into Deep Learning" (chapter "Training on Multiple GPUs"), which learns nothing in its first epoch.
    """
    if lr is not None and schedule is not None:
        raise Invalid("choose one of --lr and --schedule")
    job.check(script, model=model, backend=backend, momentum=momentum)
    settings: dict[str, Any] = {
        "devices": devices, "shards": shards, "batch_size": batch_size, "max_epochs": epochs,
        "schedule": schedule if lr is None else lr,
        "gradient_clip_val": clip, "seed": seed, "threads_per_shard": threads_per_shard, "sampling": sampling,
        "precision": precision, "memory_format": memory_format, "compile": compiled or None,
        "deterministic": deterministic, "run_dir": run_dir, "progress": False if quiet else None,
        "checkpoint_every": checkpoint_every, "resume": False if resume == "never" else resume,
        "portable": portable or None, "accept": accept, "profile": profile or None,
    }  # fmt: skip
    os.environ[COMMAND] = shlex.join(["samestep", *sys.argv[1:]])
    if portable:
        switch.set_up()  # before a framework starts
    if processes is not None and whole("", "--processes", processes, 1) > 1 and MEET not in os.environ:
        command = [sys.executable, "-m", "samestep", *sys.argv[1:]]
        raise typer.Exit(launch(command, processes, engine_for(script, backend)))
    given = {name: value for name, value in settings.items() if value is not None}
    if run_dir == "none":
        given["run_dir"] = None
    if script is not None:
        return job.run_script(script, context.args, given)
    job.train(model or job.USUAL, backend or "torch", momentum, given)


@app.command(context_settings={"allow_extra_args": True})
def verify(
    context: typer.Context,
    script: Annotated[Path | None, argument("Your own script, with one fit in it; its arguments follow --.")] = None,
    backend: Annotated[str | None, option("Framework of the built-in job  [torch]", among=find.FRAMEWORKS)] = None,
    devices: Annotated[str, option("Numbers of devices")] = "1,2,3,8",
    processes: Annotated[str, option("Numbers of processes")] = "1,2,3",
    every: Annotated[bool, option("Every combination of the two, not only the most useful ones", "--all")] = False,
    kill: Annotated[int, option("How many runs to kill at a random step and resume")] = 3,
    resume_on: Annotated[str, option("random (another of these ways), same, or a number of devices")] = "random",
    epochs: Annotated[int | None, option("Passes over the data  [the script's; built-in job: 1]")] = None,
    seed: Annotated[int, option("Decides what is killed, when, and where it is resumed")] = 0,
    portable: Annotated[bool, option("As --portable of train", "--portable")] = False,
    keep: Annotated[Path | None, option("Keep the run folders in this new folder")] = None,
    as_json: Annotated[bool, option("Print it as JSON", "--json")] = False,
) -> None:
    """Run a script (or the job of `samestep train`) in many ways, kill and resume it, and compare every step's bits.

    If there is a difference, the first one is shown and the exit status is 1.
    """
    from rich.live import Live

    from samestep.runs import verify as module

    if portable:
        switch.set_up()  # in all processes that are started
    job.check(script, backend=backend)
    if backend is not None:
        find.check(backend)
    wanted = module.Job(script, context.args, epochs if script or epochs is not None else 1, backend)
    counts = module.counts("--devices", devices), module.counts("--processes", processes)
    live = Live(console=out, refresh_per_second=4, transient=True)
    with live if out.is_terminal and not as_json else nullcontext():
        tell = lambda report: live.update(module.table(report))  # noqa: E731
        report = module.verify(
            wanted, *counts, every=every, kill=kill, resume_on=resume_on, seed=seed, keep=keep, tell=tell
        )
    if as_json:
        print(report.to_json())
    else:
        out.print(module.table(report))
        out.print(report.conclusion(), markup=False)
    raise typer.Exit(0 if report.same else 1)


@app.command()
def diff(
    a: Annotated[Path, argument("A run folder, or a checkpoint")],
    b: Annotated[Path, argument("Another")],
    as_json: Annotated[bool, option("Print it as JSON", "--json")] = False,
) -> None:
    """The first step, shard and tensor at which two runs differ, and why. Exit status 1 if they do."""
    from samestep.runs import diff as module

    found = module.compare(a, b)
    print(module.to_json(found) if as_json else module.describe(found))
    raise typer.Exit(0 if found.same else 1)


@app.command()
def export(
    source: Annotated[Path, argument("A run folder, or a checkpoint")],
    target: Annotated[Path, argument("The safetensors file to write")],
    best: Annotated[bool, option("Of a run: its best checkpoint, not its last weights", "--best")] = False,
    average: Annotated[bool, option("The averaged weights", "--average")] = False,
) -> None:
    """Write weights as a plain safetensors file, with the names that the framework gives them."""
    from samestep.runs.run import export as write

    step = write(source, target, best, average)
    which = "the averaged weights" if average else "the weights"
    out.print(f"{target}: {which} {'at the end' if step is None else f'after step {step}'}", markup=False)


@app.command()
def devices() -> None:
    """Every device with its memory; and which frameworks are installed, with the devices that each can use."""
    table = Table("device", "memory", "used", box=None, pad_edge=False)
    try:
        backend = find.default()
        for device in backend.devices():
            total, used = backend.memory(device)
            table.add_row(str(device), f"{total / 2**30:.1f} GiB", f"{used / 2**30:.1f} GiB")
        out.print(table, "")
    except SamestepError as error:
        out.print(f"{error}\n", markup=False)  # it names an extra in brackets
    versions = {name: find.installed(name) for name in find.FRAMEWORKS}
    out.print(f"{'framework':<11} {'version':<15} devices")
    with ThreadPoolExecutor() as pool:  # all are asked at once: some take seconds to start
        asked = {name: pool.submit(_ask, name) for name in versions if versions[name]}
        for name, version in versions.items():  # not a table, which would wrap a long error
            seen = asked[name].result() if name in asked else ""
            out.print(f"{name:<11} {version or 'not installed':<15} {seen}".rstrip(), markup=False)


def _ask(framework: str) -> str:
    """Ask a framework for its devices, in a process of its own: some cannot be loaded together."""
    code = f"from samestep.backends.find import load; print(*load({framework!r}).devices(), sep=', ')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stderr or f"status {done.returncode}" if done.returncode else done.stdout
    last = said.strip().splitlines()[-1]  # a framework may print lines of its own before
    return f"cannot be loaded: {last}" if done.returncode else last


@benches.command("devices")
def bench_devices(
    backend: Annotated[str, option("Framework", among=find.FRAMEWORKS)] = "torch",
    png: Annotated[Path | None, option("Draw the roofline of this machine to this file")] = None,
    as_json: Annotated[bool, option("Print the numbers as JSON", "--json")] = False,
    quick: Annotated[bool, option("Less of everything, to see whether it works", "--quick")] = False,
) -> None:
    """Measure products, copies and waiting on every device here: the exercises of the chapter on devices."""
    from samestep.bench import devices as module

    if png:
        check_figure(png)
    bench, answers = module.Bench(find.load(backend), quick), dict[str, module.Answer]()
    for answer in bench.answers():
        answers[answer.name] = answer
        if not as_json:
            out.print(answer.table(), f"{answer.conclusion}\n", markup=False)
    if as_json:
        print(json.dumps(bench.about() | {name: asdict(answer) for name, answer in answers.items()}))
    if png:
        title = f"Roofline of this machine: {backend} {bench.about()['version']}, float32"
        module.roofline(title, answers["products"].rows, answers["copies"].rows, png)
        typer.echo(f"{png}: the roofline of this machine", err=as_json)


@app.command()
def data() -> None:
    """Where each file of Fashion-MNIST is, and whether its hash holds. Nothing is downloaded."""
    from samestep.data import fashion

    files = fashion.status()
    for file in files:  # not a table, which would cut or fold the paths
        size = f"{file.bytes:,} bytes" if file.path else "-"
        out.print(f"{file.name:<26}  {file.state:<7}  {size:>16}  {file.path or '-'}", markup=False)
    if any(file.state == "damaged" for file in files):
        raise Invalid("a file is damaged: delete it, and the next run fetches it again")


@app.command()
def chapter(
    file: Annotated[Path, argument("A chapter of the book, in Markdown, or a notebook")],
    tab: Annotated[str | None, option("pytorch, jax, tensorflow, paddle or mxnet; needed if there are several")] = None,
    epochs: Annotated[
        int | None, option("Passes over the data, wherever a cell says how many  [the chapter's]")
    ] = None,
    examples: Annotated[int | None, option("Of Fashion-MNIST, only the first of each part  [all]")] = None,
    figures: Annotated[Path | None, option("Write figures to this folder, as PNG  [drawn in the terminal]")] = None,
    seed: Annotated[int, option("Of everything that is drawn")] = 0,
) -> None:
    """Run the cells of a chapter of "Dive into Deep Learning" as a notebook would, `d2l` being samestep's.

    GPUs that are not there are stood for by those that are, or by the CPU.
    """
    from samestep.d2l.chapter import run

    numbers = {"--epochs": epochs, "--examples": examples}
    for name, value in numbers.items():
        numbers[name] = None if value is None else whole("", name, value, 1)
    run(file, tab, numbers["--epochs"], figures, whole("", "--seed", seed), numbers["--examples"], out)


@app.command()
def schedule(
    expressions: Annotated[list[str], argument("Such as 'cosine(0.3, 20, end=0.01).warmup(5)'")],
    steps: Annotated[int | None, option("How many updates to show  [100]")] = None,
    epochs: Annotated[int | None, option("How many epochs to show")] = None,
    steps_per_epoch: Annotated[int | None, option("Updates in an epoch")] = None,
    png: Annotated[Path | None, option("Write a figure to this file")] = None,
    svg: Annotated[Path | None, option("Write a figure to this file")] = None,
    as_json: Annotated[bool, option("Print the rates as JSON", "--json")] = False,
    as_csv: Annotated[bool, option("Print the rates as CSV", "--csv")] = False,
) -> None:
    """Plot learning-rate schedules, in the terminal or to a file."""
    from samestep.schedules.text import parse
    from samestep.screen import plot

    if as_json and as_csv:
        raise Invalid("choose one of --json and --csv")
    if steps is not None and epochs is not None:
        raise Invalid("choose one of --steps and --epochs")
    figures = {kind: path for kind, path in (("png", png), ("svg", svg)) if path is not None}
    for kind, path in figures.items():
        if path.suffix.lower() != f".{kind}":
            raise Invalid(f"--{kind} needs a file that ends in .{kind}, got {path}")
    parsed = [parse(text) for text in expressions]
    units = {one.unit for one in parsed}
    per_epoch = None if steps_per_epoch is None else whole("", "--steps-per-epoch", steps_per_epoch, 1)
    if per_epoch is None and "steps" in units and (epochs is not None or "epochs" in units):
        raise Invalid("schedules in steps and an axis in epochs need --steps-per-epoch")
    unit = "epochs" if per_epoch is None and "steps" not in units else "steps"
    if epochs is not None:
        count = whole("", "--epochs", epochs, 1) * (per_epoch or 1)
    else:
        count = 100 if steps is None else whole("", "--steps", steps, 1)
    curves = {repr(one): one.bind(per_epoch or 1).values(count + 1) for one in parsed}
    for path in figures.values():
        plot.figure(curves, unit, path)
        typer.echo(f"{path}: the rates of {count} {unit}", err=as_json or as_csv)
    if as_json:
        rows = [{"schedule": one.to_json(), "text": text, "values": curves[text].tolist()}
                for one in parsed for text in [repr(one)]]  # fmt: skip
        print(json.dumps({"unit": unit, "schedules": rows}))
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["t", *curves])
        writer.writerows([t, *map(float, row)] for t, row in enumerate(zip(*curves.values(), strict=True)))
    elif not figures:
        out.print(plot.terminal(curves, unit, width=min(out.width, 110)), end="")


def run() -> None:
    """The entry point: an error ends the command with one line, or with the user's own lines that led to it."""
    try:
        app(prog_name="samestep")
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        interrupted = 130 if Signals.came else 0  # a fit has ended early, and what came after it went well
        sys.exit(report(ended) if isinstance(ended.code, str) else ended.code or interrupted)
    except Exception as error:
        sys.exit(report(error))

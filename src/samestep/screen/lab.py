"""The commands `samestep lab`: figure and run, on small objectives; rates, curvature and sweep, on models of your own."""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy import linspace
from rich.console import Console
from rich.table import Table

from samestep.backends import find
from samestep.backends.workers import cores
from samestep.checks import whole
from samestep.errors import Invalid
from samestep.models import NAMES
from samestep.screen import job, plot
from samestep.screen.pictures import Picture

app = typer.Typer(no_args_is_help=True, help="Gradient descent to look at, and rates for models of your own.")
out = Console(highlight=False, soft_wrap=True)
Rows = Sequence[dict[str, Any]]
OWN = {"allow_extra_args": True}  # those of a script
SHOWN = 12  # rows of a curve in a table
MOST = 8  # runs of a sweep at a time, unless more are asked for


def option(help: str, *names: str, among: Sequence[str] = ()) -> Any:
    return typer.Option(*names, help=help, autocompletion=(lambda: list(among)) if among else None)


Script = Annotated[Path | None, typer.Argument(help="Your own script, with a fit in it; its arguments follow --.")]
Model = Annotated[str | None, option(f"Of the built-in job: {', '.join(NAMES)}  [{job.USUAL}]", among=NAMES)]
Framework = Annotated[
    str | None, option(f"Of the built-in job: {', '.join(find.FRAMEWORKS)}  [torch]", among=find.FRAMEWORKS)
]
Devices = Annotated[str | None, option("auto, a count, or names: cuda:0,cuda:1  [auto]")]
Json = Annotated[bool, option("Print it as JSON", "--json")]
Csv = Annotated[bool, option("Print it as CSV", "--csv")]
Png = Annotated[Path | None, option("Draw it to this file")]


def check(png: Path | None, as_json: bool, as_csv: bool, table: bool) -> None:
    """Refuse what cannot be shown, before anything is computed."""
    if as_json and as_csv:
        raise Invalid("choose one of --json and --csv")
    if png is not None:
        plot.check_figure(png)
    elif not (as_json or as_csv or table):
        find.imported("matplotlib.figure", "plot")  # which also draws in the terminal


def show(picture: Picture, rows: Rows, png: Path | None, as_json: bool, as_csv: bool, table: bool) -> None:
    """A picture, to a file or in the terminal; or the rows behind it, as a table, JSON or CSV."""
    plain = as_json or as_csv
    if png is not None and picture.panels:  # a sweep of which nothing came to its end has none
        picture.save(png)
        typer.echo(f"{png}: {picture.title}", err=plain)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if as_json:
        finite = [{n: None if isinstance(v, float) and not isfinite(v) else v for n, v in row.items()} for row in rows]
        print(json.dumps({"title": picture.title, "says": picture.says, "rows": finite}))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif table:
        shown = [name for name in names if not name.endswith("_std") and name not in ("schedule", "batch-size", "runs")]
        made = Table(*(name.replace("_", " ") for name in shown), box=None, pad_edge=False)
        for row in rows:
            made.add_row(*(_cell(row.get(name), row.get(f"{name}_std")) for name in shown))
        out.print(made)
    elif png is None:
        drawn = picture.draw()
        for panel, axes in zip(picture.panels, drawn.axes, strict=False):
            out.print(f"{panel.title}\n", plot.of_figure(drawn, axes=axes), sep="", markup=False)
    if not plain:
        out.print(picture.says, markup=False)


def _cell(value: Any, std: float | None) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text if std is None else f"{text} ± {std:.2g}"


def figure(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; --list names them")] = None,
    names: Annotated[bool, option("The figures there are, and what they take", "--list")] = False,
    objective: Annotated[
        list[str] | None, option("quadratic(2, 4), rosenbrock, absolute, logistic, least_squares")
    ] = None,
    optimizer: Annotated[
        list[str] | None, option("sgd(momentum=0.9), adagrad, adam, adamw, sgld(temperature=0.01)")
    ] = None,
    schedule: Annotated[list[str] | None, option("A rate, or a schedule: inverse_power(0.1, 0.1)")] = None,
    noise: Annotated[list[float] | None, option("Standard deviation of what is added to gradients")] = None,
    steps: Annotated[list[int] | None, option("Updates")] = None,
    start: Annotated[str | None, option("The first point, such as -5,-2")] = None,
    seed: Annotated[int | None, option("Of all that is drawn")] = None,
    trajectories: Annotated[int | None, option("How many paths")] = None,
    png: Png = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    from samestep.lab.figures import FIGURES
    from samestep.lab.figures import figure as make

    if names or name is None:
        for one, (makes, takes, _) in FIGURES.items():
            out.print(f"{one:<13} {makes.__doc__}\n{'':<13} takes {', '.join(takes)}", markup=False)
        return
    table = context.info_name == "run"
    check(png, as_json, as_csv, table)
    rates = [_number(text) for text in schedule or []]
    several = {"objective": objective, "optimizer": optimizer, "schedule": rates, "noise": noise, "steps": steps}
    given: dict[str, Any] = {one: v[0] if len(v) == 1 else v for one, v in several.items() if v}
    point = None if start is None else [_number(text) for text in start.split(",")]
    given |= {n: v for n, v in (("start", point), ("seed", seed), ("trajectories", trajectories)) if v is not None}
    picture = make(name, **given)
    rows = list(picture.rows())
    if table and not (as_json or as_csv):
        rows = [
            curve[i] for curve in _curves(rows) for i in dict.fromkeys(linspace(0, len(curve) - 1, SHOWN).astype(int))
        ]
    show(picture, rows, png, as_json, as_csv, table)


def _curves(rows: Rows) -> list[Rows]:
    keys = dict.fromkeys((row["panel"], row["curve"]) for row in rows)
    return [[row for row in rows if (row["panel"], row["curve"]) == key] for key in keys]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text  # a schedule, or what is refused by name


FIGURE = "Options that may be given several times make several descents, side by side."
app.command("figure", help=f"Draw a figure of the lab, in the terminal or to a file. {FIGURE}")(figure)
app.command("run", help=f"Print the table behind a figure. {FIGURE}")(figure)


def own_fit(
    context: typer.Context, script: Path | None, model: str | None, backend: str | None, given: dict[str, Any]
) -> Any:
    """What a script, or the built-in job, would train, with these settings."""
    from samestep.tuning.probing import taken

    job.check(script, model=model, backend=backend)
    if script is not None:
        return taken(partial(job.run_script, script, context.args, given))
    return taken(partial(job.train, model or job.USUAL, backend or "torch", None, {**given, "run_dir": None}))


@app.command(context_settings=OWN)
def rates(
    context: typer.Context, script: Script = None, model: Model = None, backend: Framework = None, devices: Devices = None,
    low: Annotated[float, option("The first rate", "--from")] = 1e-5,
    high: Annotated[float, option("The last rate, unless the loss diverges before", "--to")] = 10.0,
    steps: Annotated[int, option("How many steps")] = 100,
    png: Png = None, as_json: Json = False, as_csv: Csv = False,
) -> None:  # fmt: skip
    """A range test: train with a rate that grows with every step, and suggest one. Nothing is written."""
    from samestep.tuning.probing import prepared, range_test

    check(png, as_json, as_csv, False)
    with prepared(*own_fit(context, script, model, backend, {"devices": devices} if devices else {})) as fit:
        picture = range_test(fit, low, high, steps)
    show(picture, list(picture.rows()), png, as_json, as_csv, False)


@app.command(context_settings=OWN)
def curvature(
    context: typer.Context, script: Script = None, model: Model = None, backend: Framework = None, devices: Devices = None,
    products: Annotated[int, option("At most so many products of the Hessian with a vector, of two gradients each")] = 200,
    as_json: Json = False,
) -> None:  # fmt: skip
    """The largest eigenvalue of the Hessian before the first step, and the largest stable rates that it implies."""
    from samestep.tuning import probing

    with probing.prepared(*own_fit(context, script, model, backend, {"devices": devices} if devices else {})) as fit:
        found = probing.curvature(fit, products)
    stable = {f"momentum {m:g}": found.rate(m) for m in sorted({0.0, 0.9, found.momentum})}
    if as_json:
        limits = {name: rate if isfinite(rate) else None for name, rate in stable.items()}
        return print(json.dumps({**asdict(found), "largest_stable_rate": limits}))
    settled = "" if found.converged else ", not settled: kinks of the loss may hide its curvature"
    out.print(f"largest eigenvalue {found.eigenvalue:.4g} (after {found.products} products{settled})")
    for name, rate in stable.items():
        out.print(f"largest stable rate with {name}: {rate:.3g}")


@app.command(context_settings=OWN)
def sweep(
    context: typer.Context, script: Script = None, model: Model = None, backend: Framework = None,
    of: Annotated[str, option("rate, warmup (epochs), exponent (of the decay), batch (times its size) or schedule")] = "rate",
    values: Annotated[str, option("What to try: 0.01,0.1,1; schedules with ; between  [some that are usual]")] = "",
    lr: Annotated[float | None, option("The rate, or its peak, where it is not what is tried  [the job's own]")] = None,
    batch_size: Annotated[int | None, option("Examples per update; --of batch multiplies it  [the job's own]")] = None,
    epochs: Annotated[int | None, option("Passes over the data  [the job's own]")] = None,
    seeds: Annotated[int, option("Runs of each setting, with other seeds")] = 1,
    at_once: Annotated[int | None, option("Runs at a time, each on its share of the cores  [one for each, up to 8]")] = None,
    folder: Annotated[Path, option("Where the runs are kept; the same sweep goes on there")] = Path("sweeps"),
    png: Png = None, as_json: Json = False, as_csv: Csv = False,
) -> None:  # fmt: skip
    """Train with several settings, side by side: one table and one figure. The same command again resumes it."""
    from samestep.tuning import sweep as module

    check(png, as_json, as_csv, True)
    seeds = whole("", "--seeds", seeds, 1)
    at_once = whole("", "--at-once", min(cores(), MOST) if at_once is None else at_once, 1)
    given = {"batch_size": batch_size, "max_epochs": epochs, "schedule": lr}
    base = module.Base.of(*own_fit(context, script, model, backend, {n: v for n, v in given.items() if v is not None}))
    tried = module.settings(of, values, base)
    job_of = {"model": model, "backend": backend, "epochs": base.epochs, "batch-size": base.batch_size}
    rest = [*([str(script)] if script else []), *(["--", *context.args] if context.args else [])]
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # which ends what was started
    try:
        options = {name: value for name, value in job_of.items() if value is not None}
        module.sweep(tried, options, rest, folder, seeds, at_once, lambda line: typer.echo(line, err=True))
    finally:
        signal.signal(signal.SIGTERM, before)
    show(module.picture(of, tried), [one.row() for one in tried], png, as_json, as_csv, True)

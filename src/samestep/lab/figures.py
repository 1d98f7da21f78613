"""The figures of the lab: the chapter's own, those of its exercises, and what theory says beside them. Each makes a Picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from samestep import draws
from samestep.checks import nearest, show, whole
from samestep.errors import Invalid
from samestep.lab import objectives, theory
from samestep.lab.descent import BAND, SAMPLINGS, Descent, descend
from samestep.lab.objectives import Objective
from samestep.optimizers import rules
from samestep.optimizers.rules import Optimizer
from samestep.schedules.kinds import constant, inverse_power, natural_exp
from samestep.screen.pictures import Curve, Panel, Picture

OPTIMIZERS = {name: getattr(rules, name) for name in ("sgd", "adagrad", "adam", "adamw", "sgld")}
CONSTANT, EXPONENTIAL, POLYNOMIAL = constant(0.1), natural_exp(0.1, 0.1).shift(2), inverse_power(0.1, 0.1).shift(2)
SCHEDULES = [CONSTANT, EXPONENTIAL, POLYNOMIAL]  # of the chapter, which counts from 2
SEVERAL = ("objective", "optimizer", "schedule", "noise", "steps")


@dataclass(frozen=True)
class Options:
    """What can be said of a figure. Lists of objectives, optimizers, schedules, noises or steps: one descent for each."""

    objective: Any = "quadratic"
    optimizer: Any = "sgd"
    schedule: Any = 0.1
    noise: Any = None
    steps: Any = 1000
    start: Sequence[float] | None = None
    seed: int = 0
    trajectories: int = 1000

    def descents(self, **more: Any) -> list[tuple[str, Descent]]:
        """The descents, each with a label that says in what it differs from the others."""
        lists = {n: v if isinstance(v := getattr(self, n), list) else [v] for n in SEVERAL}
        most = max(map(len, lists.values()))
        if any(len(values) not in (1, most) for values in lists.values()):
            told = ", ".join(f"{len(values)} of {name}" for name, values in lists.items() if len(values) > 1)
            raise Invalid(f"figure: settings side by side need as many of one option as of the other, got {told}")
        differ, found = [n for n in lists if len({str(v) for v in lists[n]}) > 1] or ["schedule"], []
        for row in zip(*(islice(cycle(values), most) for values in lists.values()), strict=True):
            one = dict(zip(lists, row, strict=True))
            given = {**one, "start": self.start, "seed": self.seed, "trajectories": self.trajectories, **more}
            rule = given.pop("optimizer")
            rule = rule if isinstance(rule, Optimizer) else objectives.read("optimizer", rule, OPTIMIZERS)
            made = descend(given.pop("objective"), rule, given.pop("schedule"), **given)
            words = one | {"noise": f"noise {made.noise:g}", "steps": f"{one['steps']} steps"}
            found.append((", ".join(str(words[n]) for n in differ), made))
        return found


Make = Callable[[Options], Picture]


class Figure(NamedTuple):
    """What draws a figure, the options that it takes, and its own defaults."""

    make: Make
    takes: Sequence[str]
    defaults: Options


FIGURES: dict[str, Figure] = {}


def _figure(takes: str = "", **defaults: Any) -> Callable[[Make], Make]:
    def keep(make: Make) -> Make:
        known = takes.split() or [field.name for field in fields(Options)]
        FIGURES[make.__name__.replace("_", "-")] = Figure(make, known, Options(**defaults))
        return make

    return keep


def figure(name: str, **options: Any) -> Picture:
    """A picture of the lab: `figure("path", noise=[0, 1])`. `FIGURES` has the names.

    >>> figure("path", noise=0, schedule=0.1, steps=50).says
    'The paths end at (-0.000, -0.000).'
    """
    if name not in FIGURES:
        raise Invalid(f"figure: there is no {show(name)}; {nearest(name, FIGURES)}")
    known = FIGURES[name]
    for given in options:
        if given not in known.takes:
            raise Invalid(f"figure: {name} takes {', '.join(known.takes)}; it has no use for {given}")
    # Lists of defaults belong together: who gives one of them, or a list of another length, gets the first of the others.
    listed = {n: v for n in SEVERAL if isinstance(v := getattr(known.defaults, n), list) and n not in options}
    most = max((len(v) for v in options.values() if isinstance(v, list)), default=1)
    if most > 1 or any(isinstance(getattr(known.defaults, n), list) for n in options if n != "steps"):
        options |= {n: values[0] for n, values in listed.items() if len(values) != most}
    made = replace(known.defaults, **options)
    for steps in made.steps if isinstance(made.steps, list) else [made.steps]:
        whole("figure", "steps", steps, 1)
    with np.errstate(over="ignore", invalid="ignore"):  # of what diverges
        return known.make(made)


def _two(f: Objective) -> Objective:
    if len(f.start) != 2:
        raise Invalid(f"this figure needs an objective of two coordinates, {f.name} has {len(f.start)}")
    return f


@_figure("objective optimizer schedule noise steps start seed", schedule=SCHEDULES, steps=[50, 1000, 50])
def path(o: Options) -> Picture:
    """Paths over contours: the chapter's three runs, or yours; --noise 0 --noise 1 shows plain descent beside stochastic."""
    panels, ends = [], []
    for label, made in o.descents(trajectories=1):
        points = made.paths[:, :, 0]
        shown = points[(abs(points) < 1e6).all(1)]  # a path that diverges is shown until it is far away
        curve = Curve(f"{len(shown) - 1} steps", shown[:, 0], shown[:, -1], kind="path")
        panels.append(Panel(label, "x1", "x2", [curve], over=_two(made.objective)))
        ends.append("({:.3f}, {:.3f})".format(*points[-1]) if len(shown) == len(points) else "infinity (it diverges)")
    return Picture("Paths of gradient descent", panels, f"The paths end at {', '.join(ends)}.")


@_figure(schedule=SCHEDULES)
def distance(o: Options) -> Picture:
    """Distance to the minimum against steps, with the band of 80 % of the paths, beside t^-½; the rate (exercise 1)."""
    made = o.descents()
    curves = [Curve(label, one.t[1:], *one.distance[:, 1:]) for label, one in made]
    t = max((one.t[1:] for _, one in made), key=len)
    rates = [Curve(label, 1 + np.arange(len(one.rates)), one.rates) for label, one in made]
    curves.append(Curve("t^-½", t, t**-0.5, kind="thin"))
    panel = Panel(f"{o.trajectories} paths", "steps", "distance to the minimum", curves, "xy")
    ends = "; ".join(f"{one.distance[0, -1]:.3g} with {label}" for label, one in made)
    panels = [panel, Panel("the rate", "steps", "rate", rates, "xy")]
    return Picture("How far from the minimum?", panels, f"At the end, on average: {ends}.")


@_figure(objective="quadratic(1, 1000)", optimizer=["sgd", "sgd(momentum=0.9)", "adagrad", "adam"],
         schedule=[0.001, 0.001, 1.0, 0.05], trajectories=300)  # fmt: skip
def adaptive(o: Options) -> Picture:
    """Coordinates whose gradients are a thousand times larger: adaptive rates give each its own (exercise 4)."""
    return replace(distance(o), title="Badly scaled coordinates")


@_figure("objective schedule noise steps start seed trajectories", objective=["absolute(1)", "quadratic", "logistic"],
         schedule=[0.025, POLYNOMIAL, 0.1], noise=[0.3, 1.0, None], steps=200)  # fmt: skip
def bound(o: Options) -> Picture:
    """The gap of the averaged point against its bound (r² + L²Ση²)/(2Ση): the mean obeys it, single paths may not."""
    panels, above, reached = [], 0.0, 0.0
    for label, made in o.descents(keep=20):
        t, mean, own = made.t[1:], made.average_gap[0, 1:], made.average_gaps[1:]
        limit, norm = theory.bound_of(made)
        above, reached = max(above, (own > limit[t - 1, None]).mean()), max(reached, (mean / limit[t - 1]).max())
        thin = [Curve("single paths", t, column, kind="thin") for column in own.T]
        curves = [Curve("mean", t, mean), Curve("bound", t, limit[t - 1]), *thin]
        panels.append(Panel(f"{label}: L = {norm:.3g}", "T", "R(averaged x) − R*", curves, "xy"))
    says = f"The means reach at most {reached:.1%} of their bounds; of the single paths of a panel, up to {above:.0%} is above."
    return Picture("The bound holds for the mean", panels, says)


@_figure("objective noise steps start seed trajectories", objective="absolute", noise=1.0, steps=100)
def rate(o: Options) -> Picture:
    """The gap after T steps against a constant rate, beside the bound, whose best rate is r/(L√T)."""
    rates = np.geomspace(0.003, 3, 25).tolist()
    made = [one for _, one in replace(o, schedule=rates).descents()]
    gaps, f = np.transpose([one.average_gap[:, -1] for one in made]), made[0].objective
    if f.lipschitz is None:
        raise Invalid(f"figure: rate needs an objective with bounded gradients, such as absolute, got {f.name}")
    norm, r, T = theory.bound_of(made[0])[1], theory.away(made[0]), len(made[0].rates)
    best = theory.best_rate(r, norm, T)
    curves = [Curve("mean", rates, *gaps), Curve("bound", rates, [theory.bound_of(one)[0][-1] for one in made]),
              Curve("r/(L√T)", [best], [r * norm / T**0.5], kind="points")]  # fmt: skip
    says = f"The bound is least at {best:.3g}, the measured gap at {rates[gaps[0].argmin()]:.3g}."
    return Picture("The best constant rate", [Panel(f.name, "rate", f"gap after {T} steps", curves, "xy")], says)


@_figure("schedule noise steps seed trajectories", schedule=[0.2, 0.1, 0.02], noise=1.0, steps=2000, trajectories=2000)
def floor(o: Options) -> Picture:
    """A constant rate stays noisy, however long it goes on: variance against steps, and what theory says it ends at."""
    curves, ends = [], []
    for label, made in o.descents():
        end, t, variance = theory.stationary(made.rates[-1], 2, made.noise), made.t[1:], made.std[1:, 0] ** 2
        curves += [Curve(label, t, variance), Curve("theory", t, [end] * len(t), kind="thin")]
        ends.append(f"{variance[-1]:.3g} ({end:.3g})")
    panel = Panel("x1 of the quadratic", "steps", "variance", curves, "xy")
    return Picture("The noise stays", [panel], f"Variance at the end, and in theory: {', '.join(ends)}.")


def _gaps(named: dict[str, tuple[Any, Any]], title: str, x: str = "steps") -> Panel:
    return Panel(title, x, "f(x) − f*", [Curve(label, t[1:], *band[:, 1:]) for label, (t, band) in named.items()], "xy")


@_figure(schedule=[0.1, POLYNOMIAL])
def average(o: Options) -> Picture:
    """The last point against the average over the path, weighted by the rates."""
    made = o.descents()
    panels = [_gaps({"last": (one.t, one.gap), "average": (one.t, one.average_gap)}, label) for label, one in made]
    ends = "; ".join(f"{one.gap[0, -1]:.2g} and {one.average_gap[0, -1]:.2g} with {label}" for label, one in made)
    return Picture("Averaging over the path", panels, f"Gap of the last point and of the average: {ends}.")


@_figure(objective="least_squares", schedule=0.02, steps=5000, trajectories=200)
def replacement(o: Options) -> Picture:
    """Convergence with and without replacement, one example a step (exercise 3)."""
    made = {how.replace("_", " "): o.descents(sampling=how)[0][1] for how in SAMPLINGS[:2]}
    ends = ", ".join(f"{one.gap[0, -1]:.2g} {how}" for how, one in made.items())
    panel = _gaps({how: (one.t, one.gap) for how, one in made.items()}, f"{o.objective}, {o.schedule}")
    return Picture("With and without replacement", [panel], f"Mean gap at the end: {ends}.")


@_figure("objective schedule steps start seed trajectories", objective="least_squares", schedule=POLYNOMIAL,
         trajectories=200)  # fmt: skip
def cost(o: Options) -> Picture:
    """What a step costs: all examples, a batch, or one of them; the gap against gradients of examples that were computed."""
    n, found = len((objectives.objective(o.objective).examples or [[]])[0]), {}
    batches = {"one a step": 1, "a tenth a step": max(1, n // 10), "all a step": n}
    for label, batch in batches.items():
        made = o.descents(sampling="without_replacement", batch=batch)[0][1]
        found[label] = made.t * batch, made.gap
    at = {label: np.interp(n, t, gap[0]) for label, (t, gap) in found.items()}
    told = ", ".join(f"{gap:.2g} with {label}" for label, gap in at.items())
    panel = _gaps(found, f"{o.objective}, {n} examples", "gradients of examples")
    return Picture("What a step costs", [panel], f"Gap after as many gradients as there are examples: {told}.")


@_figure("seed trajectories", trajectories=200)
def coverage(o: Options) -> Picture:
    """What n draws with replacement show of n examples: at least once 63 %, exactly once 37 %."""
    sizes, rows = [10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000], list[Any]()
    for n in sizes:
        tries = range(max(10, whole("", "trajectories", o.trajectories, 1) * 10 // n))
        counted = [np.bincount(draws.order(o.seed, k, n, "with_replacement"), minlength=n) for k in tries]
        shares = np.array([[(count > 0).mean(), (count == 1).mean()] for count in counted])
        rows.append([shares.mean(0), *np.quantile(shares, BAND, 0)])
    seen, once = np.transpose(rows)
    curves = [Curve("at least once", sizes, *seen), Curve("exactly once", sizes, *once),
              Curve("1 − (1 − 1/n)^n", sizes, [theory.seen(n) for n in sizes], kind="points"),
              Curve("(1 − 1/n)^(n−1)", sizes, [theory.seen_once(n) for n in sizes], kind="points")]  # fmt: skip
    says = f"Of {sizes[-1]:,} examples {seen[0, -1]:.4f} were seen, {once[0, -1]:.4f} exactly once."
    panel = Panel("n draws from n examples", "n", "share of the examples", curves, "x")
    return Picture("Sampling with replacement", [panel], says)


@_figure("steps seed trajectories", steps=50, trajectories=20_000)
def random_loss(o: Options) -> Picture:
    """Noise N(0, 1) on the gradient is a loss (x1 − w1)² + 2(x2 − w2)² with w of variance 1/4 and 1/16 (exercise 2)."""
    ways: dict[str, Any] = {"noise on the gradient": {}, "w: variances 1/4, 1/16": {"noise": 0, "jitter": (0.5, 0.25)},
                            "w: variances 1/4, 1/4": {"noise": 0, "jitter": (0.5, 0.5)}}  # fmt: skip
    made = {name: o.descents(**how)[0][1] for name, how in ways.items()}
    first = made["noise on the gradient"]
    exact = np.sqrt(theory.moments((2, 4), (-5, -2), first.rates).variance)[first.t]
    curves = [[Curve(name, one.t, one.std[:, i]) for name, one in made.items()] for i in (0, 1)]
    thin = [Curve("theory", first.t, exact[:, i], kind="thin") for i in (0, 1)]
    panels = [Panel(f"x{i + 1}", "steps", "standard deviation", [*curves[i], thin[i]]) for i in (0, 1)]
    ends = ", ".join("{:.3f} and {:.3f}".format(*one.std[-1]) for one in made.values())
    return Picture("Noise on the gradient is a random loss", panels, f"Standard deviations at the end: {ends}.")


@_figure("steps", steps=5000)
def conditioning(o: Options) -> Picture:
    """Steps of plain descent to a thousandth of the distance, at the rate 2/(1 + κ), against the condition number κ."""
    numbers, needed = np.geomspace(1.2, 300, 12), list[float]()
    for k in numbers:
        made = descend(objectives.quadratic(1, k), None, 2 / (1 + k), steps=o.steps, noise=0, start=(-1, -1))
        near = (made.paths[:, :, 0] ** 2).sum(1) <= 2e-6
        needed.append(float(near.argmax()) if near.any() else np.nan)
    limit = np.log(1000) / np.log((numbers + 1) / (numbers - 1))
    curves = [Curve("measured", numbers, needed, kind="points"), Curve("log 1000 / log((κ+1)/(κ−1))", numbers, limit)]
    panel = Panel("quadratic with curvatures 1 and κ", "κ", "steps", curves, "xy")
    says = f"κ = 300 takes {needed[-1]:g} steps, κ = 1.2 takes {needed[0]:g}."
    return Picture("Rates and condition numbers", [panel], says)


@_figure("seed")
def wells(o: Options) -> Picture:
    """All minima of x²(1 + sin x) in [−30, 30], and the variant in which each must be visited (exercise 5)."""
    plain, found = objectives.wells(), objectives.minima(objectives.wells(), -30, 30)
    hidden = int(draws.lab(o.seed, 0, 0).integers(-4, 6))  # the seed hides it
    deep, at = objectives.wells(hidden), -np.pi / 2 + 2 * np.pi * hidden
    panels = []
    for title, (low, high) in {"x²(1 + sin x)": (-30.0, 30.0), "the hidden well, near": (at - 0.3, at + 0.3)}.items():
        x, inside = np.linspace(low, high, 3001)[None], found[(found >= low) & (found <= high)]
        curves = [Curve("as it is", x[0], plain.value(x)), Curve("with a hidden well", x[0], deep.value(x)),
                  Curve("minima", inside, plain.value(inside[None]), kind="points")]  # fmt: skip
        panels.append(Panel(title, "x", "f(x)", curves))
    says = (
        f"{len(found)} minima, all 0; the hidden well at {at:.2f} is {deep.least:g}, and nothing outside tells of it."
    )
    return Picture("Minima of x²(1 + sin x)", panels, says)


@_figure("objective schedule steps seed trajectories", objective="least_squares", schedule=0.02, trajectories=2000)
def sgld(o: Options) -> Picture:
    """Langevin dynamics samples the posterior exp(−n·f): samples, and the ellipses that hold 50 % and 95 % of it."""
    f = _two(objectives.objective(o.objective))
    n = len(f.examples[1]) if f.examples else 1000
    mean, covariance = theory.posterior(f, 1 / n)
    o = replace(o, optimizer=rules.sgld(temperature=1 / n), noise=0, start=f.minimum)
    last, root = o.descents(sampling="full")[0][1].last, np.linalg.cholesky(covariance)
    radii = {share: (-2 * np.log(1 - share)) ** 0.5 for share in (0.5, 0.95)}
    away, turn = np.linalg.norm(np.linalg.solve(root, last - mean[:, None]), axis=0), np.linspace(0, 2 * np.pi, 200)
    circle = root @ [np.cos(turn), np.sin(turn)]
    curves = [Curve(f"{share:.0%} of the posterior", *(mean[:, None] + r * circle)) for share, r in radii.items()]
    panel = Panel(f"{f.name}, n = {n}", "x1", "x2", [*curves, Curve("samples", last[0], last[1], kind="points")])
    says = " and ".join(f"{(away < r).mean():.1%}" for r in radii.values())
    return Picture("Sampling by SGLD", [panel], f"{says} of the samples are inside of the two ellipses.")

"""Mutants of the core: small random changes to its code, each of which some test must notice. `make mutants` calls this.

    python tests/mutants.py [--count 100] [--seed 0] [--jobs 1] [--only data/ ...] [--map FILE] [--record [FILES]]

A place in the code is drawn, then one of the changes that cosmic-ray can make there. In a copy of the checkout, the tests
that execute the changed function are run until one fails: first the quickest of every file. Run alone and without the change
it must pass, or it does not count. A test that hangs has noticed. Changes that nobody could notice are listed in
mutants_equivalent.txt, each with the reason; they are not in the score.

Which test executes what is recorded (executed.py): all tests once; with --record, tests that are new, or all of some files. A
recording can be carried to another machine. There, cosmic-ray needs no more than a folder on PYTHONPATH:
pip install --target FOLDER --no-deps cosmic-ray parso attrs stevedore
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from executed import ROOT, Map, Tree, record

APART = ("models/", "lab/", "board/", "d2l/", *(f"backends/{name}/" for name in ("tensorflow", "paddle", "mxnet")))
APART += tuple(f"schedules/exports/{name}.py" for name in ("keras", "paddle", "mxnet"))
LOADING = 60.0  # seconds that it may take to collect tests and to start processes where all cores are busy


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str  # the outermost one that the place is in, with its class
    code: str
    before: str  # the lines that go
    after: str  # and those that come instead

    def __str__(self) -> str:
        lines = [f"- {line}" for line in self.before.splitlines()] + [f"+ {line}" for line in self.after.splitlines()]
        return "\n".join([f"{self.file} {self.function}", *lines])

    def is_same(self, file: str, before: str, after: str) -> bool:
        """Whether it is this change that was meant, spaces aside; * means any file, or any change in lines that begin so."""
        ours, theirs, before, after = ("".join(text.split()) for text in (self.before, self.after, before, after))
        if after == "*":
            return file == self.file and ours.startswith(before)
        starts = [i for i in range(len(ours)) if ours.startswith(before, i)]
        return file in (self.file, "*") and any(ours[:i] + after + ours[i + len(before) :] == theirs for i in starts)


def core() -> list[str]:
    package = ROOT / "src" / "samestep"
    apart = APART if find_spec("mpi4py") else (*APART, "processes/mpi.py")
    files = [path.relative_to(package).as_posix() for path in sorted(package.rglob("*.py"))]
    return [name for name in files if not name.startswith(apart)]


def meaning(code: str) -> str:
    """Code without what is not executed: comments, annotations, imports for types."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in {"annotation", "returns"} & set(node._fields):
            setattr(node, name, ast.Name("object"))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.test, node.body = ast.Constant(False), [ast.Pass()]
    return ast.dump(tree)


def function_at(code: str, line: int) -> str:
    """The outermost function that a line is in, with its class; the class alone, or "", where it is in none."""
    names, nodes = list[str](), ast.parse(code).body
    while True:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first <= line <= (node.end_lineno or first):
                    break
        else:
            return ".".join(names)
        names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            return ".".join(names)
        nodes = node.body


def places(files: Sequence[str]) -> dict[tuple[str, tuple[int, int]], list[tuple[Any, int]]]:
    """Where code can be changed: by which of cosmic-ray's operators, and which occurrence of what it looks for this is."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    operators = [provider[name]() for name in provider if not provider[name].arguments()]
    found = defaultdict(list)
    for file in files:
        nodes = list(ast_nodes(get_ast((ROOT / "src" / "samestep" / file).read_text())))
        for operator in operators:
            positions = [position for node in nodes for position in operator.mutation_positions(node)]
            for occurrence, (start, _) in enumerate(positions):
                found[file, start].append((operator, occurrence))
    return found


def mutants(files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """So many, each at another place."""
    from cosmic_ray.mutating import mutate_code

    found, chance, chosen = places(files), random.Random(seed), list[Mutant]()
    for file, start in chance.sample(sorted(found), len(found)):
        if len(chosen) == count:
            break
        operator, occurrence = chance.choice(found[file, start])
        before = (ROOT / "src" / "samestep" / file).read_text()
        try:
            after = mutate_code(before, operator, occurrence)
            if after is None or meaning(after) == meaning(before):
                continue
        except (SyntaxError, AttributeError):  # cosmic-ray does not know `except (A, B.C)`
            continue
        old, new = before.splitlines(), after.splitlines()
        changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        spans = [(a, b, c, d) for kind, a, b, c, d in changes if kind != "equal"]
        gone = "\n".join(line for a, b, _, _ in spans for line in old[a:b] if line)
        come = "\n".join(line for _, _, c, d in spans for line in new[c:d])
        chosen.append(Mutant(file, function_at(before, start[0]), after, gone, come))
    return chosen


def noticed(mutant: Mutant, tree: Tree, tests: Map) -> str:
    """By which test; "" if by none."""
    source = tree.file(mutant.file)
    before, flaky = source.read_text(), set[str]()
    try:
        for stage in tests.stages(mutant.file, mutant.function):
            backend, limit = stage[0].backend, LOADING + 4 * sum(test.seconds for test in stage)
            while todo := [test.name for test in stage if test.name not in flaky]:
                source.write_text(mutant.code)
                status, notes = tree.run(backend, [*todo, *(f"--deselect={name}" for name in flaky)], limit)
                if status == 0:
                    break
                last = [note[1] for note in notes if note[0] == "begin"][-1:]
                source.write_text(before)
                if tree.run(backend, last or [*todo, "--collect-only"], limit)[0] == 0:
                    return (last[0] if last else "importing it") + (" hangs" if status == 124 else "")
                flaky.update(last or todo)  # without the change it fails as well
    finally:
        source.write_text(before)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="so many of those that the seed gives, done before")
    parser.add_argument("--seconds", type=float, default=240.0, help="of tests, at most, for one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants, or files of tests, at a time")
    parser.add_argument("--only", nargs="*", default=[""], help="how the names of files begin, in src/samestep")
    parser.add_argument("--map", type=Path, default=Path(tempfile.gettempdir()) / "samestep-mutants.json")
    parser.add_argument("--record", nargs="*", help="record new tests, or these files")
    options = parser.parse_args()
    lines = (ROOT / "tests" / "mutants_equivalent.txt").read_text().splitlines()
    equivalent = [line.split(" ¦ ")[:3] for line in lines if line and not line.startswith("#")]
    counts = {"noticed": 0, "equivalent": 0, "survived": 0}
    with tempfile.TemporaryDirectory(prefix="m-") as folder, ExitStack() as ending:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for i in range(options.jobs):
            trees.put(ending.enter_context(closing(Tree.of(Path(folder) / str(i)))))
        if options.record is not None or not options.map.exists():
            record(options.map, trees, options.jobs, options.record or ())
        tests = Map(options.map, options.seconds)

        def judge(mutant: Mutant) -> None:
            tree, state, by = trees.get(), "equivalent", ""
            if not any(mutant.is_same(*about) for about in equivalent):
                by = noticed(mutant, tree, tests)
                state = "noticed" if by else "survived"
            trees.put(tree)
            counts[state] += 1
            print(f"{state}{' by ' * bool(by)}{by}: {mutant}\n", flush=True)

        files = [name for name in core() if name.startswith(tuple(options.only))]
        chosen = mutants(files, options.skip + options.count, options.seed)[options.skip :]
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(judge, chosen))
    score = counts["noticed"] / max(1, counts["noticed"] + counts["survived"])
    print(f"{counts}: {score:.1%} of those that change anything were noticed")
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())

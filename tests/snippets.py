"""The code in the documentation: found in Markdown, and run in order, in an empty folder, in a process of its own.

    python tests/snippets.py PAGE.md [FRAMEWORK]     runs the blocks of one framework (torch) here, in the current folder

What a block is, its language says. One without a language is refused, so that none is overlooked.

    python                   is run; all blocks of a page share their names, as in a notebook
    python title="my.py"     is written to that file, and so is any other language with a title
    sh, console              commands, run by bash; of a console, the lines that begin with "$ "
    any other (text, ...)    is only shown

Comments of HTML, which no reader sees, say more about the block that follows:

    <!-- framework: jax -->          it runs in another process, which loads this framework
    <!-- not run: needs a GPU -->    it is not run, for this reason
    <!-- setup                       Python that is run in this place, and ends with a line -->: data, names, a model
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import ModuleType

SHELL = ("sh", "bash", "shell", "console")
MARK = re.compile(r"<!-- (framework|not run): (\S.*) -->")
FENCE = re.compile(r"(```+)([\w-]*)(.*)")


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code
    language: str
    text: str
    title: str = ""
    framework: str = "torch"
    why_not: str = ""  # the reason why it is not run

    @property
    def runs(self) -> bool:
        return not self.why_not and bool(self.title or self.language == "python" or self.language in SHELL)


def blocks(page: str) -> Iterator[Block]:
    """All blocks of a page. A ValueError tells the line of one that could not be run as it stands."""
    lines, marks = enumerate(page.splitlines(), 1), dict[str, str]()
    for number, line in lines:
        if mark := MARK.fullmatch(line.strip()):
            marks[mark[1]] = mark[2]
            continue
        if line.strip().startswith(("<!-- framework", "<!-- not run", "<!--setup", "<!--not run", "<!--framework")):
            raise ValueError(
                f"line {number}: a mark is <!-- framework: NAME --> or <!-- not run: REASON -->, got {line}"
            )
        if re.match(r"    (\$ )?(samestep|python|pip|torchrun|mpiexec) ", line):
            raise ValueError(
                f"line {number}: a command must stand in a block of sh, which is run, got {line.strip()!r}"
            )
        fence = FENCE.fullmatch(line.strip())
        if not fence and line != "<!-- setup":
            if marks and line.strip():
                raise ValueError(f"line {number}: a mark must stand right before its block, got {line}")
            continue
        inside: list[str] = []
        for _, one in lines:
            if one.strip() == (fence[1] if fence else "-->"):
                break
            inside.append(one)
        else:
            raise ValueError(f"line {number}: the block does not end")
        language, title = fence[2] if fence else "python", re.search('title="(.+?)"', fence[3]) if fence else None
        if not language:
            raise ValueError(f"line {number}: a block needs a language: python, sh, or text if it is only shown")
        yield Block(
            number + 1, language, dedent("\n".join(inside)) + "\n", title[1] if title else "",
            marks.get("framework", "torch"), marks.get("not run", ""),
        )  # fmt: skip
        marks.clear()


def commands(block: Block) -> str:
    """A script for bash whose lines have the numbers of the page. The first command that fails ends it, and tells its line."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line[2:] if line.startswith("$ ") else "" for line in lines]
    told = "set -Eeuo pipefail; trap 'echo \"line $LINENO: $BASH_COMMAND\" >&2' ERR"
    return "\n".join([told, *[""] * (block.line - 2), *lines])


def run(page: str, name: str, framework: str) -> None:
    """Run the blocks of one framework. What fails ends the process, with the page and the line."""
    main = sys.modules["__main__"] = ModuleType("__main__")  # where pickle looks for a class that a snippet has made
    for block in blocks(page):
        if not block.runs or block.framework != framework:
            continue
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        elif block.language in SHELL:
            done = subprocess.run(["bash", "-c", commands(block)], stdin=subprocess.DEVNULL)
            if done.returncode:
                sys.exit(f"{name}: status {done.returncode} of the commands from line {block.line} on")
        else:
            padded = "\n" * (block.line - 1) + block.text
            linecache.cache[name] = len(padded), None, page.splitlines(keepends=True), name  # for tracebacks
            try:
                exec(compile(padded, name, "exec"), main.__dict__)
            except Exception as error:
                frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
                line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno
                traceback.print_exc()
                sys.exit(f"{name}:{line}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    run(Path(sys.argv[1]).read_text(), sys.argv[2], sys.argv[3])

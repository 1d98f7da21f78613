"""What mkdocs needs to know to make a site of these pages: pages from elsewhere, the reference, how docstrings are read.

mkdocs calls the functions (mkdocs.yml, hooks). `Docstrings` is an extension of griffe, which reads the code for the reference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

import samestep

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md", "benchmarks/NOTES.md": "notes-on-speed.md",
}  # fmt: skip
# The reference: a page for each subject, with the rooms whose public names are on it. A new name needs no change here.
REFERENCE = {
    "training": ["training.trainer", "training.group", "runs.run", "errors"],
    "data": ["data.examples", "data.fashion", "backends.losses"],
    "optimizers": ["optimizers.rules", "optimizers.grouping", "optimizers.averaging"],
    "schedules": ["schedules"],
    "devices": ["devices", "backends.arrays", "processes.by_hand"],
}


def reference() -> dict[str, list[str]]:
    """Page → the public names on it. What belongs to no subject is on a page of its own."""
    of_room = {room: page for page, rooms in REFERENCE.items() for room in rooms}
    found: dict[str, list[str]] = {page: [] for page in REFERENCE}
    for name in samestep.__all__:
        found.setdefault(of_room.get(samestep._NAMES[name], "more"), []).append(name)
    return {page: sorted(names, key=lambda name: (name.islower(), name)) for page, names in found.items()}


def on_config(config: Any) -> Any:
    named = re.findall(r"[\w/-]+\.md", str(config.nav))
    there = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    if more := [name for name in there if name not in named]:
        config.nav.append({"More": more})
    config.nav.append({"Reference": [{page.capitalize(): f"reference/{page}.md"} for page in reference()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, names in reference().items():
        text = "\n\n".join([f"# {page.capitalize()}", *(f"::: samestep.{name}" for name in names)])
        files.append(File.generated(config, f"reference/{page}.md", content=text + "\n"))
    for example in [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/results/*.png"), ROOT / "LICENSE"]:
        files.append(File.generated(config, example.relative_to(ROOT).as_posix(), abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository become links between pages of the site."""
    source = next((name for name, made in ELSEWHERE.items() if made == page.file.src_uri), f"docs/{page.file.src_uri}")

    def moved(found: re.Match[str]) -> str:
        target, mark, anchor = found[1].partition("#")
        path = (ROOT / source).parent.joinpath(target).resolve()
        if "://" in target or not target or not path.is_relative_to(ROOT):
            return found[0]
        name = path.relative_to(ROOT).as_posix()
        there = ELSEWHERE.get(name, name.removeprefix("docs/"))
        return f"]({'../' * page.file.src_uri.count('/')}{there}{mark}{anchor})"

    return markdown if page.file.src_uri.startswith("reference/") else re.sub(r"\]\(([^)\s]+)\)", moved, markdown)


class Docstrings(griffe.Extension):
    """Docstrings are made for help(): lists are aligned by hand, and doctests stand in the text. Both become Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = "\n\n".join(shown(part) for part in re.split(r"\n\s*\n", obj.docstring.value))


def shown(part: str) -> str:
    """A paragraph of a docstring as Markdown."""
    if part.startswith(">>> "):
        return f"```pycon\n{part}\n```"
    listed = rows(part)
    if len(listed) < 2:
        return part
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| `{name}` | {text.replace('|', '&#124;')} |" for name, text in listed)]
    )


def rows(part: str) -> list[tuple[str, str]]:
    """The rows of an aligned list; none if the paragraph is something else."""
    found: list[tuple[str, str]] = []
    for line in part.splitlines():
        if line.startswith("    ") and found:
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
        elif row := re.fullmatch(r"(\S+(?:, \S+)*) {2,}(\S.*)", line):
            found.append((row[1], row[2]))
        else:
            return []
    return found

"""The documentation as a site: it is built without a warning, every public name is on it, and it needs no network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import samestep

pytest.importorskip("mkdocs", reason="mkdocs is not installed (the extra docs)")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (the extra docs)")

ROOT = Path(__file__).parents[2]


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    assert re.findall("^(?:WARNING|ERROR).*", done.stderr, re.M) == []
    return out


class Page(HTMLParser):
    """The names of the places on a page, what it links to, and what a browser fetches to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places, self.links, self.fetched = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.places |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found or (tag == "link" and "href" in found):
            self.fetched.append(found.get("src") or found["href"])


def broken(pages: dict[Path, Page]) -> list[str]:
    """Links to files or places of the site that are not there."""
    found = []
    for path, page in pages.items():
        for link in page.links + page.fetched:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            there = target.exists() and (not place or target not in pages or place in pages[target].places)
            found += [] if there else [f"{path.name}: {link}"]
    return found


def pages_of(site: Path) -> dict[Path, Page]:
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]  # which is for a server's root
    return {path.resolve(): Page(path.read_text()) for path in files}


def test_every_public_name_is_on_a_page(site: Path) -> None:
    places = {place for page in pages_of(site).values() for place in page.places}
    assert {name for name in samestep.__all__ if f"samestep.{name}" not in places} == set()
    assert {"samestep.Trainer.fit", "samestep.Group.step", "samestep.Run.load"} <= places


def test_a_docstring_reads_well(site: Path) -> None:
    text = (site / "reference" / "training.html").read_text()
    assert re.search(r"<td><code>batch_size</code></td>\s*<td>examples per update", text)  # its aligned list is a table
    assert "&gt;&gt;&gt; </span>" in text  # a doctest is code


def test_every_page_of_the_folder_is_there(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        assert (site / path.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    assert "The same training step" in (site / "index.html").read_text()


def test_links_lead_somewhere(site: Path) -> None:
    pages = pages_of(site)
    assert sum(len(page.links) for page in pages.values()) > 500
    assert broken(pages) == []
    twin = Page('<a href="nowhere.html"></a><a href="#nowhere"></a><a href="index.html"></a>')
    assert broken({site.resolve() / "twin.html": twin}) == ["twin.html: nowhere.html", "twin.html: #nowhere"]


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    fetched = [url for page in pages_of(site).values() for url in page.fetched]
    assert len(fetched) > 50
    assert [url for url in fetched if urlsplit(url).netloc] == []


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    for name in ("docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    with open(tmp_path / "docs" / "data.md", "a") as page:
        page.write("\n[see](nowhere.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "'data.md' contains a link 'nowhere.md'" in done.stderr

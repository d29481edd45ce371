"""The documents: generated pages are current, links and paths resolve, the README stays short, one GPU ledger."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: Measured on a day, with that day's names.
DATED = DOCS / "results"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
#: A file or folder of the repository in backticks.
FOLDERS = "benchmarks|convert|d2sd|docs|examples|modeling|models|plugins|recipes|runtime|tests|train"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(path: Path) -> set[str]:
    """Heading ids as Markdown's toc extension makes them."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def links(path: Path) -> Iterator[str]:
    for target in LINK.findall(path.read_text("utf-8")):
        if not target.startswith(("http:", "https:")):
            yield target


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text("utf-8") == text, f"{name}: run python docs/generate.py"


@pytest.mark.parametrize("path", WRITTEN, ids=ids)
def test_links_resolve(path: Path) -> None:
    for target in links(path):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{ids(path)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{ids(path)} links to {target}"


@pytest.mark.parametrize("path", [path for path in WRITTEN if DATED not in path.parents], ids=ids)
def test_paths_that_documents_name_exist(path: Path) -> None:
    for named in PATH.findall(path.read_text("utf-8")):
        assert (ROOT / named).exists(), f"{ids(path)} names {named}"


def test_every_page_is_in_the_navigation_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = [page for section in sections for pages in section.values() for page in pages]
    present = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if DATED not in path.parents]
    assert sorted(listed) == sorted(present)


def test_the_readme_is_two_screens() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 160
    assert not [line for line in lines if len(line) > 100 and not line.startswith(("|", "!"))]


@pytest.mark.parametrize("path", WRITTEN, ids=ids)
def test_only_the_ledger_says_what_has_not_run_on_a_gpu(path: Path) -> None:
    says = "not yet run" in path.read_text("utf-8")
    assert says == (path == DOCS / "gpu.md")


def test_the_readme_takes_its_figures_from_the_results() -> None:
    """Every number of the README's result table is in the full table."""
    numbers = re.compile(r"\d\.\d\d")
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Results")[2].partition("## A recipe")[0]
    full = set(numbers.findall((DOCS / "results.md").read_text("utf-8")))
    assert numbers.findall(readme)
    assert set(numbers.findall(readme)) <= full

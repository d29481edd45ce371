"""The documents: generated pages are current, links and paths resolve, the README stays short, one GPU ledger."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import yaml

from d2sd.cli.main import main as cli
from d2sd.recipe import Recipe
from docs import support
from tests.test_words import BANNED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
#: Measured on a day, with that day's names.
DATED = DOCS / "results"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|\bsrc(?:set)?=\"([^\"]+)\"")
#: Written by docs/generate.py from the schemas, whose prose tests/test_words.py checks.
GENERATED = DOCS / "reference"
#: A file or folder of the repository in backticks.
FOLDERS = "benchmarks|convert|d2sd|deploy|docs|examples|modeling|models|plugins|recipes|runtime|tests|tools|train"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(path: Path) -> set[str]:
    """Heading ids as Markdown's toc extension makes them."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def links(path: Path) -> Iterator[str]:
    for target in map("".join, LINK.findall(path.read_text("utf-8"))):
        if not target.startswith(("http:", "https:")):
            yield target


def test_generated_pages_are_current() -> None:
    """Pages have all flags of all commands: a new one needs a reason, for a new knob belongs in the recipe."""
    pages = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text("utf-8") == text, f"{name}: run python docs/generate.py"


def test_support_names_proofs_that_are_there() -> None:
    """Dates are left out: a lane that runs again changes nothing but them."""
    date = re.compile(r"\d{4}-\d\d-\d\d(, red)?")
    assert date.sub("", support.page()) == date.sub("", support.PAGE.read_text("utf-8")), "run python -m docs.support"


@pytest.mark.parametrize("path", WRITTEN, ids=ids)
def test_links_resolve(path: Path) -> None:
    for target in links(path):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{ids(path)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{ids(path)} links to {target}"


def test_every_picture_is_shown_somewhere() -> None:
    shown = {(path.parent / target).resolve() for path in WRITTEN for target in links(path)}
    assert [path.name for path in sorted((DOCS / "images").iterdir()) if path.resolve() not in shown] == []


def test_variables_that_documents_name_are_read() -> None:
    """An environment variable of ours is read, or set, by a file that is no document."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (ROOT / name).read_text("utf-8", "ignore") for name in listed if (ROOT / name).is_file()}
    code = "".join(text for name, text in texts.items() if not name.endswith((".md", "test_docs.py")))
    for name, text in texts.items():
        if name.endswith(".md") and name != "CHANGELOG.md":
            assert [found for found in re.findall(r"\bD2SD_[A-Z0-9_]+\b", text) if found not in code] == [], name


def test_every_extra_is_explained() -> None:
    section = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]\n")[2]
    extras = re.findall(r"^([\w-]+) = \[", section.partition("\n[")[0], flags=re.M)
    assert len(extras) > 8
    explained = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "install.md").read_text("utf-8"), flags=re.M)
    assert set(extras) - set(explained) == set()


def test_the_glossary_has_each_term_once_and_in_order() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\*", (DOCS / "glossary.md").read_text("utf-8"), flags=re.M)
    names = [re.sub(r"\W+", " ", row.lower()) for row in rows]
    assert names == sorted(set(names))


@pytest.mark.parametrize("path", [path for path in WRITTEN if DATED not in path.parents], ids=ids)
def test_paths_that_documents_name_exist(path: Path) -> None:
    for named in PATH.findall(path.read_text("utf-8")):
        assert (ROOT / named).exists(), f"{ids(path)} names {named}"


def test_files_of_a_listed_folder_exist() -> None:
    """Pages list files one a line, under the folder's name."""
    found = 0
    for path in WRITTEN:
        for folder, lines in re.findall(
            rf"^    ((?:{FOLDERS})/\S+/)\n((?:      .+\n)+)", path.read_text("utf-8"), re.M
        ):
            names = re.findall(r"^      (\S+)", lines, re.M)
            assert not [name for name in names if not (ROOT / folder / name).exists()], path.name
            found += len(names)
    assert found >= 7


def test_every_page_is_in_the_navigation_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    listed = [page for section in sections for pages in section.values() for page in pages]
    present = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if DATED not in path.parents]
    assert sorted(listed) == sorted(present)


def test_the_site_s_footer_names_the_version() -> None:
    footer = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["copyright"]
    assert footer.startswith(f"d2sd {version('d2sd')},")


def test_rows_of_the_ledger_are_answered_or_not_yet_run() -> None:
    """Every row has a question, a command and an answer; no number is missing."""
    text = (DOCS / "gpu.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] > "| 0"]
    numbered = {int(row[0]): row[1:] for row in rows if row[0].isdigit()}
    assert len(numbered) > 20
    assert all(len(row) == 3 and all(row) for row in numbered.values())
    assert sorted(numbered) == [*range(1, max(numbered) + 1)]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 100 and not line.startswith(("|", "!", "[!["))]


@pytest.mark.parametrize("path", WRITTEN, ids=ids)
def test_only_the_ledger_says_what_has_not_run_on_a_gpu(path: Path) -> None:
    says = "not yet run" in path.read_text("utf-8")
    assert says == (path == DOCS / "gpu.md")


def test_the_readme_takes_its_figures_from_the_results() -> None:
    """Every number of the README's result table and of what one gains on a CPU is in the full tables."""
    text, full = (ROOT / "README.md").read_text("utf-8"), (DOCS / "results.md").read_text("utf-8")
    gained, results = (text.partition(f"## {name}")[2].partition("\n## ")[0] for name in ("What you", "Results"))
    cpu = "".join(line for line in gained.splitlines() if "GPU" not in line)
    named = re.findall(r"\b\d\.\d\d\b", results) + re.findall(r"(?<![.\w])\d{3}\b(?!M|-)", cpu)
    assert len(named) > 18
    named += re.findall(r"\d\.\d\d", "".join(re.findall(r"\| CPU, 1, 2.*?\*\*(.*?) times", cpu)))
    assert {"4.16", "2.73", "227", "1.49", "0.99"} <= set(named)
    for number in named:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", full), number


def commands(path: Path) -> Iterator[list[str]]:
    """Arguments of every `d2sd` command in the code blocks of a document; d2sd-build is `d2sd build`."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    code = "\n".join([*re.findall(r"```sh\n(.*?)```", text, flags=re.S), *re.findall(r"^ {4}(.*)$", text, flags=re.M)])
    for line in code.splitlines():
        if re.match("d2sd(-build)? ", line):
            program, *args = shlex.split(line.partition(" && ")[0], comments=True)
            yield ["build", *args] if program == "d2sd-build" else args


@pytest.mark.parametrize("path", [path for path in WRITTEN if GENERATED not in path.parents], ids=ids)
def test_commands_parse(path: Path) -> None:
    """Options and arguments are those of the command line; nothing is run."""
    for args in commands(path):
        context = click.Context(cli, info_name="d2sd")
        name, command, rest = cli.resolve_command(context, list(args))
        assert command is not None
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(click.Context(command, info_name=name), rest)
            assert command is not None
        command.make_context(name, rest)


def test_the_recipe_of_the_readme_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.S)
    Recipe.model_validate(yaml.safe_load(block))


@pytest.mark.parametrize("path", [path for path in WRITTEN if not {GENERATED, DATED} & set(path.parents)], ids=ids)
def test_documents_use_the_fields_words(path: Path) -> None:
    text = path.read_text("utf-8")
    for pattern, instead in BANNED.items():
        found = re.search(rf".*\b(?:{pattern})\b.*", text, re.IGNORECASE)
        assert not found, f"{found and found.group()!r}: {instead}"


def test_names_of_code_that_guides_use_are_in_one_file() -> None:
    """`Batch.pack` and `decode_step` go stale where the code is renamed or moved to another class."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.h"], cwd=ROOT, capture_output=True, text=True, check=True)
    words = [set(re.findall(r"\w+", (ROOT / name).read_text("utf-8"))) for name in listed.stdout.split()]
    for path in (*DOCS.glob("add-a-*.md"), DOCS / "architecture.md", DOCS / "read-the-code.md"):
        for name in re.findall(r"`@?([A-Za-z_]+(?:\.[a-z_]+)*)(?:\([^`]*\))?`", path.read_text("utf-8")):
            parts = set(name.split("."))
            assert "py" in parts or any(parts <= one for one in words), f"{ids(path)} names {name}"


def test_the_reading_list_is_of_sixty_files_at_most() -> None:
    named = {ROOT / found for found in PATH.findall((DOCS / "read-the-code.md").read_text("utf-8"))}
    assert len([path for path in named if path.is_file()]) <= 60

"""The examples run as they are shown, on a tiny bundle."""

from __future__ import annotations

import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.d2sd.serve.conftest import build_tiny

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("examples"), limits={"max_batch": 2, "max_context": 448})


@pytest.fixture
def run(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example on the bundle, `typed` at its prompt; return the lines that it prints."""

    def run(name: str, typed: str = "") -> list[str]:
        monkeypatch.setattr("sys.argv", [name, str(bundle)])
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.slow
def test_many_at_once(run: Run) -> None:
    lines = run("many_at_once.py")
    assert len({line.partition(": ")[0] for line in lines}) == len(lines) == 4
    assert all(line.endswith("tokens per step]") for line in lines)
    assert "policy=" in (EXAMPLES / "many_at_once.py").read_text("utf-8"), "`auto` may decode four requests plainly"


@pytest.mark.slow
def test_chat_stream(run: Run) -> None:
    first, second, end = run("chat_stream.py", "w5 w7\nw9\n\n")
    assert first.startswith("> w")
    assert second.startswith("> w")
    assert end == "> "


def test_the_end_of_the_input_ends_a_chat(run: Run) -> None:
    """Ctrl-D, as well as an empty line."""
    first, end = run("chat_stream.py", "w5 w7\n")
    assert first.startswith("> w")
    assert end == "> "


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*.py")])
@pytest.mark.parametrize("arguments", [[], ["one", "two"]])
def test_an_example_without_a_bundle_says_how_it_is_called(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit, match=rf"python examples/{name} bundles/"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"many_at_once", "chat_stream"}


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/index.md", "docs/python.md"])
def test_python_of_the_documents(document: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text("utf-8"), flags=re.S)
    programs = [block for block in blocks if "LLM(" in block]  # the others are parts of one
    assert programs
    for block in blocks:
        code = compile(block.replace("bundles/smollm2-135m", str(bundle)), document, "exec")
        if block in programs:
            exec(code, {})
            assert capsys.readouterr().out.startswith("w")

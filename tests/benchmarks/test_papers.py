"""The papers' experiments: figures of single steps by hand, and played steps against the engine's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.papers.__main__ import main
from benchmarks.papers.arms import RULES, accepted, boundary_scores, nodes
from benchmarks.papers.book import Block
from d2sd.build.pipeline import build
from d2sd.recipe import load_recipe
from tests.d2sd.build.test_heads import project


def test_a_step_by_hand() -> None:
    lines = [(5, 6, 7), (5, 8, 9), (4,)]
    assert accepted(lines, [5, 8, 9, 1]) == 3
    assert accepted(lines, [5, 6, 1]) == 2
    assert accepted(lines, [1]) == 0
    assert nodes(lines) == 1 + 6  # 5 is one row
    first, second = boundary_scores([math.log(0.8), math.log(0.5)])
    assert [first, second] == pytest.approx([0.2, 0.8 * 0.5])
    block = Block((1, 2), (math.log(0.8), math.log(0.5)), (0.0, 0.0))
    assert RULES["first"]([first, second], block, 0) == [0, -1]
    least = RULES["least confident"]([first, second], block, 0)
    assert least[1] > least[0]


@pytest.mark.slow
def test_played_steps_are_the_engines_and_the_page_is_written(tmp_path: Path) -> None:
    recipe = project(tmp_path / "project", "pair", "pair", precision="fp32")
    build(load_recipe(recipe), tmp_path / "bundle", validate=False)
    prompts = tmp_path / "words.jsonl"
    lines = [{"id": f"p{i}", "turns": [f"w{i} w{i + 20} w{i + 40}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    arguments = [str(tmp_path / "bundle"), "--prompts", str(prompts), "--per-set", "2", "--max-new-tokens", "12"]
    arguments += ["--longest", "20", "--out", str(out)]
    checked = CliRunner().invoke(main, [*arguments, "--check"])
    assert checked.exit_code == 0, checked.output + repr(checked.exception)
    assert checked.stdout.count("are the engine's") == 3
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 0, found.output + repr(found.exception)
    text = (out / "papers.md").read_text()
    assert "| the same behind every boundary |" in text
    assert (out / "papers.png").stat().st_size > 10_000
    kept = sorted((out / "answers").rglob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == before  # what is kept is not played again


def test_a_bundle_or_prompts_that_are_missing_are_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, [str(tmp_path / "none")])
    assert found.exit_code == 2
    assert "Traceback" not in found.output

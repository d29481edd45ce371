"""Prompt files: what is read is what was meant, and every other line is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from d2sd.cli.main import main
from d2sd.errors import D2SDError
from d2sd.prompts import read_ids, read_prompts, read_turns
from tests.convert.helpers import write_project

GOOD = '{"id": "a", "turns": ["x y", "z"]}'


def write(folder: Path, *lines: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def test_prompts_turns_and_ids_are_read(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "", '{"id": 7, "turns": ["one\u2028line"], "more": 1}')
    assert read_prompts(file) == [("a", "x y"), ("7", "one\u2028line")]
    assert read_turns(file)[0] == ("a", ["x y", "z"])
    assert read_ids(file) == {"a", "7"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "b", "turns": "w1 w2"}', "list of strings"),
        ('{"id": "b", "turns": [{"role": "user", "content": "x"}]}', "list of strings"),
        ('{"id": "b", "turns": [1]}', "list of strings"),
        ('{"id": "b", "turns": [null]}', "list of strings"),
        ('{"id": "b", "turns": []}', "list of strings"),
        ('{"id": "b"}', "list of strings"),
        ('{"turns": ["x"]}', "`id`"),
        ('{"id": true, "turns": ["x"]}', "`id`"),
        ('{"id": ["b"], "turns": ["x"]}', "`id`"),
        (r'{"id": "b", "turns": ["\ud800"]}', "surrogate"),
        (r'{"id": "\udc00", "turns": ["x"]}', "surrogate"),
        ('["x"]', "JSON object"),
        ("no json", "JSON"),
        ("[" * 10_000, "levels deep"),
        ('{"id": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_a_line_that_is_not_a_prompt_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(D2SDError, match=r"prompts\.jsonl:2") as caught:
        read_turns(write(tmp_path, GOOD, line))
    assert told in str(caught.value)
    assert len(str(caught.value)) < 800


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    file.write_bytes(file.read_bytes() + b'{"id": "\xff"}')
    with pytest.raises(D2SDError, match=r"prompts\.jsonl:2\n  found: byte 0xff"):
        read_prompts(file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(D2SDError, match="Not a regular file"):
        read_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("value", ["none.jsonl", "recipe.yaml"])
@pytest.mark.parametrize(
    "changes", [["checks.prompts={}"], ["precision=bf16", "fp8.prompts={}"]], ids=["checks", "fp8"]
)
def test_the_plan_reads_the_prompts_that_a_build_would(tmp_path: Path, changes: list[str], value: str) -> None:
    """They were missed only after all conversion."""
    recipe = write_project(tmp_path / "project")
    overrides = [word for change in changes for word in ("--set", change.format(value))]
    planned = CliRunner().invoke(main, ["build", str(recipe), "--plan", *overrides])
    assert planned.exit_code == 2
    assert f"project/{value}" in planned.stderr

"""Prompt files: what is read is what was meant, every other line is named, and `data/` is filled with public sets."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from d2sd.errors import D2SDError
from d2sd.prompt_sets import present, prompt_sets
from d2sd.prompts import last_prompts, read_documents, read_prompts, read_turns
from tests.commands import passed, refused, run_cli
from tests.convert.helpers import write_project
from tests.data import DATA

GOOD = '{"id": "a", "turns": ["x y", "z"]}'


def write(folder: Path, *lines: str) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def test_a_missing_file_says_where_sets_come_from(tmp_path: Path) -> None:
    with pytest.raises(D2SDError, match=r"cannot be read(.|\n)*fix: .*`d2sd data`"):
        read_turns(tmp_path / "data" / "train" / "gsm8k.jsonl")


def test_prompts_turns_and_ids_are_read(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD, "", '{"id": 7, "turns": ["one\u2028line"], "more": 1}')
    assert read_prompts(file) == [("a", "x y"), ("7", "one\u2028line")]
    assert read_turns(file)[0] == ("a", ["x y", "z"])
    seen = tmp_path / "seen.jsonl"
    seen.write_text('{"id": "7"}\n', "utf-8")
    assert last_prompts(file, seen, 2) == ["x y"]


def test_documents_are_read_with_their_fields(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path, '{"id": "a", "text": "t", "title": "u"}')) == [
        ("a", {"text": "t", "title": "u"})
    ]
    for line in ('{"id": "a"}', '{"id": "a", "text": 3}', '{"id": "a", "turns": ["x"]}'):
        with pytest.raises(D2SDError, match=r"prompts.jsonl:1"):
            read_documents(write(tmp_path, line))


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
        ('["x"]', "JSON object"),
        ("no json", "JSON"),
        ("[" * 10_000, "levels deep"),
    ],
)
def test_a_line_that_is_not_a_prompt_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(D2SDError, match=r"prompts\.jsonl:2") as caught:
        read_turns(write(tmp_path, GOOD, line))
    assert told in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.jsonl")
    with pytest.raises(D2SDError, match="Not a regular file"):
        read_prompts(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("value", ["none.jsonl", "recipe.yaml"])
@pytest.mark.parametrize(
    "changes", [["checks.prompts={}"], ["precision=bf16", "fp8.prompts={}"]], ids=["checks", "fp8"]
)
def test_the_plan_reads_the_prompts_that_a_build_would(tmp_path: Path, changes: list[str], value: str) -> None:
    """Missing prompts were once reported only after all conversion."""
    recipe = write_project(tmp_path / "project")
    overrides = [word for change in changes for word in ("--set", change.format(value))]
    refused(run_cli("build", recipe, "--plan", *overrides), f"project/{value}")


LINE = b'{"id": "a", "turns": ["w1"]}\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds one of the two sets that d2sd knows here."""
    common = {"prompts": 1, "license": "MIT", "source": "https://example.org/set", "made": "as it is"}
    sets = [common | {"file": f"{name}.jsonl", "sha256": hashlib.sha256(LINE).hexdigest()} for name in ("eval/a", "b")]
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump({"sets": sets}))
    monkeypatch.setattr("d2sd.prompt_sets.LIST", tmp_path / "sets.yaml")
    folder = tmp_path / "source"
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "a.jsonl").write_bytes(LINE)
    return folder


def fill(tmp_path: Path, *arguments: object) -> Result:
    return run_cli("data", "--to", tmp_path / "data", *arguments)


def test_sets_at_hand_are_copied_and_the_others_are_described(source: Path, tmp_path: Path) -> None:
    done = passed(fill(tmp_path, "--from", source))
    assert (tmp_path / "data" / "eval" / "a.jsonl").read_bytes() == LINE
    assert present(tmp_path / "data") == {"eval/a.jsonl"}
    for word in ("b.jsonl: missing", "https://example.org/set", "as it is", hashlib.sha256(LINE).hexdigest()):
        assert word in done.output
    assert done.output.count("missing") == 1


def test_without_a_folder_nothing_is_written(source: Path, tmp_path: Path) -> None:
    assert passed(fill(tmp_path)).output.count("missing") == 2
    refused(fill(tmp_path, "--from", tmp_path / "nowhere"), "no such folder")
    assert not (tmp_path / "data").exists()


def test_a_set_with_another_hash_is_refused_and_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "eval" / "a.jsonl").write_bytes(LINE + LINE)
    refused(fill(tmp_path, "--from", source), "not the prompt set of that name", hashlib.sha256(LINE).hexdigest())
    assert not (tmp_path / "data").exists()


def test_a_changed_copy_is_replaced(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data" / "eval" / "a.jsonl"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"old")
    assert present(tmp_path / "data") == set()
    fill(tmp_path, "--from", source)
    assert copy.read_bytes() == LINE


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "eval").is_dir(), reason="no prompt sets in data/: see `make data`")
def test_the_list_describes_the_real_sets() -> None:
    found = present(DATA)
    assert found
    for wanted in prompt_sets():
        if wanted.file in found:
            read = read_documents if wanted.kind == "documents" else read_prompts
            assert len(list(read(DATA / wanted.file))) == wanted.prompts

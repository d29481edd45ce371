"""Filling `data/`: what is copied, what is refused, and what is said of sets that are not at hand."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from d2sd.cli.main import main
from d2sd.prompt_sets import present, prompt_sets
from d2sd.prompts import read_prompts
from tests.data import DATA

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
    return CliRunner().invoke(main, ["data", "--to", str(tmp_path / "data"), *map(str, arguments)])


def test_sets_at_hand_are_copied_and_the_others_are_described(source: Path, tmp_path: Path) -> None:
    done = fill(tmp_path, "--from", source)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "data" / "eval" / "a.jsonl").read_bytes() == LINE
    assert present(tmp_path / "data") == {"eval/a.jsonl"}
    for word in ("b.jsonl: missing", "https://example.org/set", "as it is", hashlib.sha256(LINE).hexdigest()):
        assert word in done.output
    assert done.output.count("missing") == 1


def test_without_a_folder_nothing_is_written(source: Path, tmp_path: Path) -> None:
    done = fill(tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.count("missing") == 2
    assert not (tmp_path / "data").exists()


def test_a_set_with_another_hash_is_refused_and_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "eval" / "a.jsonl").write_bytes(LINE + LINE)
    done = fill(tmp_path, "--from", source)
    assert done.exit_code == 2
    assert "not the prompt set of that name" in done.output
    assert hashlib.sha256(LINE).hexdigest() in done.output
    assert not (tmp_path / "data").exists()


def test_a_changed_copy_is_replaced(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data" / "eval" / "a.jsonl"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"old")
    assert present(tmp_path / "data") == set()
    fill(tmp_path, "--from", source)
    assert copy.read_bytes() == LINE


def test_a_folder_that_is_not_there_is_named(source: Path, tmp_path: Path) -> None:
    done = fill(tmp_path, "--from", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "no such folder" in done.output


@pytest.mark.skipif(not (DATA / "eval").is_dir(), reason="no prompt sets in data/: see `make data`")
def test_the_list_describes_the_real_sets() -> None:
    found = present(DATA)
    assert found
    for wanted in prompt_sets():
        if wanted.file in found:
            assert len(read_prompts(DATA / wanted.file)) == wanted.prompts

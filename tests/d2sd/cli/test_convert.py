"""`d2sd convert`: what it writes, what it tells, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from d2sd.convert.kinds import DFLASH
from tests.commands import passed, refused, run_cli
from tests.convert.formats.helpers import public_fields, tiny_pair, write_foreign
from tests.convert.helpers import tree_bytes, write_target_dir

DECODER, DRAFTER = tiny_pair()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_foreign(tmp_path / "source", public_fields(DRAFTER), DRAFTER.state_dict())


def convert(*arguments: object) -> Result:
    return run_cli("convert", *arguments)


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    target = write_target_dir(tmp_path / "target", DECODER)
    there = convert(source, "--to", "speculators", "-o", tmp_path / "there", "--target", target)
    assert (there.exit_code, there.stdout, there.stderr) == (0, f"{tmp_path / 'there'}\n", "read as DFlash\n")
    back = passed(convert(tmp_path / "there", "--to", "z-lab", "-o", tmp_path / "back"))
    assert back.stderr == (
        "read as speculators\n"
        "note: embed_tokens.weight and lm_head.weight: dropped unchecked; pass --target to compare with the target's\n"
    )
    assert DFLASH.read_config(tmp_path / "back") == DRAFTER.config


def test_a_role_may_be_declared(source: Path, tmp_path: Path) -> None:
    done = passed(convert(source, "--to", "z-lab", "-o", tmp_path / "second", "--role", "variable_prefix"))
    assert "note: the role variable_prefix is declared, not read" in done.stderr
    assert DFLASH.read_config(tmp_path / "second").role == "variable_prefix"


def test_refusals_leave_nothing(source: Path, tmp_path: Path) -> None:
    failed = convert(source, "--to", "speculators", "-o", tmp_path / "out")
    assert failed.exit_code == 2
    assert failed.stderr.startswith("error: A speculators checkpoint holds copies")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    before = tree_bytes(source)
    refused(convert(source, "--to", "z-lab", "-o", source), "Output path already exists")
    assert tree_bytes(source) == before
    refused(convert(source, "--to", "modelopt", "-o", tmp_path / "out"), "'z-lab', 'speculators'")


def test_a_folder_of_the_name_of_the_work_folder_is_not_touched(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / ".out.partial"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    refused(convert(source, "--to", "z-lab", "-o", tmp_path / "out"), f"where: {mine}")
    assert tree_bytes(mine) == {"notes": b"mine"}
    assert not (tmp_path / "out").exists()


def test_a_killed_conversion_is_taken_up_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("d2sd.convert.formats.convert.remove", lambda path: None)  # as if killed before the end
        patch.setattr("d2sd.convert.formats.convert.write", lambda *arguments: 1 / 0)
        assert convert(source, "--to", "z-lab", "-o", tmp_path / "out").exit_code == 70
    assert (tmp_path / ".out.partial" / "checkpoint").is_dir()
    assert convert(source, "--to", "z-lab", "-o", tmp_path / "out").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

"""A mutant is left out as long as nothing that its proof loads has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import kept
from tests.mutants.mutant import Mutant, run

PROOF = run("tests/test_it.py")
MUTANT = Mutant("one", "runtime/it.py", "a", "b", PROOF)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kept.Kept:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    (tmp_path / "it.py").write_text("a")
    (tmp_path / "other.py").write_text("a")
    known = kept.Kept(files={kept.title(PROOF): ["it.py"]})
    key = known.key(MUTANT)
    assert key
    known.mutants["one"] = key
    return known


def test_it_holds_until_a_file_of_its_proof_changes(known: kept.Kept, tmp_path: Path) -> None:
    assert known.holds(MUTANT)
    (tmp_path / "other.py").write_text("b")
    assert known.holds(MUTANT)
    (tmp_path / "it.py").write_text("b")
    assert not known.holds(MUTANT)
    (tmp_path / "it.py").unlink()
    assert not known.holds(MUTANT)


def test_another_mutant_or_proof_is_unknown(known: kept.Kept) -> None:
    assert not known.holds(replace(MUTANT, new="c"))
    assert not known.holds(replace(MUTANT, name="two"))
    assert not known.holds(replace(MUTANT, proof=replace(PROOF, interpreted=True)))


def test_it_is_read_as_it_was_written(known: kept.Kept, tmp_path: Path) -> None:
    known.write(tmp_path / "kept.json")
    assert kept.Kept.read(tmp_path / "kept.json") == known
    assert kept.Kept.read(tmp_path / "none.json") == kept.Kept()


def test_a_proof_loads_its_modules_and_what_is_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this very process: this file, the module above, and a C source of the CPU kernels."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "loaded.txt"))
    kept.pytest_sessionfinish()
    names = (tmp_path / "loaded.txt").read_text("utf-8").splitlines()
    assert {"tests/mutants/test_kept.py", "tests/mutants/kept.py", "tests/conftest.py"} <= set(names)
    assert not any(name.startswith((".venv", "/")) for name in names)

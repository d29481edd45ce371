"""A mutant is left out as long as nothing that its proof runs has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import kept
from tools.mutants.__main__ import ROOT, holds, list_of
from tools.mutants.mutant import Mutant, interpreted, run

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


def test_words_change_nothing_that_runs(known: kept.Kept, tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text('"""A module."""\na  # a comment\n')
    assert known.holds(MUTANT)
    (tmp_path / "it.py").write_text('"""Another\nmodule."""\n# words\na\n')
    assert known.holds(MUTANT)
    (tmp_path / "it.py").write_text('"""Another\nmodule."""\n"a"\n')
    assert not known.holds(MUTANT)


def test_another_mutant_or_proof_is_unknown(known: kept.Kept) -> None:
    assert not known.holds(replace(MUTANT, new="c"))
    assert not known.holds(replace(MUTANT, name="two"))
    assert not known.holds(replace(MUTANT, proof=replace(PROOF, interpreted=True)))


def test_it_is_read_as_it_was_written(known: kept.Kept, tmp_path: Path) -> None:
    known.write(tmp_path / "kept.json")
    assert kept.Kept.read(tmp_path / "kept.json") == known
    assert kept.Kept.read(tmp_path / "none.json") == kept.Kept()


def test_a_proof_runs_its_functions_and_what_is_beside(tmp_path: Path) -> None:
    """A test of growth in Triton's interpreter runs its kernel and its specification, and no model."""
    pytest.importorskip("triton", reason="the extra triton is not installed")
    proof = interpreted("trees", k="test_chain and 5")
    passed, _, said = holds(proof, ROOT, tmp_path)
    assert passed, said
    names = list_of(ROOT, tmp_path).read_text("utf-8").splitlines()
    assert {"tests/plugins/kernels/trees.py", "plugins/trees/triton/launch.py", "tests/conftest.py"} <= set(names)
    assert "modeling/decoder.py" not in names
    assert not any(name.startswith((".venv", "/")) for name in names)

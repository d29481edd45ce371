"""The table of mutants fits the source; `make mutants` runs them."""

from __future__ import annotations

from tests.mutants.__main__ import ROOT
from tests.mutants.table import MUTANTS


def test_every_mutant_changes_one_place() -> None:
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        compile(mutant.apply(source), mutant.file, "exec")
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)

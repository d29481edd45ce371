"""The table of mutants fits the source; `make mutants` runs them."""

from __future__ import annotations

import re
from collections import Counter

from tools.mutants.__main__ import ROOT
from tools.mutants.table import MUTANTS


def test_every_mutant_changes_one_place() -> None:
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text()
        compile(mutant.apply(source), mutant.file, "exec")
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_kernel_file_has_some() -> None:
    """Files with Triton kernels, and those of the captured step."""
    kernels = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("plugins/*/triton/*.py")
        if re.search(r"^@(triton\.jit|dependent_kernel)$", path.read_text(), re.MULTILINE)
    }
    counts = Counter(mutant.file for mutant in MUTANTS)
    few = {file: counts[file] for file in kernels if counts[file] < 2}
    assert not few

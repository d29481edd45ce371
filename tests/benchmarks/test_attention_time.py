"""What pages and the roofline have of the time of attention is what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu.attention_time import CASES, line
from benchmarks.gpu.kernel_seconds import ATTENTION, ONE_ROW

PAGE = Path(__file__).parents[2] / "docs" / "kernel-times.md"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_and_the_roofline_have_what_is_counted() -> None:
    rows = {case: line(case) for case in CASES}
    page = PAGE.read_text("utf-8").splitlines()
    assert not [row for row in rows.values() if row not in page]
    counted = {(case.batch, case.rows): float(row.split("|")[6]) for case, row in rows.items() if not case.fp8}
    assert {batch: counted[batch, 1] for batch in ONE_ROW} == ONE_ROW
    for stage, listed in ATTENTION.items():
        width = 16 if stage == "draft_first" else 64
        assert {batch: counted[batch, width] for batch in listed} == listed

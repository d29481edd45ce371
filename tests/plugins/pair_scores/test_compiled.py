"""The compiled library against what the kernels are held to."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins.cpu import library
from d2sd.plugins.pair_scores import Factors, conditioned
from d2sd.plugins.trees import Draft
from tests.plugins.kernels import pairs
from tests.plugins.kernels.pairs import (  # noqa: F401 - run here with the library in the kernels' place
    test_a_block_does_not_depend_on_those_beside_it,
    test_a_head_of_zeros_changes_nothing,
    test_what_is_not_finite_proposes_nothing,
)

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")


def run(_: pytest.MonkeyPatch, call: pairs.Given, *, on: bool = True) -> Draft:
    return (conditioned.cpu if on else conditioned.reference)(*call)


@pytest.fixture(autouse=True)
def _by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "run", run)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", pairs.FORMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_drafts_are_the_specifications(kind: torch.dtype, form: str, threads: int) -> None:
    """Also where tables and rows of parents differ in type, as behind a gate."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size, rank, width in ((16, 144, 16), (5, 20, 9), (33, 70, 16), (1, 3, 1), (1, 3, 2), (64, 40, 3)):
            call = pairs.given(kind, size, rank, form, width)
            if form == pairs.EACH:
                call = call._replace(factors=Factors(call.factors.before.float(), call.factors.behind))
            pairs.assert_same(conditioned.cpu(*call), conditioned.reference(*call))
    finally:
        torch.set_num_threads(before)

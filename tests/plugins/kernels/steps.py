"""Whole engines over the kernels of trees and tokens give the texts of plain decoding. Under the interpreter only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from d2sd.plugins import choice, dispatch, trees
from d2sd.policies import PolicyName
from tests.plugins.kernels import calls
from tests.runtime.helpers import cheater, expected, make_engine, run_staggered, some_requests

pytestmark = [pytest.mark.interpreter, pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("policy", ["off", "d2sd", "hybrid"])
def test_texts_are_those_of_plain_decoding(policy: PolicyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy request and one of top-p; drafts that are wrong now and then."""
    assert calls.DEVICE == "cpu"
    used: list[Tensor] = []

    def use(op: str, x: Tensor, **_: object) -> bool:
        if op in (trees.accept.what, choice.choose.what):
            used.append(x)
        return op in (trees.accept.what, choice.choose.what)

    monkeypatch.setattr(dispatch, "use_kernels", use)
    requests = [replace(request, max_new_tokens=5) for request in some_requests()[:2]]
    engine = make_engine(cheater(requests), policy, row_budget=7)
    sequences = run_staggered(engine, requests)
    assert [sequence.answer for sequence in sequences] == [expected(request) for request in requests]
    assert used

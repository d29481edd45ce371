"""The kernels of heads against the operators that specify them, which tests/modeling/test_heads.py holds against loops.

Numbers are small multiples of 1/8, so that products and sums are exact in any order: equal scores are equal on both
sides, and so are tokens. A normaliser may differ in its last digits.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from d2sd.plugins.pair_scores import Factors, conditioned
from d2sd.plugins.trees import Draft
from tests.plugins.kernels.calls import there
from tests.plugins.on_kernels import run_kernels

BATCH, BRANCHES, SLOTS, VOCABULARY, MASK = 3, 2, 4, 50, 7
#: Of requests: greedy, and powers of two.
TEMPERATURES = 0.0, 0.5, 2.0
#: A table of parents alone, with one of slots, and a row for each parent.
TABLE, SLOT, EACH = FORMS = "table", "slot", "each"
#: Type, candidates, rank, form, width: several turns of the rank, tails of both, a chain, more asked than there are.
CASES = (
    (torch.bfloat16, 5, 20, SLOT, 4),
    (torch.float32, 16, 144, TABLE, 1),
    *(
        pytest.param(kind, size, rank, form, width, marks=pytest.mark.slow)
        for form, (kind, size, rank, width) in product(
            FORMS,
            (
                (torch.bfloat16, 16, 128, 16),
                (torch.float32, 5, 20, 9),
                (torch.float16, 33, 70, 16),
                (torch.bfloat16, 1, 3, 1),
                (torch.float32, 1, 3, 2),
                (torch.float32, 64, 40, 3),
            ),
        )
    ),
)


class Given(NamedTuple):
    """Arguments of `conditioned`."""

    blocks: Tensor
    draft: Draft
    factors: Factors
    mask_token_id: int
    temperature: Tensor
    width: int
    arrived: Tensor | None = None


def given(kind: torch.dtype, size: int, rank: int, form: str, width: int, seed: int = 0) -> Given:
    """Blocks that begin with a token or several, and one of masks alone; one in eight log-probabilities -inf, few
    numbers, so that many tie.
    """
    draw = torch.Generator().manual_seed(seed)
    shape = BATCH, BRANCHES, SLOTS

    def numbers(*shape: int) -> Tensor:
        return (torch.randint(-3, 4, shape, generator=draw) / 4).to(kind)

    many = max(VOCABULARY, size)
    tokens = torch.rand(*shape, many, generator=draw).argsort(-1)[..., :size]
    logprob = -torch.randint(8, 40, (*shape, size), generator=draw) / 8
    logprob = logprob.masked_fill(torch.rand(logprob.shape, generator=draw) < 0.125, -math.inf)
    blocks = torch.randint(0, many, (BATCH, BRANCHES, SLOTS + 1), generator=draw)
    for request, branch in product(range(BATCH), range(BRANCHES)):
        blocks[request, branch, 1 + (request + 2 * branch) % SLOTS :] = MASK
    blocks[0, 1] = MASK
    before = numbers(*shape, 1 + size, rank) if form == EACH else numbers(many, rank)
    factors = Factors(before, numbers(many, rank), numbers(*shape, rank) if form == SLOT else None)
    return Given(blocks, Draft(tokens, logprob), factors, MASK, torch.tensor(TEMPERATURES), width)


def run(patch: pytest.MonkeyPatch, call: Given, *, on: bool = True) -> Draft:
    run_kernels(patch, "pair_scores", on=on)
    found = conditioned(*(there(x) for x in call)) if on else conditioned.reference(*call)
    behind = None if found.behind is None else found.behind.cpu()
    return Draft(found.tokens.cpu(), found.logprob.cpu(), behind)


def assert_same(found: Draft, expected: Draft) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprob, expected.logprob, rtol=2e-6, atol=2e-6)
    assert (found.behind is None) == (expected.behind is None)
    if found.behind is not None and expected.behind is not None:
        torch.testing.assert_close(found.behind, expected.behind, rtol=2e-6, atol=2e-6)


def assert_equal(found: Draft, expected: Draft) -> None:
    """To the bit."""
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logprob, expected.logprob)
    assert found.behind is not None
    assert expected.behind is not None
    assert torch.equal(found.behind, expected.behind)


@pytest.mark.parametrize(("kind", "size", "rank", "form", "width"), CASES)
def test_a_draft(
    kind: torch.dtype, size: int, rank: int, form: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = given(kind, size, rank, form, width)
    found = run(monkeypatch, call)
    assert found.tokens.shape[-1] == min(size, width)
    assert_same(found, run(monkeypatch, call, on=False))


@pytest.mark.parametrize("size", [5, 64])
def test_counters_are_kept(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots at a time, and one; and the counters are zeros again, for the next pass."""
    arrived = there(torch.zeros(9, dtype=torch.int32))
    call = given(torch.bfloat16, size, 20, SLOT, 4)._replace(arrived=arrived)
    expected = run(monkeypatch, call, on=False)
    for _ in range(2):
        assert_same(run(monkeypatch, call), expected)
        assert not arrived.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**100])
def test_what_is_not_finite_proposes_nothing(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the parents whose rows hold it; as a candidate, where the others go on."""
    for where in ("before", "behind", "of_slot"):
        call = given(torch.float32, 5, 6, SLOT, 5, seed=2)
        factors = Factors(call.factors.before, call.factors.behind, call.factors.of_slot)
        rows: Tensor = getattr(factors, where)
        rows.view(-1, 6)[::2, 3] = bad
        call.draft.logprob[0, 0, 2] = -math.inf
        call.draft.logprob[1, 0, 1] = 0.0
        found = run(monkeypatch, call._replace(factors=factors))
        assert_same(found, run(monkeypatch, call._replace(factors=factors), on=False))
        assert found.behind is not None
        assert not found.behind.isnan().any()
        assert (found.behind <= 0).all()


def test_a_head_of_zeros_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and in the order given."""
    call = given(torch.bfloat16, 5, 20, SLOT, 5)
    call.factors.behind.zero_()
    ordered = call.draft.logprob.sort(dim=-1, descending=True, stable=True).values * 1.1
    found = run(monkeypatch, call._replace(draft=Draft(call.draft.tokens, ordered)))
    assert found.behind is not None
    assert torch.equal(found.tokens, call.draft.tokens)
    assert torch.equal(found.logprob, ordered)
    assert torch.equal(found.behind, ordered[..., None, :].expand_as(found.behind))


def test_a_block_does_not_depend_on_those_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all digits, to the bit: each block alone, and all."""
    call = given(torch.float32, 5, 20, SLOT, 5)
    draw = torch.Generator().manual_seed(3)
    before, behind, of_slot = call.factors.before, call.factors.behind, call.factors.of_slot
    assert of_slot is not None
    for numbers in (before, behind, of_slot):
        numbers.copy_(torch.randn(numbers.shape, generator=draw))
    together = run(monkeypatch, call)
    for b, k in product(range(BATCH), range(BRANCHES)):
        at = slice(b, b + 1), slice(k, k + 1)
        part = Factors(before, behind, of_slot[at])
        alone = Given(call.blocks[at], call.draft.part(*at), part, MASK, call.temperature[at[0]], 5)
        assert_equal(run(monkeypatch, alone), together.part(*at))

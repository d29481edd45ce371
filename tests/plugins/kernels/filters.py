"""The kernels that choose where requests filter, against the specification and against loops over the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.plugins.choice.reference import _ascending, apply_filters, gumbel
from d2sd.plugins.choice.triton import launch
from d2sd.plugins.choice.triton.filters import filtered_kernel
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sampling_params import SamplingParams
from tests.plugins.kernels.calls import there

POSITION = 70


def chosen_and_least(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Tokens and the smallest order that is kept, both [B, N], of logits [B, N, V]; all at POSITION."""
    batch, nodes, vocab = logits.shape
    least = there(torch.empty(batch * nodes, dtype=torch.int32))
    before = there(torch.full((batch,), POSITION - 1)), there(torch.zeros(batch, nodes, dtype=torch.long))
    sampling = there(Sampling.of(params, vocab, "cpu"))
    chosen = launch.choose_filtered(there(logits.contiguous()), *before, sampling, least)
    return chosen.cpu(), least.view(batch, nodes).cpu()


def keeps(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Tokens that the kernels keep: bool [B, N, V]."""
    _, least = chosen_and_least(logits, params)
    scaled = scaled_by(logits, params)
    return (_ascending(scaled) >= least[..., None]) & (scaled > -math.inf)


def scaled_by(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return logits.float() / torch.tensor([one.temperature for one in params])[:, None, None]


@pytest.mark.parametrize("vocab", [1, 50, pytest.param(4100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "params",
    [
        *(SamplingParams(1.0, top_k=k) for k in (1, 2, 7)),
        *(SamplingParams(0.5, top_p=p) for p in (0.25, 0.5, 0.999)),
        SamplingParams(1.5, min_p=0.2),
        SamplingParams(1.0, top_k=20, top_p=0.7, min_p=0.01),
    ],
    ids=lambda p: f"{p.top_k}-{p.top_p}-{p.min_p}",
)
def test_filters_keep_the_set_of_the_specification(vocab: int, params: SamplingParams) -> None:
    """Also where a limit is met exactly, of two and of four equal logits, and of numbers without one in between."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(4)) * 3
    logits[1] = (torch.tensor(1.0).view(torch.int32) + torch.arange(vocab, dtype=torch.int32)).view(torch.float32)
    logits[3] = -100.0
    logits[3, :4] = 1.0
    logits[2] = torch.tensor(-200.0)
    logits[2, :2] = 1.0
    scaled = scaled_by(logits[:, None], [params] * 4)[:, 0]
    kept = apply_filters(scaled, Sampling.of([params] * 4, vocab, "cpu")) > -math.inf
    assert torch.equal(keeps(logits[None], [params])[0], kept)


def test_filters_that_are_off_keep_everything_beside_one_that_is_on() -> None:
    logits = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(5)) * 3
    kept = keeps(logits, [SamplingParams(1.0, seed=4), SamplingParams(1.0, top_p=0.5, top_k=4, min_p=0.5)])
    assert kept[0].all()
    assert kept[1].sum() < 5


# -- against loops -----------------------------------------------------------------------------------------------------

VOCAB = 300
ONE_OF_EACH = [
    SamplingParams(0.8, seed=1, top_k=1),
    SamplingParams(1.3, seed=2, top_k=40, top_p=0.9),
    SamplingParams(1.0, seed=3, top_p=0.95),
    SamplingParams(0.7, seed=4, top_p=0.3),
    SamplingParams(1.0, seed=5, min_p=0.05),
    SamplingParams(1.0, seed=6, top_k=9, min_p=0.2, top_p=0.99),
    SamplingParams(1.0, seed=7, top_k=VOCAB - 1),
    SamplingParams(1.0, seed=8, top_p=1e-9),
    SamplingParams(1.0, seed=9, top_p=1 - 2**-24),
    SamplingParams(1.0, seed=10),
    SamplingParams(seed=11),
]


def rows() -> Tensor:
    """[9, V]: with a peak, without, all equal, few numbers, -inf, one token, far apart, close to zero, and all -inf."""
    draw = torch.Generator().manual_seed(6)
    x = torch.randn(9, VOCAB, generator=draw) * torch.tensor([2, 1, 0, 1, 3, 1, 1000, 1e-30, 0])[:, None]
    x[0, [5, 290]] = torch.tensor([11.0, 9.5])
    x[3] = x[3].round()
    x[4].masked_fill_(torch.rand(VOCAB, generator=draw) < 0.7, -math.inf)
    x[5] = -math.inf
    x[5, 123] = 2.0
    x[8] = -math.inf
    return x


def kept_by_loops(row: Tensor, one: SamplingParams) -> set[int]:
    """A token stays while less than the limit is larger than it, as min-p, then top-k, then top-p count."""
    if not one.temperature:
        return set(range(VOCAB))
    scaled = (row.float() / one.temperature).tolist()
    best = max(scaled)
    mass = [int(torch.tensor(x - best).exp() * 2.0**40) + 1 if x > -math.inf else 1 for x in scaled]
    kept = [t for t, x in enumerate(scaled) if x > -math.inf]
    if one.min_p:
        kept = [t for t in kept if scaled[t] >= best + math.log(one.min_p)]
    if one.top_k:
        kept = [t for t in kept if sum(scaled[other] > scaled[t] for other in kept) < one.top_k]
    if one.top_p < 1:
        nothing = 0 if one.min_p or one.top_k else sum(x == -math.inf for x in scaled)  # -inf weighs 1 as well
        total = sum(mass[t] for t in kept) + nothing
        limit = max(Fraction(float(torch.tensor(one.top_p))) * total, Fraction(1))
        kept = [t for t in kept if sum(mass[other] for other in kept if scaled[other] > scaled[t]) < limit]
    return set(kept)


#: With each kind of row: top-k and top-p, top-p alone, all filters at once.
THREE = (ONE_OF_EACH[1], ONE_OF_EACH[2], ONE_OF_EACH[5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.slow
@pytest.mark.full
def test_every_choice_is_that_of_loops_over_the_tokens(
    dtype: torch.dtype, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lists of 1,024 tokens and of 32, which most of these rows exceed."""
    check_choices(ONE_OF_EACH, rows().to(dtype), monkeypatch if small else None)


@pytest.mark.parametrize("kinds", [(0, 3, 6), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_the_choice_is_that_of_loops_over_the_tokens(kinds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    check_choices(THREE, rows()[list(kinds)].bfloat16(), monkeypatch)


def check_choices(params: Sequence[SamplingParams], rows: Tensor, patch: pytest.MonkeyPatch | None) -> None:
    """Each request with each of the rows; `patch`: with short segments and lists."""
    if patch is not None:
        for name, value in (("SEGMENT", 16), ("TILE", 2), ("FEW", 8), ("LIST", 32), ("TURN", 512)):
            patch.setattr(launch, name, value)
    logits = rows[None].expand(len(params), -1, -1)
    chosen, least = chosen_and_least(logits, params)
    for b, one in enumerate(params):
        noise = gumbel(torch.tensor([one.seed or 0]), torch.tensor([[POSITION]]), VOCAB)[0, 0]
        for n in range(logits.shape[1]):
            scaled = logits[b, n].float() / (one.temperature or 1.0)
            kept = kept_by_loops(logits[b, n], one)
            if kept:
                found = (_ascending(scaled) >= least[b, n]) & (scaled > -math.inf)
                assert set(found.nonzero().flatten().tolist()) == kept & set(
                    (scaled > -math.inf).nonzero().flatten().tolist()
                ), (one, n)
            score = {t: float(scaled[t] + noise[t] if one.temperature else scaled[t]) for t in kept}
            score = {t: value for t, value in score.items() if value > -math.inf}
            wanted = max(score, key=lambda t: (score[t], -t)) if score else -1
            assert chosen[b, n] == wanted, (one, n)


class Misled:
    """The kernel with other sums of segments than were made."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __getitem__(self, grid: Any) -> Any:
        def run(*given: Any, **options: Any) -> None:
            given[8].mul_(self.factor)
            filtered_kernel[grid](*given, **options)

        return run


@pytest.mark.parametrize("factor", [1 - 4e-6, pytest.param(1 + 4e-6, marks=pytest.mark.slow)])
def test_sums_of_segments_are_bounds_only(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their rounding would decide, masses are added: top-p is next to what the larger tokens weigh."""
    draw = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 1, 500, generator=draw) * 2
    mass = ((logits[:, 0] - logits[:, 0].amax(-1, keepdim=True)).exp() * 2.0**40).long() + 1
    larger = mass.sort(-1, descending=True).values.cumsum(-1)
    share = torch.tensor([larger[b, 3 + 5 * b].double() / larger[b, -1] for b in range(6)])
    step = torch.tensor([1, -1] * 3) * 2.0**-21
    params = [SamplingParams(1.0, seed=1, top_p=float(p)) for p in share + step]
    monkeypatch.setattr(launch, "filtered_kernel", Misled(factor))
    kept = keeps(logits, params)[:, 0].sum(-1)
    assert kept.tolist() == [4 + 5 * b + (b % 2 == 0) for b in range(6)]

"""The head over a draft vocabulary, of drafters in FP8 and of others, against the target's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.draft_head import draft_tables, largest_hidden, reduced_head
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.fp8 import Fp8Linear, linear_names, round_to_fp8
from d2sd.modeling.native import PackedLinear, pack
from d2sd.modeling.product import Product
from tests.tiny import tiny_decoder, tiny_drafter

IDS = (2, 3, 41, 62)


def drafter_of(target: Decoder, *, fp8: bool, ids: tuple[int, ...] | None = IDS) -> Drafter:
    drafter = tiny_drafter(target.config)
    made = Drafter(replace(drafter.config, draft_vocabulary=ids)).eval().requires_grad_(False)
    made.load_state_dict(drafter.state_dict())
    if fp8:
        round_to_fp8(made, dict.fromkeys(linear_names(made), 0.02))
    return made


def hidden_of(drafter: Drafter, count: int = 64) -> Tensor:
    """Outputs of the last norm, one row with a single large number: the worst that a bound must hold for."""
    x = torch.randn(count, drafter.config.body.hidden_size, generator=torch.Generator().manual_seed(5))
    x[0] = 0.0
    x[0, 3] = 1e4
    out: Tensor = drafter.norm(x)
    return out


def test_hidden_states_stay_within_their_bound() -> None:
    drafter = drafter_of(tiny_decoder(), fp8=True)
    drafter.norm.weight.data = torch.linspace(-3, 2, drafter.norm.weight.numel())
    hidden = hidden_of(drafter)
    bound = float(largest_hidden(drafter))
    assert float(hidden.abs().max()) <= bound
    one = torch.zeros(1, drafter.norm.weight.numel())
    one[0, 0] = 1e4  # where the weight is largest: the bound is reached
    assert float(drafter.norm(one).abs().max()) == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_logits_in_fp8_are_those_of_rounded_numbers(packed: bool) -> None:
    target = tiny_decoder()
    drafter = drafter_of(target, fp8=True)
    hidden, ids = hidden_of(drafter), torch.tensor(IDS)
    whole = target.head.detach()[ids]
    if packed:
        pack(target)
    head = reduced_head(target, ids, largest_hidden(drafter))
    assert isinstance(head, PackedLinear if packed else Fp8Linear)
    found = head(hidden)
    exact = hidden.double() @ whole.double().t()
    # Each factor is within 2⁻⁴ of itself, or within half of the least step where it is subnormal.
    bound = hidden.abs().double() @ whole.abs().double().t() * (2 * 2**-4 + 2**-8) + 1e-3
    assert bool(((found.double() - exact).abs() <= bound).all())
    assert not torch.equal(found.double(), exact)


@pytest.mark.parametrize("ids", [None, IDS])
def test_logits_of_drafts_are_capped_as_the_target_caps_them(ids: tuple[int, ...] | None) -> None:
    target = tiny_decoder("gemma4_text")
    drafter = drafter_of(target, fp8=False, ids=ids)
    hidden = hidden_of(drafter)
    found = draft_tables(target, {0: drafter})[0].head(hidden)
    plain = (hidden.double() @ target.head.double().t())[:, list(ids or range(64))]
    torch.testing.assert_close(found.double(), 5.0 * torch.tanh(plain / 5.0), rtol=0, atol=1e-5)
    assert (plain.abs() > 5).any()


def test_drafters_of_one_vocabulary_and_type_share_a_head() -> None:
    target = tiny_decoder()
    narrow, other, wide = (drafter_of(target, fp8=fp8) for fp8 in (True, True, False))
    whole = drafter_of(target, fp8=True, ids=None)
    other.norm.weight.data *= 4
    tables = draft_tables(target, {0: narrow, 1: other, 2: wide, 3: whole})
    assert tables[0].head is tables[1].head
    assert isinstance(tables[0].head, Fp8Linear)
    assert float(tables[0].head.input_scale) == pytest.approx(float(largest_hidden(other)) / 448)
    hidden = hidden_of(wide)
    torch.testing.assert_close(tables[2].head(hidden), target.logits(hidden)[:, list(IDS)], atol=1e-5, rtol=1e-5)
    assert torch.equal(tables[3].head(hidden), target.raw_logits(hidden)), "the target's own head stays as it is"


@pytest.mark.parametrize(("count", "fp8"), [(16, True), (48, True), (24, False)])
def test_a_gpu_has_fp8_products_of_whole_steps_only(count: int, fp8: bool) -> None:
    """PyTorch refuses others: such a head stays in 16 bits. Shapes alone decide, so a device without memory will do."""
    target, ids = tiny_decoder().to("meta"), torch.arange(count, device="meta")
    head = reduced_head(target, ids, torch.ones((), device="meta"))
    assert isinstance(head, Product)
    assert (head.weight.dtype == torch.float8_e4m3fn) == fp8

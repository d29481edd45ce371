"""Packed layers compute what the plain ones do."""

from __future__ import annotations

import pytest
import torch

from d2sd.modeling.draft_head import reduced_head
from d2sd.modeling.native import PackedLinear, pack, packed_product
from d2sd.modeling.product import Product
from d2sd.plugins.cpu import library
from tests.tiny import tiny_decoder


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_same_map(rows: tuple[int, ...], bias: bool) -> None:
    plain = torch.nn.Linear(24, 40, bias=bias)
    x = torch.randn(*rows, 24)
    torch.testing.assert_close(PackedLinear.of(plain, plain.weight.dtype)(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tie", [True, False])
def test_a_reduced_head_gives_the_logits_of_its_ids(tie: bool, packed: bool) -> None:
    target = tiny_decoder(tie=tie)
    hidden = torch.randn(2, 3, target.config.body.hidden_size)
    ids = torch.tensor([2, 3, 41, 63])
    expected = target.logits(hidden)[..., ids]
    if packed:
        pack(target)
    head = reduced_head(target, ids)
    assert isinstance(head, Product) != packed  # a plain product, or a packed copy
    torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)


def test_a_reduced_head_keeps_half_precision() -> None:
    target = tiny_decoder().bfloat16()
    pack(target)
    hidden = torch.randn(4, target.config.body.hidden_size, dtype=torch.bfloat16)
    ids = torch.tensor([2, 3, 41, 63])
    assert torch.equal(reduced_head(target, ids)(hidden).float(), target.logits(hidden)[..., ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_compiler_products_are_pytorchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "available", lambda: False)
    layer = torch.nn.Linear(24, 40).to(dtype)
    x = torch.randn(5, 24).to(dtype)
    assert torch.equal(packed_product(layer.weight, layer.bias)(x), layer(x))

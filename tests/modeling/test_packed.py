"""Packed layers compute what the plain ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from d2sd.modeling import packed
from d2sd.modeling.packed import PackedLinear, pack, reduced_head
from d2sd.plugins.cpu import library
from tests.tiny import full_logits, random_tokens, tiny_decoder, tiny_drafter


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_same_map(rows: tuple[int, ...], bias: bool) -> None:
    plain = torch.nn.Linear(24, 40, bias=bias)
    x = torch.randn(*rows, 24)
    torch.testing.assert_close(PackedLinear(plain.weight, plain.bias)(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", True), ("qwen3", False)])
def test_a_packed_decoder_gives_the_same_logits(family: str, tie: bool) -> None:
    plain = tiny_decoder(family, tie=tie)  # type: ignore[arg-type]
    packed = copy.deepcopy(plain)
    pack(packed)
    pack(packed)
    assert not any(type(m) is torch.nn.Linear for n, m in packed.named_modules() if n != "lm_head")
    tokens = random_tokens(plain, 2, 9)
    torch.testing.assert_close(full_logits(packed, tokens), full_logits(plain, tokens), atol=1e-4, rtol=1e-4)


def test_a_packed_drafter_gives_the_same_context() -> None:
    plain = tiny_drafter(tiny_decoder().config)
    packed = copy.deepcopy(plain)
    pack(packed)
    features = torch.randn(1, 5, plain.fc.in_features)
    for ours, theirs in zip(
        packed.context_keys_values(features, torch.arange(5)[None]),
        plain.context_keys_values(features, torch.arange(5)[None]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


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
    assert isinstance(head, partial) != packed  # a plain product, or a packed copy
    torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)


def test_a_reduced_head_keeps_half_precision() -> None:
    target = tiny_decoder().bfloat16()
    pack(target)
    hidden = torch.randn(4, target.config.body.hidden_size, dtype=torch.bfloat16)
    ids = torch.tensor([2, 3, 41, 63])
    assert torch.equal(reduced_head(target, ids)(hidden).float(), target.logits(hidden)[..., ids])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not there")  # type: ignore[no-untyped-call]
@pytest.mark.parametrize("slow", ["blocked", "plain"])
def test_without_a_compiler_the_faster_product_is_taken(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed once for a shape and a number of threads; both are the same map."""
    timed: list[tuple[str, int]] = []

    def seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
        name = "plain" if isinstance(product, partial) else "blocked"
        timed.append((name, len(x)))
        return 2.0 if name == slow else 1.0

    monkeypatch.setattr(library, "available", lambda: False)
    monkeypatch.setattr(packed, "_least_seconds", seconds)
    packed._blocked_is_faster.cache_clear()
    weight, x = torch.randn(40, 24), torch.randn(5, 24)
    products = [packed.packed_product(weight, None) for _ in range(2)]
    packed._blocked_is_faster.cache_clear()
    assert [isinstance(product, partial) for product in products] == [slow == "blocked"] * 2
    assert timed == [(name, rows) for name in ("blocked", "plain") for rows in (1, 4, 16)]
    torch.testing.assert_close(products[0](x), x @ weight.T, atol=1e-5, rtol=1e-5)

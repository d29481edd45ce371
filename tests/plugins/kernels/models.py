"""A model over kernels: prefill, commit and decoding as `KVPool` runs them on a GPU. Under the interpreter only."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import Fp8Cache, kv_scales
from d2sd.modeling.fused import fuse
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.where import Where
from d2sd.plugins import dispatch
from tests.plugins.kernels import calls
from tests.plugins.on_kernels import run_kernels
from tests.tiny import feed, in_fp8, pool_for, random_tokens, tiny_decoder, tiny_flex

pytestmark = pytest.mark.interpreter


def model_with(fp8_pages: bool) -> Decoder:
    """Scales are powers of two: the interpreter cannot round to FP8, so divisions must be exact."""
    plain = tiny_decoder(layers=2, head_dim=16)
    if not fp8_pages:
        return plain
    model = in_fp8(plain, [], cache=True)
    for index, layer in enumerate(model.layers):
        for name, power in (("k_cache", -6), ("v_cache", -7)):
            cache = getattr(layer.self_attn, name)
            assert isinstance(cache, Fp8Cache)
            cache.scale = torch.tensor(2.0 ** (power + index))
    return model


def hidden(model: Decoder, chunks: list[int]) -> Tensor:
    tokens = random_tokens(model, 2, sum(chunks))
    pool, table = pool_for(model.config.body, 2, sum(chunks), fp8=kv_scales(model))
    done, out = 0, []
    for size in chunks:
        step = tokens[:, done : done + size]
        out.append(feed(model, step, pool, table, torch.full((2,), done, dtype=torch.long)).hidden)
        done += size
    return torch.cat(out, dim=1)


def on_kernels(patch: pytest.MonkeyPatch, *, fused: bool) -> None:
    run_kernels(patch, "cascade_attention")
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    if fused:
        patch.setattr(dispatch, "use_fused_layers", lambda *_, **__: True)
        run_kernels(patch, "layer_ops.silu_mul")


@pytest.mark.parametrize(("fp8_pages", "fused"), [(False, False), (True, False), (False, True)])
def test_a_model_over_kernels_is_the_model(fp8_pages: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.DEVICE == "cpu"
    model = model_with(fp8_pages)
    with torch.inference_mode():
        expected = hidden(model, [10])
        on_kernels(monkeypatch, fused=fused)
        if fused:
            fuse(model)
        torch.testing.assert_close(hidden(model, [6, 1, 3]), expected, rtol=1e-4, atol=1e-5)


def of_head(*, anchored: bool) -> tuple[Decoder, FlexHead, KVPool, Where]:
    """A target, its FlexDraft head, and two contexts in the target's pages."""
    target = tiny_decoder("qwen3", layers=2, head_dim=16)
    pool, table = pool_for(target.config.body, 2, 9)
    feed(target, random_tokens(target, 2, 9), pool, table, torch.tensor([0, 0]))
    return target, tiny_flex(target, anchored=anchored), pool, Where(table, torch.tensor([9, 5]))


@torch.inference_mode()
def test_mask_rows_over_kernels_are_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, pool, where = of_head(anchored=True)
    everywhere = torch.ones(2, 4, 4, dtype=torch.bool)
    rows, pool = Rows(where.context_len[:, None] + torch.arange(4), everywhere, where), pool.from_layer(1)
    x = head.blocks(target.embed_tokens(torch.tensor([3, 7])))
    expected = head.draft(x, rows, pool)
    on_kernels(monkeypatch, fused=True)
    fuse(target)
    fuse(head, target)
    assert head.compiled is not None
    torch.testing.assert_close(head.draft(x, rows, pool), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_rows_that_join_over_kernels_are_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, pool, where = of_head(anchored=False)
    rows, tokens = Rows.chain(3, where), random_tokens(target, 2, 3)
    rows = replace(rows, joining=head.joining)
    expected = target(tokens, rows, pool)
    on_kernels(monkeypatch, fused=True)
    fuse(target)
    fuse(head, target)
    assert head.compiled is not None
    out = target(tokens, rows, pool)
    for name in ("hidden", "k", "v", "joined"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name), rtol=1e-4, atol=1e-5)

"""`exact` on CUDA: every product of the target's step, its attention and its head are batch-invariant ones."""

from __future__ import annotations

import copy
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

from d2sd.errors import D2SDError
from d2sd.modeling import kv_pool, product
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.draft_head import reduced_head
from d2sd.modeling.fp8 import kv_scales
from d2sd.modeling.fused import fuse
from d2sd.modeling.kv_pool import Chunks, Rows
from d2sd.modeling.product import Product
from d2sd.modeling.where import Where
from d2sd.plugins import dispatch
from tests.tiny import ancestor_mask, in_fp8, pool_for, random_tokens, random_tree, tiny_decoder


@torch.inference_mode()
def logits(model: Decoder) -> torch.Tensor:
    """Return the logits of chunks, then of a tree behind each."""
    tokens, dtype = random_tokens(model, 2, 13), model.embed_tokens.weight.dtype
    pool, table = pool_for(model.config.body, 2, 13, dtype=dtype, fp8=kv_scales(model))
    rows = Chunks.of([6, 6], Where(table, torch.zeros(2, dtype=torch.long)), pool.page_size)
    out = model(tokens[:, :6].reshape(1, -1), rows, pool)
    pool.write_rows(out.k[:, 0], out.v[:, 0], rows.pages, rows.positions[0])
    mask = ancestor_mask(random_tree(7)).expand(2, -1, -1)
    tree = Rows(6 + mask.sum(-1) - 1, mask, Where(table, torch.full((2,), 6)))
    return model.logits(torch.cat([out.hidden.view(2, 6, -1), model(tokens[:, 6:], tree, pool).hidden], 1))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_product_and_attention_is_batch_invariant(fp8: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder("llama", attention_bias=bias)
    model = in_fp8(model, cache=True) if fp8 else model
    expected = logits(model)
    fuse(exact := copy.deepcopy(model), exact=True)
    calls: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        run = getattr(module, name)

        def counting(*arguments: Any, **named: Any) -> Any:
            calls[name] += named.get("exact", True)
            return run(*arguments, **named)

        monkeypatch.setattr(module, name, counting)

    counted(product, "linear")
    counted(kv_pool, "cascade_attention")
    monkeypatch.setattr(Product, "_product", None)  # no other product
    found = logits(exact)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)
    # two passes of three layers; the head's was bound when the model was fused
    assert calls == {"linear": 2 * 3 * 4, "cascade_attention": 2 * 3}
    assert exact.packed_head is not None


@pytest.mark.usefixtures("anywhere")
def test_drafts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduced head of the drafters is PyTorch's product on a GPU."""
    target = tiny_decoder()
    fuse(target, exact=True)
    ids = torch.tensor([3, 5])
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"), raising=False)
    head: Any = reduced_head(target, ids)
    assert isinstance(head, Product)
    assert head.weights is not None


def test_a_model_that_cannot_be_fused_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_fused_layers", lambda *_, **__: False)
    with pytest.raises(D2SDError, match="batch-invariant step needs fused layers"):
        fuse(tiny_decoder(), exact=True)
    fuse(tiny_decoder())

"""Other implementations of the attention, each over contiguous K and V: context, then new rows, [B, Hkv, S + T, D].

All but FlexAttention are given the query heads of one K/V head as rows of one matrix, [B, Hkv, Hq/Hkv · T, D], so that
they too read K and V once for them. Nothing but the attention itself is in their time: gathering is timed alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu.call import Call
from d2sd.plugins.shared.fp8 import from_pages

# Shape letters as in plugins/cascade_attention/reference.py; L = S + T.

Run = Callable[[], Tensor]
#: SDPA backends that take a mask. "math" is PyTorch's fallback, and the only one on a CPU.
BACKENDS = {
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
FLASH, FLEX, GATHER = "flash, no mask", "flex", "gather"


def gather(call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, L, D] in q's type; unused slots as the pages have them."""

    def one(pages: Tensor, new: Tensor, scale: Tensor | None) -> Tensor:
        old = pages.flatten(1).index_select(0, call.context.page_table.flatten())
        if scale is not None:
            old = from_pages(old, scale, new.dtype)
        return torch.cat([old.view(len(new), -1, *new.shape[2:]), new], dim=1).transpose(1, 2)

    context = call.context
    return one(context.k_pages, call.k, context.k_scale), one(context.v_pages, call.v, context.v_scale)


def cleaned(call: Call) -> tuple[Tensor, Tensor]:
    """Pages with 0 in unused slots: other implementations multiply masked values, so NaN would propagate."""
    keys, values = gather(call)
    unused = ~in_context(call)[:, None, :, None]
    context = unused.shape[2]
    keys[:, :, :context].masked_fill_(unused, 0)
    values[:, :, :context].masked_fill_(unused, 0)
    return keys, values


def in_context(call: Call) -> Tensor:
    """[B, S] bool."""
    slots = call.context.page_table.shape[1] * call.context.k_pages.shape[1]
    return torch.arange(slots, device=call.q.device) < call.context.context_len[:, None]


def bias(call: Call) -> Tensor:
    """[B, 1, Hq/Hkv · T, L] in q's type: 0 where a row attends to a key, else -inf."""
    batch, rows, heads = call.q.shape[:3]
    group = heads // call.k.shape[2]
    context = in_context(call)[:, None].expand(batch, rows, -1)
    seen = torch.cat([context, call.attn_mask], dim=2)
    hidden = torch.zeros(seen.shape, dtype=call.q.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return hidden.repeat(1, group, 1)[:, None]


def packed_queries(call: Call) -> Tensor:
    """[B, Hkv, Hq/Hkv · T, D]; row t of head g of a group is at g · T + t."""
    batch, rows, heads, size = call.q.shape
    kv_heads = call.k.shape[2]
    grouped = call.q.view(batch, rows, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    return grouped.reshape(batch, kv_heads, -1, size)


def unpacked(out: Tensor, call: Call) -> Tensor:
    """[B, Hkv, Hq/Hkv · T, D] back to [B, T, Hq, D]."""
    batch, rows, heads, size = call.q.shape
    kv_heads = call.k.shape[2]
    return out.view(batch, kv_heads, heads // kv_heads, rows, size).permute(0, 3, 1, 2, 4).reshape(call.q.shape)


def sdpa(call: Call, keys: Tensor, values: Tensor, mask: Tensor | None, backend: SDPBackend) -> Run:
    """SDPA over packed queries; the caller unpacks the result. Without a mask every row attends to every key."""
    queries = packed_queries(call)

    def run() -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    return run


def flex(call: Call, keys: Tensor, values: Tensor) -> Run:
    """FlexAttention, compiled on CUDA; the caller transposes the result [B, Hq, T, D]. The mask is built beforehand."""
    lengths, attn_mask = call.context.context_len, call.attn_mask
    batch, rows = call.q.shape[:2]
    context = keys.shape[2] - rows

    def seen(b: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return torch.where(key < context, key < lengths[b], attn_mask[b, row, (key - context).clamp(min=0)])

    mask = create_block_mask(seen, batch, None, rows, keys.shape[2], device=call.q.device)
    queries = call.q.transpose(1, 2).contiguous()
    attend: Callable[..., Tensor] = flex_attention
    if call.q.is_cuda:
        torch._dynamo.reset()  # otherwise earlier shapes make the next compilation dynamic and slower
        attend = torch.compile(attend, dynamic=False)
    return lambda: attend(queries, keys, values, block_mask=mask, enable_gqa=True)

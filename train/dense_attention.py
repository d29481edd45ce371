"""`packing.attend_packed` in one of PyTorch's attention kernels a layer: it reads the mask below and stores no scores.

    keys      context of the sequence 0 .. S-1      padding      slots of block 0 | block 1 | … | block A-1
    queries   ┌───────────────────────────────────────────────┬───────────────────────────────────────────┐
    block a   │ 1 … 1 (before anchor a)  0 … 0                │    0     |    0    | … 1 (block a) … |  0   │

Layers with a window see less of the context, causal ones nothing behind a slot. The query heads of a K/V head are rows
of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.layers import Attend
from d2sd.train.data.packing import Packed

# Shape letters: B sequences, A blocks of each, G block size γ, S tokens, N tokens of all sequences, T = A·G rows,
# L layers, g query heads of each K/V head, Hkv heads, D head size.

#: Keys are padded to a multiple of this, as the kernel needs its mask.
_ALIGNED = 16
#: Parts of a batch with a length of context each.
_PARTS = 4
#: The first is a CPU's: with a mask a GPU takes the second.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def takes(drafter: DraftModel) -> bool:
    """Whether no layer has sinks, for which PyTorch's kernels have no argument."""
    return not drafter.config.body.sinks


def token_context(drafter: DraftModel, packed: Packed) -> tuple[Tensor, Tensor]:
    """Keys and values [L, B, S, Hkv, D] of the context, computed of tokens alone; padding has zeros."""
    batch, length = packed.features.shape[:2]
    own = packed.features.flatten(0, 1)[packed.real].float()

    def spread(part: Tensor) -> Tensor:  # [L, 1, N, Hkv, D]
        out = part.new_zeros(len(part), batch * length, *part.shape[3:])
        return out.index_copy(1, packed.real, part[:, 0]).view(len(part), batch, length, *part.shape[3:])

    keys, values = drafter.context_keys_values(own[None], (packed.real % length)[None])
    return spread(keys), spread(values)


def attend_dense(drafter: DraftModel, packed: Packed, keys: Tensor, values: Tensor) -> Attend:
    """Same results as `attend_packed`, for a drafter that `takes`, over a context [L, B, S, Hkv, D].

    Quarters of the batch attend by themselves, to as many tokens as their longest sequence has: best sorted by length.
    """
    blocks, slots = packed.positions.shape[1:]
    rows, count = blocks * slots, len(packed.lengths)
    body = drafter.config.body
    groups, size = body.num_heads // body.num_kv_heads, -(-count // _PARTS)
    lengths = [max(packed.lengths[start : start + size]) for start in range(0, count, size)]
    padding = [-(length + rows) % _ALIGNED for length in lengths]
    masks = {
        view: [
            _mask(positions, length + more, groups, *view)
            for positions, length, more in zip(torch.split(packed.positions, size), lengths, padding, strict=True)
        ]
        for view in set(body.views)
    }
    # `split` and `unbind`, whose gradients are one copy: those of slices are as many tensors of the whole's size
    contexts = [
        list(zip(torch.split(k, size), torch.split(v, size), strict=True)) for k, v in zip(keys, values, strict=True)
    ]

    def joined(context: Tensor, inner: Tensor, part: int) -> Tensor:
        """Context [B, S, Hkv, D] and the rows' own [B, T, Hkv, D] -> [B, Hkv, length + padding + T, D]."""
        zeros = inner.new_zeros(len(inner), padding[part], *inner.shape[2:])
        return torch.cat([context[:, : lengths[part]].to(inner.dtype), zeros, inner], 1).transpose(1, 2)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "see `takes`"
        # cast to one dtype: under autocast norms and products return different ones
        q, k = q.to(v.dtype), k.to(v.dtype)
        heads = q.view(count, rows, -1, groups, q.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, g·T, D]
        own, found = zip(torch.split(heads, size), torch.split(k, size), torch.split(v, size), strict=True), []
        with sdpa_kernel(_KERNELS):
            for part, (queries, part_k, part_v) in enumerate(own):
                context_k, context_v = contexts[index][part]
                all_k, all_v = joined(context_k, part_k, part), joined(context_v, part_v, part)
                mask = masks[body.views[index]][part].to(v.dtype)
                found.append(F.scaled_dot_product_attention(queries, all_k, all_v, attn_mask=mask))
        out = torch.cat(found).view(count, -1, groups, rows, q.shape[-1])
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

    return attend


def _mask(positions: Tensor, width: int, groups: int, window: int | None, causal: bool) -> Tensor:
    """[B, 1, g·T, width + T]: 0 where a row of blocks at `positions [B, A, G]` sees a key, else -inf."""
    batch, blocks, slots = positions.shape
    keys, rows = (torch.arange(count, device=positions.device) for count in (width, blocks * slots))
    context = (keys < positions[:, :, :1, None]).expand(-1, -1, slots, -1)  # [B, A, G, width]
    block, distance = rows // slots, rows[:, None] - rows
    inner = block[:, None] == block
    if causal:
        inner = inner & (distance >= 0)
    if window is not None:
        context, inner = context & (positions[..., None] - keys < window), inner & (distance < window)
    seen = torch.cat([context.flatten(1, 2), inner.expand(batch, -1, -1)], -1)
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device=seen.device).masked_fill(~seen, float("-inf"))
    return mask.repeat(1, groups, 1)[:, None]

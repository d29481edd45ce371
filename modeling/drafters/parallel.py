"""FlexDraft's parallel mode: a block of mask rows behind every node of the tree that the target verifies.

Each block drafts for the case that the accepted path ends at its node. It sees what its node sees and the node itself,
so the block that is used equals the one that sequential mode drafts in the next step. The mask rows pass the head's own
layers behind the target's pass, over the same keys and values. Anchored heads have no such mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.modeling.decoder import DecoderOutput, TargetModel
from d2sd.modeling.kv_pool import KVPool, Rows

if TYPE_CHECKING:
    from d2sd.modeling.drafters.flexdraft import FlexHead

# Shape letters: B requests, N nodes, G block size γ, E hidden, Hq/Hkv heads, D head size.


def verify_and_draft(
    head: FlexHead, target: TargetModel, tokens: Tensor, rows: Rows, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
) -> tuple[DecoderOutput, Tensor]:
    """The target's pass over tokens [B, N], and hidden states [B, N, G, E] of the mask rows behind each node.

    `pool` has the target's pages.
    """
    out: DecoderOutput = target(tokens, rows, pool, aux_layer_ids)
    split, count, size = head.config.split_layer, tokens.shape[1], head.config.block_size
    behind = rows_behind(rows, size)
    attend_all = pool.from_layer(split).attend(behind)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        q = torch.cat([q.new_zeros(len(q), count, *q.shape[2:]), q], 1)
        k, v = (torch.cat([nodes[split + index], masks], 1) for nodes, masks in ((out.k, k), (out.v, v)))
        return attend_all(index, q, k, v)[:, count:]

    positions = behind.positions[:, count:]
    hidden: Tensor = head(head.mask_embedding.expand(*positions.shape, -1), positions, attend)
    return out, hidden.reshape(len(hidden), count, size, -1)


def rows_behind(rows: Rows, size: int) -> Rows:
    """The rows of `rows`, then behind each of them, in their order, a block of `size` mask rows.

    A block sees what its row sees, and itself; nothing else sees it.
    """
    count, device = rows.positions.shape[1], rows.positions.device
    slots = torch.arange(size, device=device)
    positions = (rows.positions[:, :, None] + 1 + slots).flatten(1)
    of_block = torch.arange(count, device=device).repeat_interleave(size)
    masks = torch.cat([rows.attn_mask[:, of_block], (of_block[:, None] == of_block).expand(len(positions), -1, -1)], 2)
    row_mask = F.pad(rows.attn_mask, (0, count * size))
    attn_mask = torch.cat([row_mask, masks], 1)
    return Rows(torch.cat([rows.positions, positions], 1), attn_mask, rows.where)

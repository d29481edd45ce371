"""Blocks to train on: anchors drawn in a sequence, what of each block is visible, and the attention among them.

    keys      tokens of the sequence 0 .. S-1 (context K/V)      slots of this block
    queries   ┌─────────────────────────────────────────────┬──────────────────────┐
    block a,  │ 1 1 1 … 1 (strictly before anchor a) 0 0 0 … │ 1 1 1 … 1 (no order) │   other blocks: never
    γ slots   └─────────────────────────────────────────────┴──────────────────────┘

Slot k of the block anchored at token a stands at position a + k and predicts the token there; slot 0 is the anchor
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.modeling.drafter import Drafter
from d2sd.modeling.layers import Attend
from d2sd.train.features import TrainingSequence

# Shape letters: A blocks (anchors) of one sequence, G block size γ, S tokens, Hq/Hkv heads, D head size, E hidden.


@dataclass(frozen=True, slots=True)
class Blocks:
    """A blocks of one sequence."""

    positions: Tensor  # [A, G] int64, anchor + slot
    tokens: Tensor  # [A, G] int64, the real tokens (clamped at the sequence's end: see `inside`)
    inside: Tensor  # [A, G] bool, slots that lie in the sequence


def draw_blocks(sequence: TrainingSequence, block_size: int, count: int, generator: torch.Generator) -> Blocks:
    """Up to `count` random anchors without replacement, from the prompt's last token to the last token but one."""
    first, last = sequence.prompt_length - 1, len(sequence.tokens) - 2
    anchors = first + torch.randperm(last - first + 1, generator=generator)[:count].sort().values
    return blocks_at(sequence, anchors, block_size)


def blocks_at(sequence: TrainingSequence, anchors: Tensor, block_size: int) -> Blocks:
    """The blocks anchored at the given tokens [A]."""
    positions = anchors[:, None] + torch.arange(block_size)
    inside = positions < len(sequence.tokens)
    return Blocks(positions, sequence.tokens[positions.clamp(max=len(sequence.tokens) - 1)], inside)


def attend_in_sequence(drafter: Drafter, features: Tensor, positions: Tensor) -> Attend:
    """Attention of blocks as drawn above; `features [S, n·E]` pass through the fusion, so gradients reach it."""
    length = len(features)
    keys, values = drafter.context_keys_values(features[None], torch.arange(length, device=features.device)[None])
    before = torch.arange(length, device=features.device) < positions[:, :1]  # [A, S]: strictly before the anchor

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, slots, heads, size = q.shape
        kv_heads = k.shape[2]
        # [A, G, Hkv, g, D] -> [Hkv, A·g·G, D] for the context, [A, Hkv, g·G, D] for the block's own slots
        grouped = q.view(blocks, slots, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        own_q = grouped.reshape(blocks, kv_heads, -1, size)
        context_q = own_q.transpose(0, 1).reshape(kv_heads, -1, size)
        context_k, context_v = keys[index, 0].transpose(0, 1), values[index, 0].transpose(0, 1)  # [Hkv, S, D]
        outer = (context_q @ context_k.transpose(1, 2)).view(kv_heads, blocks, -1, length).transpose(0, 1)
        outer = outer.float().masked_fill(~before[:, None, None], float("-inf"))
        inner = (own_q @ k.permute(0, 2, 3, 1)).float()
        weights = (torch.cat([outer, inner], -1) * size**-0.5).softmax(-1).to(v.dtype)
        outer, inner = weights.split([length, slots], dim=-1)
        from_context = outer.transpose(0, 1).reshape(kv_heads, -1, length) @ context_v
        from_context = from_context.view(kv_heads, blocks, -1, size).transpose(0, 1)
        out: Tensor = from_context + inner @ v.transpose(1, 2)
        out = out.reshape(blocks, kv_heads, heads // kv_heads, slots, size).permute(0, 3, 1, 2, 4)
        return out.reshape(blocks, slots, heads, size)

    return attend

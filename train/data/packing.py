"""Training blocks: anchors drawn in B sequences, the visible tokens of each block, and the attention mask.

    keys      tokens of the sequence 0 .. S-1 (context K/V)      slots of this block
    queries   ┌─────────────────────────────────────────────┬──────────────────────┐
    block a,  │ 1 1 1 … 1 (strictly before anchor a) 0 0 0 … │ 1 1 1 … 1 (no order) │   other blocks: never
    γ slots   └─────────────────────────────────────────────┴──────────────────────┘

Layers with a window see less of the context, causal ones nothing behind a slot.

Slot k of the block anchored at token a has position a + k and predicts the token there; slot 0 is the anchor itself.
Sequences of a batch are padded to the longest, with blocks without any slot inside; padding comes after every anchor,
so the same mask hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.layers import Attend
from d2sd.modeling.where import mapped
from d2sd.train.data.features import TrainingSequence

# Shape letters: B sequences, A blocks (anchors) of each, G block size γ, S tokens, Hq/Hkv heads, D head size, E hidden.


@dataclass(frozen=True, slots=True)
class Packed:
    """A blocks of each of B sequences."""

    positions: Tensor  # [B, A, G] int64, anchor + slot
    tokens: Tensor  # [B, A, G] int64, the real tokens (clamped at the sequence's end: see `inside`)
    inside: Tensor  # [B, A, G] bool, slots inside the sequence
    features: Tensor  # [B, S, n·E]
    target_hidden: Tensor  # [B, A, G, E]: the target's hidden state that predicts each slot, row p - 1 for position p
    real: Tensor  # [N] int64, the rows of features [B·S] that are tokens: the others are padding
    drafted: Tensor  # [N] int64, the slots of [B·A·G] inside the sequence and behind the anchor
    lengths: tuple[int, ...]  # [B], tokens of each sequence
    text: Tensor  # [B, S] int64, all tokens

    def to(self, device: torch.device) -> Packed:
        """Copy to a device, without waiting for it."""
        return mapped(self, lambda part: moved(part, device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. A GPU goes on with earlier work meanwhile: it would wait for memory that is not pinned."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def draw_anchors(sequence: TrainingSequence, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` random anchors without replacement, from the prompt's last token to the second-to-last token."""
    first, last = sequence.prompt_length - 1, len(sequence.tokens) - 2
    return first + torch.randperm(last - first + 1, generator=generator)[:count].sort().values


def pack_blocks(sequences: Sequence[TrainingSequence], anchors: Sequence[Tensor], block_size: int) -> Packed:
    """Build the blocks anchored at the given tokens of each sequence. Hidden states stay where they are."""
    lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
    longest = int(lengths.max())
    tokens = pad_sequence([sequence.tokens for sequence in sequences], batch_first=True)
    starts = pad_sequence(list(anchors), batch_first=True)
    counts = torch.tensor([len(each) for each in anchors])
    drawn = (torch.arange(starts.shape[1]) < counts[:, None])[..., None]  # the others are padding, with zeros
    positions = torch.where(drawn, starts[..., None] + torch.arange(block_size), 0)
    last = (lengths - 1)[:, None, None]
    first = torch.arange(len(sequences))[:, None, None] * longest
    blocks = torch.where(drawn, tokens.flatten()[first + positions.minimum(last)], 0)
    hidden = pad_sequence([sequence.hidden for sequence in sequences], batch_first=True)
    before = first + (positions - 1).clamp(min=0).minimum(last)
    known = hidden.flatten(0, 1)[moved(before, hidden.device)]
    features = pad_sequence([sequence.features for sequence in sequences], batch_first=True)
    real = (torch.arange(longest) < lengths[:, None]).flatten().nonzero()[:, 0]
    inside = drawn & (positions <= last)
    behind = inside & (torch.arange(block_size) > 0)
    drafted = behind.flatten().nonzero()[:, 0]
    return Packed(positions, blocks, inside, features, known, real, drafted, tuple(lengths.tolist()), tokens)


def attend_packed(drafter: DraftModel, features: Tensor, positions: Tensor) -> Attend:
    """Attention of the blocks as drawn above, for rows in the order [B, A·G].

    `features [B, S, n·E]` pass through a drafter's `fc`, so gradients reach it. The mask is built once, for all layers.
    """
    batch, blocks, slots = positions.shape
    length = features.shape[1]
    tokens = torch.arange(length, device=features.device)
    keys, values = drafter.context_keys_values(features, tokens.expand(batch, -1))  # [L, B, S, Hkv, D]
    body = drafter.config.body
    groups = body.num_heads // body.num_kv_heads
    masks = {view: _hidden(positions, tokens, groups, *view) for view in set(body.views)}

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        hidden, hidden_slots = masks[body.views[index]]
        heads, size, kv_heads = q.shape[2], q.shape[3], k.shape[2]
        # the queries of a GQA group are contiguous: [B, Hkv, A, g·G, D]
        own_q = q.view(batch, blocks, slots, kv_heads, -1, size).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
        own_k, own_v = (x.view(batch, blocks, slots, kv_heads, size).permute(0, 3, 1, 2, 4) for x in (k, v))
        context_k, context_v = keys[index].permute(0, 2, 3, 1), values[index].transpose(1, 2)
        outer = (own_q.flatten(2, 3) @ context_k).reshape(batch, kv_heads, blocks, -1, length).float()
        inner = (own_q @ own_k.transpose(-1, -2)).float()
        if hidden_slots is not None:
            inner = inner.masked_fill(hidden_slots, float("-inf"))
        scores = torch.cat([outer.masked_fill(hidden, float("-inf")), inner], dim=-1) * size**-0.5
        if sinks is not None:
            column = sinks.float().view(1, kv_heads, 1, -1, 1, 1).expand(*scores.shape[:3], -1, slots, 1).flatten(3, 4)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(-1).to(v.dtype)
        outer, inner, *_ = weights.split([length, slots, *([] if sinks is None else [1])], dim=-1)
        out: Tensor = (outer.flatten(2, 3) @ context_v).view_as(own_q) + inner @ own_v
        out = out.view(batch, kv_heads, blocks, -1, slots, size).permute(0, 2, 4, 1, 3, 5)  # [B, A, G, Hkv, g, D]
        return out.reshape(batch, blocks * slots, heads, size)

    return attend


def _hidden(
    positions: Tensor, tokens: Tensor, groups: int, window: int | None, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """The keys that slots at `positions [B, A, G]` do not see: of the context [B, 1, A, 1 or g·G, S], where the anchor
    and later tokens are hidden from all, and of their block [g·G, G]; None: nothing. g: query heads of each K/V head.
    """
    hidden = (tokens >= positions[:, :, :1])[:, None, :, None]
    if window is None and not causal:
        return hidden, None
    slot = torch.arange(positions.shape[-1], device=positions.device)
    distance = slot[:, None] - slot
    hidden_slots = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        far = positions[..., None] - tokens >= window  # [B, A, G, S]
        hidden = hidden | far.repeat(1, 1, groups, 1)[:, None]
        hidden_slots = hidden_slots | (distance >= window)
    return hidden, hidden_slots.repeat(groups, 1)

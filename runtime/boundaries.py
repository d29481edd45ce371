"""Where the first draft is likely to be rejected, and the blocks that restart there (arXiv 2606.04446, Eq. 3-5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shape letters: B requests, G block size γ (slot 0 the anchor), K branches.


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted block: slot 0 is the anchor with confidence 1, slot k the token proposed at anchor + k."""

    tokens: Tensor  # [..., G] int64
    confidence: Tensor  # [..., G] fp32: the drafter's largest probability, softmax at T = 1


def boundary_scores(confidence: Tensor) -> Tensor:
    """r(i) = (c_1 … c_i)(1 - c_{i+1}), i = 0 .. γ-2: probability that exactly i drafts are accepted. [B, G] -> [B,
    G-1].
    """
    drafts = confidence[:, 1:]
    reached = torch.cat([torch.ones_like(drafts[:, :1]), drafts[:, :-1].log().cumsum(-1).exp()], dim=-1)
    return reached * (1 - drafts)


def pick_boundaries(first: Draft, branches: int) -> Tensor:
    """The K likeliest boundaries [B, K], best first; boundary i keeps the anchor and drafts 1 .. i."""
    return boundary_scores(first.confidence).topk(branches, dim=-1).indices


def branch_blocks(first: Draft, boundaries: Tensor, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """The second drafter's input: the first draft up to each boundary, masks behind.

    Returns tokens [B, K, G], and the rejected token of each branch [B, K]: the draft behind its boundary, assumed
    wrong.
    """
    slots = torch.arange(first.tokens.shape[1], device=boundaries.device)
    kept = slots <= boundaries[..., None]
    blocks = torch.where(kept, first.tokens[:, None], mask_token_id)
    return blocks, first.tokens.gather(1, boundaries + 1)


def forbid_rejected(logits: Tensor, boundaries: Tensor, rejected: Tensor) -> Tensor:
    """logits [B, K, G-1, V] of slots 1 .. γ-1: the slot behind each boundary may not repeat its rejected token (in
    place).
    """
    batch, branches = boundaries.shape
    b = torch.arange(batch, device=logits.device)[:, None]
    k = torch.arange(branches, device=logits.device)
    logits[b, k, boundaries, rejected] = float("-inf")  # slot i+1 lies at index i
    return logits


def joined(first: Draft, boundaries: Tensor, tokens: Tensor, confidence: Tensor) -> Draft:
    """Whole branches [B, K, G]: the first draft up to each boundary, the second drafter's slots behind it."""
    slots = torch.arange(first.tokens.shape[1], device=boundaries.device)
    kept = slots <= boundaries[..., None]
    return Draft(
        torch.where(kept, first.tokens[:, None], tokens), torch.where(kept, first.confidence[:, None], confidence)
    )

"""Writes a draft tree into TensorRT-LLM's slot storage, from which its attention and its acceptance read it.

A slot's row is all that a step knows of a tree: attention takes ancestors and depths from it, acceptance the links from
a node to its first child and to its next sibling. Both describe one tree, so that an accepted node was computed with
its ancestors visible and nothing else: then the text is the target's, whatever was drafted.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from d2sd.plugins.trees import Tree

# Shape letters: B requests, R slots and the dummy slot, N nodes of every tree, W = ceil(N / 32) words of a mask.


class SlotStorage(Protocol):
    """The fields of `DynamicTreeSlotStorage` that are read or written, all on the device."""

    packed_mask: Tensor  # [R, N, W] int32: bit c of a node's row says that it attends to node c, the lowest bit first
    position_offsets: Tensor  # [R, N] int32: depth
    retrieve_index: Tensor  # [R, N] int32: the node's own number
    retrieve_next_token: Tensor  # [R, N] int32: first child, -1 without one
    retrieve_next_sibling: Tensor  # [R, N] int32: next sibling, -1 without one
    has_tree: Tensor  # [R] bool; False: acceptance takes the root alone
    all_ids_buf: Tensor  # [at least B] int64: the slot of each request of the batch

    def mark_valid(self, slot_ids: Tensor, count: int) -> None:
        """Set `has_tree` of the first `count` slots, but not of the dummy."""


def store_tree(storage: SlotStorage, slots: Tensor, tree: Tree) -> Tensor:
    """Write the trees [B, n] of the slots [B], n of at most N nodes; returns the drafted tokens [B, N - 1] int32.

    Nodes past n and invalid ones see themselves alone, and no link leads to them. Shapes are static and no value is
    read back.
    """
    nodes, words = storage.packed_mask.shape[1:]
    number = torch.arange(nodes, device=slots.device)
    missing = nodes - tree.tokens.shape[1]
    tokens, parent, depth, valid = (pad(x, (0, missing)) for x in (tree.tokens, tree.parent, tree.depth, tree.valid))
    visible = pad(tree.attn_mask, (0, missing, 0, missing)) | (number[:, None] == number)
    child = valid & (number > 0)
    after = number > number[:, None]  # [N, N]: the column comes after the row
    children = child[:, None] & (parent[:, None] == number[:, None])  # [B, parent, child]
    siblings = child[:, :, None] & child[:, None] & (parent[:, :, None] == parent[:, None]) & after
    rows = {
        "packed_mask": pack_bits(visible, words),
        "position_offsets": depth,
        "retrieve_index": number.expand(len(slots), -1),
        "retrieve_next_token": _first(children, number),
        "retrieve_next_sibling": _first(siblings, number),
    }
    for name, row in rows.items():
        getattr(storage, name).index_copy_(0, slots, row.to(torch.int32).contiguous())
    storage.mark_valid(slots, len(slots))
    return tokens[:, 1:].to(torch.int32)


def pack_bits(bits: Tensor, words: int) -> Tensor:
    """bool [..., N] -> int32 [..., W], the lowest bit first."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    padded = pad(bits, (0, 32 * words - bits.shape[-1])).reshape(*bits.shape[:-1], words, 32)
    packed: Tensor = (padded.int() << places).sum(-1, dtype=torch.int32)  # bits are disjoint: nothing carries over
    return packed


def _first(chosen: Tensor, number: Tensor) -> Tensor:
    """The smallest number of each row of bool [B, N, N] that is chosen, -1 without one."""
    least = torch.where(chosen, number, len(number)).amin(-1)
    return torch.where(least < len(number), least, -1)

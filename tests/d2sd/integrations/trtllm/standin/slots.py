"""`spec_tree_manager.py`: trees by slot, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Shape letters: R slots and the dummy slot, N nodes, W = ceil(N / 32) words of a mask.


class DynamicTreeSlotStorage:
    """A row of each field for every slot, and one more for requests that pad a graph."""

    def __init__(self, num_slots: int, n_dt: int, mask_width: int, top_k: int = 1) -> None:
        rows = num_slots + 1
        self.dummy_slot_id = num_slots
        self.packed_mask = torch.zeros(rows, n_dt, mask_width, dtype=torch.int32)
        self.position_offsets = torch.zeros(rows, n_dt, dtype=torch.int32)
        self.retrieve_index = torch.zeros(rows, n_dt, dtype=torch.int32)
        self.retrieve_next_token = torch.full((rows, n_dt), -1, dtype=torch.int32)
        self.retrieve_next_sibling = torch.full((rows, n_dt), -1, dtype=torch.int32)
        self.has_tree = torch.zeros(rows, dtype=torch.bool)
        self.all_ids_buf = torch.zeros(num_slots, dtype=torch.long)
        for slot in range(rows):
            self.mark_invalid(slot)

    def fill_all_slot_ids(self, context_requests: list[Any], generation_requests: list[Any]) -> None:
        for row, request in enumerate([*context_requests, *generation_requests]):
            dummy = request.is_cuda_graph_dummy or request.py_seq_slot is None
            self.all_ids_buf[row] = self.dummy_slot_id if dummy else request.py_seq_slot

    def mark_valid(self, slot_ids: Tensor, count: int) -> None:
        self.has_tree[slot_ids[:count]] = True
        self.has_tree[self.dummy_slot_id] = False

    def mark_invalid(self, slot_id: int) -> None:
        """No tree: a chain to look at, of which nothing is accepted."""
        self.has_tree[slot_id] = False
        nodes = self.position_offsets.shape[1]
        self.position_offsets[slot_id] = torch.arange(nodes)
        self.retrieve_next_token[slot_id] = torch.tensor([*range(1, nodes), -1])
        self.retrieve_next_sibling[slot_id] = -1
        self.packed_mask[slot_id] = 0
        for node in range(nodes):
            for ancestor in range(node + 1):
                bit = 1 << (ancestor % 32)
                self.packed_mask[slot_id, node, ancestor // 32] |= bit if bit < 1 << 31 else -(1 << 31)

    def pack_retrieve_from_slots(self, slot_ids: Tensor, count: int) -> Tensor:
        links = (self.retrieve_index, self.retrieve_next_token, self.retrieve_next_sibling)
        return torch.stack([x[slot_ids[:count]] for x in links], dim=-1)

    def next_links_from_slots(self, slot_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self.retrieve_next_token[slot_ids[:count]], self.retrieve_next_sibling[slot_ids[:count]]


class SpecTreeManager:
    def __init__(
        self, max_num_requests: int, max_total_draft_tokens: int, max_draft_len: int, dynamic_tree_max_topK: int
    ) -> None:
        nodes = max_total_draft_tokens + 1
        self.slot_storage = DynamicTreeSlotStorage(max_num_requests, nodes, -(-nodes // 32), dynamic_tree_max_topK)

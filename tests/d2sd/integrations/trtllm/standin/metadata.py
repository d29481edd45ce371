"""Metadata of a step, for attention and the worker. The mask of a tree has two layouts, by architecture:

sm_90, sm_120    a flat run of G·N·W words, whatever the buffer's shape
sm_100, sm_103   padded: [requests, rows, words] of the buffer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Shape letters: B requests, C contexts before G generations, T rows of all, N nodes, W = ceil(N / 32).


class TrtllmAttentionMetadata:
    def __init__(self, requests: int, nodes: int, manager: Any, *, sm: int) -> None:
        width = nodes + 24  # Eagle's drafting may have more rows than a tree has nodes
        self.kv_cache_manager, self.sm = manager, sm
        self._seq_lens = torch.zeros(requests, dtype=torch.int32)
        self._seq_lens_cuda = torch.zeros(requests, dtype=torch.int32)
        self.kv_lens_cuda = torch.zeros(requests, dtype=torch.int32)
        self.kv_cache_block_offsets = torch.zeros(requests, manager.max_blocks_per_seq, dtype=torch.long)
        self.spec_decoding_packed_mask = torch.full((requests, width, -(-width // 32)), -1, dtype=torch.int32)
        self.spec_decoding_position_offsets = torch.full((requests * width,), -1, dtype=torch.int32)
        self.spec_decoding_generation_lengths = torch.zeros(requests, dtype=torch.int32)
        self.spec_decoding_position_offsets_cpp = None
        self.num_contexts = self.num_seqs = self.num_ctx_tokens = 0
        self.use_spec_decoding, self.all_rank_num_tokens = True, None
        self._saved: dict[str, Tensor] = {}

    def fill(self, contexts: int, lengths: list[int], past: list[int], blocks: list[list[int]]) -> None:
        """A step over requests with `lengths` new rows behind `past` tokens of K/V."""
        count = len(lengths)
        self.num_contexts, self.num_seqs, self.num_ctx_tokens = contexts, count, sum(lengths[:contexts])
        self._seq_lens[:count] = self._seq_lens_cuda[:count] = torch.tensor(lengths, dtype=torch.int32)
        self.kv_lens_cuda[:count] = torch.tensor([p + n for p, n in zip(past, lengths, strict=True)])
        for row, own in enumerate(blocks):
            self.kv_cache_block_offsets[row, : len(own)] = torch.tensor(own)

    def update_spec_dec_param(
        self,
        batch_size: int,
        is_spec_decoding_enabled: bool,
        is_spec_dec_tree: bool,
        is_spec_dec_dynamic_tree: bool,
        max_draft_len: int,
        max_total_draft_tokens: int,
        spec_metadata: Any = None,
        spec_tree_manager: Any = None,
        num_contexts: int = 0,
    ) -> None:
        """Copy mask and positions of the generations' slots, before the pass and outside a graph."""
        storage, nodes = spec_tree_manager.slot_storage, max_total_draft_tokens + 1
        slots = storage.all_ids_buf[num_contexts:batch_size]
        packed_mask, position_offsets = storage.packed_mask[slots], storage.position_offsets[slots]
        self.spec_decoding_position_offsets[: position_offsets.numel()] = position_offsets.flatten()
        if self.sm in (100, 103):
            self.spec_decoding_packed_mask[: len(slots), :nodes, : packed_mask.shape[-1]] = packed_mask
        else:
            self.spec_decoding_packed_mask.view(-1)[: packed_mask.numel()] = packed_mask.flatten()
        self.spec_decoding_generation_lengths[: len(slots)] = nodes

    def tree_mask(self, generations: int, nodes: int) -> Tensor:
        """The mask [G, N, N] as attention of this architecture reads it."""
        words = -(-nodes // 32)
        if self.sm in (100, 103):
            packed = self.spec_decoding_packed_mask[:generations, :nodes, :words]
        else:
            packed = self.spec_decoding_packed_mask.view(-1)[: generations * nodes * words]
        packed = packed.reshape(generations, nodes, words)
        bits = torch.arange(32, dtype=torch.int32)
        return ((packed[..., None] >> bits) & 1).flatten(-2)[..., :nodes].bool()

    def prepare_for_spec_dec(self, *names: str) -> None:
        assert not self._saved
        for name in names:
            self._saved[name] = getattr(self, name)
            setattr(self, name, self._saved[name].clone())

    def restore_from_spec_dec(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)
        self._saved.clear()

    def on_update(self) -> None:
        """Derived fields; there are none here."""


@dataclass
class Eagle3OneModelSpecMetadata:
    max_draft_len: int
    max_total_draft_tokens: int
    max_num_requests: int
    hidden_size: int
    max_num_tokens: int
    layers_to_capture: Any
    use_rejection_sampling: bool = False
    dtype: torch.dtype = torch.bfloat16
    hidden_states: Tensor = field(default_factory=lambda: torch.zeros(0))
    gather_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    draft_tokens: Tensor = field(default_factory=lambda: torch.zeros(0))
    batch_indices_cuda: Tensor = field(default_factory=lambda: torch.zeros(0))
    is_all_greedy_sample: bool = True
    temperatures: Tensor | None = None  # by row of the logits
    top_ks: Any = None
    top_ps: Any = None
    request_temperatures: Any = None
    request_top_ks: Any = None
    request_top_ps: Any = None
    runtime_draft_len: int = 1
    spec_resource_manager: Any = None

    def __post_init__(self) -> None:
        self.layers_to_capture = sorted(self.layers_to_capture)
        width = self.hidden_size * len(self.layers_to_capture)
        self.hidden_states = torch.zeros(self.max_num_tokens, width, dtype=self.dtype)
        self.batch_indices_cuda = torch.arange(self.max_num_requests)

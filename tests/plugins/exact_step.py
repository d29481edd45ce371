"""The target's whole step in exact mode: plain decoding against other chunks, a tree, another batch and other pages."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fused import fuse
from d2sd.modeling.kv_pool import Chunks, KVPool, Rows
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.modeling.where import Where
from d2sd.plugins import dispatch
from tests.plugins.on_kernels import run_kernels
from tests.tiny import ancestor_mask, pool_for, random_tokens, tiny_decoder

#: A tree in which the text is the path 0, 2, 3, 5, 8; the other nodes are decoys.
PARENTS, PATH = [-1, 0, 0, 2, 2, 3, 5, 3, 5, 8], [0, 2, 3, 5, 8]


@dataclass
class Run:
    """Requests of one engine: what a pass leaves at each position."""

    model: Decoder
    tokens: Tensor  # [B, n]
    seed: int
    spare: int
    done: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)  # [B, V] after each position
    pool: KVPool = field(init=False)
    table: Tensor = field(init=False)
    state_ids: Tensor | None = None  # of states

    def __post_init__(self) -> None:
        batch, length = self.tokens.shape
        weight = self.model.embed_tokens.weight
        self.pool, self.table = pool_for(
            self.model.config.body, batch, length + self.spare, page_size=16, seed=self.seed, dtype=weight.dtype
        )
        if self.pool.states is not None:
            self.state_ids = 1 + torch.arange(batch)

    def chunk(self, size: int) -> None:
        """Prefill so many tokens in one pass."""
        tokens = self.tokens[:, self.done : self.done + size]
        context = torch.full((len(tokens),), self.done)
        rows = Chunks.of(
            [size] * len(tokens), Where(self.table, context, state_ids=self.state_ids), self.pool.page_size
        )
        out = self.model(tokens.reshape(1, -1), rows, self.pool)
        logits = self.model.logits(out.hidden).view(*tokens.shape, -1)
        self.logits |= {self.done + place: row for place, row in enumerate(logits.unbind(1))}
        self.pool.write_rows(out.k[:, 0], out.v[:, 0], rows.pages, rows.positions[0])
        self.done += size

    def single(self) -> None:
        """A plain step: a tree of its root."""
        self.tree([-1], [0])

    def tree(self, parents: list[int], path: list[int]) -> None:
        """Verify a tree whose `path` is the text, and accept that."""
        batch, context = len(self.tokens), torch.full((len(self.tokens),), self.done)
        tokens = random_tokens(self.model, batch, len(parents), seed=9)
        tokens[:, path] = self.tokens[:, self.done : self.done + len(path)]
        mask = ancestor_mask(parents).expand(batch, -1, -1)
        positions = context[:, None] + mask.sum(-1) - 1
        self._commit(tokens, Rows(positions, mask, Where(self.table, context, state_ids=self.state_ids)), path)

    def _commit(self, tokens: Tensor, rows: Rows, path: list[int]) -> None:
        out = self.model(tokens, rows, self.pool)
        logits, chosen = self.model.logits(out.hidden), torch.tensor(path).expand(len(tokens), -1)
        self.logits |= {self.done + place: logits[:, node] for place, node in enumerate(path)}
        positions = self.done + torch.arange(len(path)).expand_as(chosen)
        self.pool.write(out.k, out.v, (self.table,), positions, torch.ones_like(chosen, dtype=torch.bool), chosen)
        if self.pool.states is not None and self.state_ids is not None:
            out.states.commit(self.pool.states, self.state_ids, chosen, torch.full_like(self.state_ids, len(path)))
        self.done += len(path)

    def pages(self) -> Tensor:
        """[2, L, B, n, Hkv, D] of the committed tokens."""
        both = torch.stack([self.pool.k.float(), self.pool.v.float()])
        return both[:, :, self.table].flatten(3, 4)[:, :, :, : self.done]

    def states(self) -> list[Tensor]:
        """States of each request, [L, B, ...]."""
        return [] if self.pool.states is None else [part[:, 1:] for part in self.pool.states.tensors]


@torch.inference_mode()
def check_step(
    dtype: torch.dtype, *, layers_as_kernels: bool = False, windows: bool = False, hybrid: bool = False
) -> None:
    """Bit for bit. Call it where Triton's kernels run on CPU tensors.

    `windows`: shorter than the path in the tree, and ending in a tile; with sinks. `hybrid`: a gated delta net and
    gated attention.
    """
    narrow: dict[str, Any] = {"windows": (3, 20), "sinks": True} if windows else {}
    if hybrid:
        narrow = {"recurrent": DeltaConfig((0,), key_heads=1, value_heads=2, key_size=16, value_size=16)}
    model = tiny_decoder("qwen3_5_text" if hybrid else "qwen3", layers=2, head_dim=16, **narrow).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "use_fused_layers", lambda *_, **__: True)
        run_kernels(patch, "cascade_attention", "kv_pages", "layer_ops.linear", *(["delta_rule"] if hybrid else []))
        if layers_as_kernels:
            run_kernels(patch, "layer_ops.silu_mul")
        fuse(fused := copy.deepcopy(model), exact=True)
        tokens = random_tokens(model, 2, 39)
        plain, other = Run(fused, tokens[:1], 0, 0), Run(fused, tokens.flip(0), 5, 90)
        plain.chunk(34)
        for _ in PATH:
            plain.single()
        for size in (20, 13, 1):
            other.chunk(size)
        other.tree(PARENTS, PATH)
    assert len(plain.logits) == 39
    for position, logits in plain.logits.items():
        assert torch.equal(other.logits[position][1:], logits), position
    assert torch.equal(other.pages()[:, :, 1:], plain.pages())
    for states, wanted in zip(other.states(), plain.states(), strict=True):
        assert torch.equal(states[:, 1:], wanted)
    specified = model.logits(model.full_pass(tokens[:1]).hidden)[0]
    found = torch.cat([plain.logits[position] for position in range(39)])
    assert (found - specified).abs().max() < {torch.float32: 2e-4, torch.float16: 0.2, torch.bfloat16: 1.0}[dtype]

"""The DFlash drafter (arXiv 2602.06036), used for both drafts: block diffusion with injected target context.

    target features [.., n·E] ──fc──> hidden_norm ──> context vector [.., E], shared by all draft layers
    per layer:   context K = k_norm(W_k c), V = W_v c     kept in the drafter's pages, at the tokens' own positions
                 block  K, V from the block's rows        dropped after the pass
                 block queries read [context ; own block], not causal inside the block

The context passes no input_layernorm and has no queries. Embedding and head are the target's. The second drafter (D²SD,
arXiv 2606.04446, "variable prefix") is this same module; its blocks start with more than one real token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.heads import Head, conditioned
from d2sd.modeling.drafters.interface import DraftModel, Tables
from d2sd.modeling.inference import ContextLayers
from d2sd.modeling.kv_pool import CommittedRows, KVPool, Rows
from d2sd.modeling.layers import Attend, Layer, RMSNorm, Rotary
from d2sd.modeling.product import Product
from d2sd.plugins.layer_ops import Front
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, T rows (first draft γ, second draft K·γ), C new context tokens, E hidden, n auxiliary
# layers, Vd draft vocabulary.


class DFlashModel(DraftModel):
    """A drafter of this kind in any form: its context and its blocks, without its layers."""

    config: DrafterConfig
    mask_embedding: nn.Parameter | None  # [E]

    @property
    def head(self) -> Head | None:
        """Scores candidates behind their parents, if it has such a head."""
        return next((module for module in self.children() if isinstance(module, Head)), None)

    def join(self, target: TargetModel) -> None:
        """Let its head take what it needs of the target it drafts for; comes before any pass."""
        if self.head is not None:
            self.head.join(target.embedding.detach())

    @property
    def mask_token_id(self) -> int:  # type: ignore[override]
        return self.config.mask_token_id

    def inject_and_draft(
        self, context: CommittedRows, tokens: Tensor, embed: Callable[[Tensor], Tensor], rows: Rows, pool: KVPool
    ) -> Tensor:
        """Write the K/V of `context` to its pages, then `draft` tokens [B, T]; together, where the layers can."""
        k, v = self.context_keys_values(context.features, context.positions)
        pool.write(k, v, context.tables, context.positions, context.keep)
        return self.draft(self.embedded(tokens, embed), rows, pool)

    def draft_hidden(
        self, blocks: Tensor, rows: Rows, pool: KVPool, context: CommittedRows | None, tables: Tables
    ) -> Tensor:
        tokens = blocks.flatten(1)
        if context is None:
            hidden = self.draft(self.embedded(tokens, tables.embed), rows, pool)
        else:
            hidden = self.inject_and_draft(context, tokens, tables.embed, rows, pool)
        return self._of_slots(hidden.view(*blocks.shape, -1))

    def embedded(self, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Tokens and masks [...] -> [..., E], by the target's table and the mask embedding, if there is one."""
        x, head = embed(tokens), self.head
        if self.mask_embedding is not None:
            x = torch.where((tokens == self.mask_token_id)[..., None], self.mask_embedding.to(x.dtype), x)
        return x if head is None else head.widened(x, tokens, self.mask_token_id)

    def logits(self, hidden: Tensor, anchors: Tensor, tables: Tables) -> Tensor:
        """See `DraftModel`. On a view PyTorch multiplies batch by batch, 60 times slower in bf16 on a CPU."""
        return tables.head(hidden[..., : self.config.body.hidden_size].contiguous())

    def conditioned(self, draft: Draft, hidden: Tensor, blocks: Tensor, temperature: Tensor, width: int) -> Draft:
        assert self.head is not None
        return conditioned(self.head, draft, hidden, blocks, self.mask_token_id, temperature, width)

    def _of_slots(self, hidden: Tensor) -> Tensor:
        """The rows [B, K, S, E] that propose, of hidden states [B, K, G, E]."""
        return hidden if self.config.sample_from_anchor else hidden[:, :, 1:]


class Drafter(DFlashModel):
    """Parameter names equal the z-lab checkpoint layout."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        body = config.body
        self.fc = nn.Linear(len(config.target_layer_ids) * body.hidden_size, body.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        head = config.head
        self.layers = nn.ModuleList(Layer(body) if head is None else head.layer(body) for _ in range(body.num_layers))
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        own = nn.Parameter(torch.zeros(body.hidden_size)) if config.mask_embedding else None
        self.register_parameter("mask_embedding", own)
        self.rotary = Rotary(body.rope, body.head_dim)
        ids = config.draft_vocabulary
        with torch.device("cpu"):  # the ids are known even under torch.device("meta")
            self.register_buffer("draft_ids", None if ids is None else torch.tensor(ids), persistent=False)
        for name, module in [] if head is None else head.modules(body, config.vocab_size):
            self.add_module(name, module)
        self.pool = 0 if self.head is None else self.head.pool

    def join(self, target: TargetModel) -> None:
        super().join(target)
        if self.head is not None:
            self.head.attach(target, self.norm)

    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.fc(features)
        if self.compiled is not None:
            return self.compiled.keys_values(projected, self.hidden_norm, self.rotary, positions)
        context = self.hidden_norm(projected)
        cos_sin = self.rotary(positions, context.dtype)
        layers = cast("Iterable[Layer]", self.layers)
        pairs = [layer.self_attn.keys_values(context, cos_sin) for layer in layers]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def forward(self, embedded: Tensor, positions: Tensor, attend: Attend, size: int | None = None) -> Tensor:
        """Embedded tokens and masks [B, T, E] at `positions [B, T]` -> [B, T, E] for the target's head.

        `size`: rows of a block, where the blocks are not all behind one context. Rows may have more numbers behind
        those E, for layers of its head and for the head itself: these pass no norm.
        """
        x = embedded
        cos_sin, head = self.rotary(positions, x.dtype), self.config.head
        more = () if head is None else head.of_rows(self, positions, size)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, index, attend, *more)
        out: Tensor = self.norm(x[..., : self.config.body.hidden_size])
        return out if out.shape == x.shape else torch.cat([out, x[..., out.shape[-1] :]], -1)

    def draft(self, x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        if self.compiled is not None:
            hidden: Tensor = self.compiled(x, self.rotary, rows, pool)[0]
        else:
            hidden = self(x, rows.positions, pool.attend(rows))
        return hidden

    def inject_and_draft(
        self,
        context: CommittedRows,
        tokens: Tensor,
        embed: Callable[[Tensor], Tensor],
        rows: Rows,
        pool: KVPool,
        *,
        block: int = 0,
        head: Product | None = None,
    ) -> Tensor:
        """See `DFlashModel`; `block` and `head` of layers that take context and draft together, as `ContextLayers`."""
        layers = self.compiled
        if not isinstance(layers, ContextLayers):
            return super().inject_and_draft(context, tokens, embed, rows, pool)
        own = self.mask_embedding is not None
        x = self.embedded(tokens, embed) if own else layers.input_of(tokens, embed)
        front = Front(self.fc(context.features.flatten(0, 1)), self.hidden_norm.weight, context.positions)
        return layers.with_context(context, front, x, self.rotary, rows, pool, block=block, head=head)

    def draft_hidden(
        self, blocks: Tensor, rows: Rows, pool: KVPool, context: CommittedRows | None, tables: Tables
    ) -> Tensor:
        if context is None or not isinstance(self.compiled, ContextLayers):
            return super().draft_hidden(blocks, rows, pool, context, tables)
        block = 0 if self.config.sample_from_anchor else blocks.shape[2]
        head = tables.head if isinstance(tables.head, Product) and not self.pool else None  # `conditioned` reads them
        given = context, blocks.flatten(1), tables.embed, rows, pool
        hidden = self.inject_and_draft(*given, block=block, head=head)
        return hidden.view(*blocks.shape[:2], -1, hidden.shape[-1])

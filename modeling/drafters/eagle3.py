"""EAGLE-3 (arXiv 2503.01840): one layer that drafts token after token, from fused features of the target.

    features of a token [.., n·E] ──fc──> h [.., E]
    row of token t        x = [input_layernorm(embedding of t) ; hidden_norm(h of the token before t)] [.., 2E]
                          y = h + attention(x),  h' = y + mlp(post_attention_layernorm(y))
    the token behind t    draft_head(norm(h')), over a draft vocabulary of its own

In its rows of drafts, h' of the row before takes the place of h, which the target has not computed yet. So a block of S
drafts takes S passes of one row, each behind the token that was chosen before it; blocks of a request take them
together. A row's positions rotate by the place of its features, one before its token's.

A committed token's K/V depend on the features of the token before, which may be in another page, or of another step.
Pages therefore keep h of every token besides its K/V: in the layers behind the first, which do not attend. Nothing is
before the first token of a text, so no row sees its K/V.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.drafters.eagle3_config import Eagle3Config
from d2sd.modeling.drafters.interface import DraftModel, Tables
from d2sd.modeling.kv_pool import CommittedRows, ContextRows, KVPool, Rows, causal_mask
from d2sd.modeling.layers import Layer, RMSNorm, Rotary
from d2sd.plugins.cascade_attention import AttnMask, cascade_attention

# Shape letters: B requests, K blocks of each, S slots, N tokens of any requests, n auxiliary layers, E hidden, L layers
# of the pages, Hq/Hkv heads, D head size, V vocabulary or draft vocabulary.


class Eagle3Layer(Layer):
    """A layer whose attention reads a token's embedding and a hidden state, both normalized."""

    compiles = False

    def __init__(self, config: BodyConfig) -> None:
        super().__init__(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = cast("nn.Linear", self.self_attn.get_submodule(name))
            joined = nn.Linear(2 * plain.in_features, plain.out_features, bias=plain.bias is not None)
            self.self_attn.add_module(name, joined)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[..., E] of tokens and of the features before them -> [..., 2E]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)


class Eagle3(DraftModel):
    """Parameter names equal ModelOpt's layout."""

    config: Eagle3Config
    mask_token_id = -1  # never embedded: a slot's token is chosen before its row
    autoregressive = True

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        layer, ids = config.layer, config.draft_vocabulary
        self.fc = nn.Linear(len(config.target_layer_ids) * layer.hidden_size, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(layer)])
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.draft_head = nn.Linear(layer.hidden_size, config.vocab_size if ids is None else len(ids), bias=False)
        self.rotary = Rotary(layer.rope, layer.head_dim)
        with torch.device("cpu"):  # the ids are known even under torch.device("meta")
            self.register_buffer("draft_ids", None if ids is None else torch.tensor(ids), persistent=False)

    @property
    def layer(self) -> Eagle3Layer:
        """The one of `layers`."""
        return cast("Eagle3Layer", self.layers[0])

    def extend(self, tokens: Tensor, rows: ContextRows, before: Tensor, pool: KVPool, tables: Tables) -> None:
        features, positions, (page, *_) = rows
        body = self.config.body
        kept = 2, body.num_layers - 1, body.num_kv_heads, body.head_dim
        h = F.pad(self.fc(features), (0, torch.Size(kept).numel() - body.hidden_size)).view(-1, *kept).transpose(0, 2)
        pool.from_layer(1).write_rows(h[:, 0], h[:, 1], (page,), positions)
        x = self.layer.joined(tables.embed(tokens), self._hidden_at(pool, before, positions - 1))
        k, v = self.layer.self_attn.keys_values(x, self.rotary(positions - 1, x.dtype))
        pool.from_layer(0, 1).write_rows(k[None], v[None], (page,), positions)

    def draft_hidden(
        self, blocks: Tensor, rows: Rows, pool: KVPool, context: CommittedRows | None, tables: Tables
    ) -> Tensor:
        """See `DraftModel`. All queries attend in each pass, and one of each block has an output that is new: the
        context is read once for them, and no shape depends on the slot. The last token of a block has no row.
        """
        (batch, count, size), length = blocks.shape, rows.where.context_len
        first = torch.ones_like(rows.positions).minimum(length[:, None])
        mask = AttnMask(causal_mask(rows), first, self.config.layer.max_positions, pool.counters)
        cos, sin = (part.view(batch, count, size, 1, -1) for part in self.rotary(rows.positions - 1, pool.dtype))
        last = (length - 1).clamp(min=0)
        h = self._hidden_at(pool, rows.where.pages.gather(1, last[:, None] // pool.page_size)[:, 0], last)
        h = h.masked_fill((length == 0)[:, None], 0)[:, None].expand(-1, count, -1)
        heads = self.config.layer.num_heads, *[self.config.layer.num_kv_heads] * 2
        q, k, v = (h.new_zeros(batch, count * size, each, self.config.layer.head_dim) for each in heads)
        tokens, found = blocks[:, :, 0], list[Tensor]()
        for slot in range(size - 1):
            now, angles = slice(slot, None, size), (cos[:, :, slot], sin[:, :, slot])
            x = self.layer.joined(tables.embed(tokens), h)
            q[:, now] = self.layer.self_attn.queries(x, angles)
            k[:, now], v[:, now] = self.layer.self_attn.keys_values(x, angles)
            out = cascade_attention(q, k, v, pool.context(0, rows), mask)[:, now]
            h = self.layer.behind_attention(h, self.layer.self_attn.output(out))
            found.append(self.norm(h))
            if slot + 2 < size:
                chosen = tables.choose(self.logits(found[-1][:, :, None], tokens, tables), slot)
                tokens = torch.where(blocks[:, :, slot + 1] < 0, chosen, blocks[:, :, slot + 1])
        return torch.stack(found, 2)

    def logits(self, hidden: Tensor, anchors: Tensor, tables: Tables) -> Tensor:
        return cast("Tensor", self.draft_head(hidden.contiguous()))

    def _hidden_at(self, pool: KVPool, pages: Tensor, positions: Tensor) -> Tensor:
        """h [N, E] of the tokens at these positions, in `pages` [N]."""
        slot = positions.clamp(min=0) % pool.page_size
        both = torch.stack([layers[1:].transpose(0, 1)[pages, :, slot] for layers in (pool.k, pool.v)], 1)
        return both.flatten(1)[:, : self.config.layer.hidden_size]

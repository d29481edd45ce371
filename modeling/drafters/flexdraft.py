"""FlexDraft (arXiv 2605.20022): the target drafts for itself, behind mask rows in its last layers.

    layers 0 .. split-1     the target's own rows only
    layers split .. L-1     mask rows as well: q, k, v and o projections and q/k norms of their own (trained copies),
                            the target's layer norms and MLP; they attend to the target's K/V
    after the last norm     head(h) + calibration([embedding of the anchor; h])

A block of γ mask rows starts as one learned embedding at the split layer and attends to [committed context ; own
block], not causal inside the block. Its K/V are dropped after the pass, and the target's rows never see them: the
target's outputs do not change by a bit. Mask rows do not know the anchor: a small network corrects their logits by it.

Sequential mode (`draft_hidden`): one block of mask rows behind the committed context, in a pass of its own. An anchored
head, which is not in the paper, starts slot 0 as a projection of the anchor's embedding: the anchor is known by then.
Parallel mode is in `d2sd.runtime.speculation.flex_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.drafters.interface import DraftModel, Tables
from d2sd.modeling.feed_forward import FeedForward
from d2sd.modeling.joining import Joining
from d2sd.modeling.kv_pool import CommittedRows, KVPool, Rows
from d2sd.modeling.layers import Attend, Attention, Layer, RMSNorm, Rotary

# Shape letters: B requests, T mask rows, N nodes, G block size γ, S tokens of a sequence, E hidden, L layers that
# draft, Hkv heads, D head size, V vocabulary or draft vocabulary.


class DraftLayer(Layer):
    """A target layer whose attention is a copy; the rest is the target's, and no part of this module's parameters."""

    def __init__(self, config: BodyConfig) -> None:
        nn.Module.__init__(self)
        self.self_attn = Attention(config)
        self.shared: tuple[Layer, ...] = ()  # one; a tuple, so that it is not registered

    @property
    def mlp(self) -> FeedForward:  # type: ignore[override]
        return self.shared[0].mlp

    @property
    def input_layernorm(self) -> RMSNorm:  # type: ignore[override]
        return self.shared[0].input_layernorm

    @property
    def post_attention_layernorm(self) -> RMSNorm:  # type: ignore[override]
        return self.shared[0].post_attention_layernorm


class AnchorCalibration(nn.Module):
    """The network that corrects logits by the anchor."""

    def __init__(self, hidden: int, size: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * hidden, size)
        self.outer = nn.Linear(size, outputs)


class FlexHead(DraftModel):
    """The tensors that FlexDraft adds to a target: `state_dict` holds no others. `join` comes before any pass."""

    config: FlexConfig
    mask_token_id = 0  # never embedded: masks have an embedding of their own
    has_context = False

    def __init__(self, config: FlexConfig) -> None:
        super().__init__()
        self.config = config
        body = config.body
        self.mask_embedding = nn.Parameter(torch.empty(body.hidden_size))
        self.layers = nn.ModuleList(DraftLayer(body) for _ in range(body.num_layers))
        ids = config.draft_vocabulary
        outputs = config.vocab_size if ids is None else len(ids)
        self.calibration = AnchorCalibration(body.hidden_size, config.calibration_size, outputs)
        self.anchor_projection = nn.Linear(body.hidden_size, body.hidden_size, bias=False) if config.anchored else None
        self.rotary = Rotary(body.rope, body.head_dim)
        with torch.device("cpu"):  # the ids are known even under torch.device("meta")
            self.register_buffer("draft_ids", None if ids is None else torch.tensor(ids), persistent=False)

    def join(self, target: Decoder) -> None:
        """Take the layer norms, MLPs and last norm of a whole target: the same modules, not copies."""
        deep = cast("list[DraftLayer]", list(self.layers))
        sources = cast("list[Layer]", list(target.layers)[self.config.split_layer :])
        for layer, source in zip(deep, sources, strict=True):
            layer.shared = (source,)
        object.__setattr__(self, "norm", target.norm)  # not registered: it is the target's

    def joins(self, target: TargetModel) -> bool:
        """Whether its blocks can join the target's passes: the layers of both are compiled, or of neither. On a CPU an
        FP8 head is not compiled where its target has other weights.
        """
        return (self.compiled is None) == (target.compiled is None)

    @property
    def joining(self) -> Joining:
        """The blocks of parallel mode, which join the target's own pass. They do not know an anchor."""
        return Joining(self, self.mask_embedding, self.config.block_size, self.config.body.num_layers)

    def blocks(self, anchor: Tensor) -> Tensor:
        """The input of the split layer: blocks [..., G, E] behind anchors whose embeddings are `anchor [..., E]`."""
        x = self.mask_embedding.expand(*anchor.shape[:-1], self.config.block_size, -1)
        if self.anchor_projection is None:
            return x
        return torch.cat([self.anchor_projection(anchor)[..., None, :], x[..., 1:, :]], -2)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [B, T, E] of rows x [B, T, E] at `positions [B, T]`, normed: ready for the head."""
        cos_sin = self.rotary(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, cos_sin, index, attend)
        out: Tensor = self.norm(x)
        return out

    def draft(self, x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        """`forward` over the committed context in `pool`: the target's from the split layer, `KVPool.from_layer`."""
        if self.compiled is not None:
            hidden: Tensor = self.compiled(x, self.rotary, rows, pool)[0]
        else:
            hidden = self(x, rows.positions, pool.attend(rows, exact=not x.is_cuda))
        return hidden

    def draft_hidden(
        self, blocks: Tensor, rows: Rows, pool: KVPool, context: CommittedRows | None, tables: Tables
    ) -> Tensor:
        assert context is None, "it reads the target's pages"
        x = self.blocks(tables.embed(blocks[:, :, 0])).flatten(1, 2)
        return self.draft(x, rows, pool.from_layer(self.config.split_layer)).view(*blocks.shape, -1)[:, :, 1:]

    def logits(self, hidden: Tensor, anchors: Tensor, tables: Tables) -> Tensor:
        """Corrected logits in fp32."""
        hidden = hidden.contiguous()
        return tables.head(hidden).float() + self.calibrate(hidden, tables.embed(anchors)[:, :, None])

    @torch.no_grad()
    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [B, S, E], outputs of the layer before the split at `positions [B, S]` from 0 on -> k, v
        [L, B, S, Hkv, D] fp32 of the target's last layers, which are computed again: for training, where the target's
        pages are not kept.
        """
        parameter = next(cast("DraftLayer", self.layers[0]).shared[0].parameters())

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        with torch.autocast(features.device.type, enabled=False):
            x = features.to(parameter.dtype)
            cos_sin, pairs = self.rotary(positions, x.dtype), []
            for index, layer in enumerate(cast("Iterable[DraftLayer]", self.layers)):
                x, (k, v) = layer.shared[0](x, cos_sin, index, attend)
                pairs.append((k.float(), v.float()))
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def calibrate(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """The correction of logits of `hidden [..., E]`: [..., V] fp32; `anchor [..., E]` embeds the anchor."""
        added: Tensor = self.calibration.outer(self.calibration_inner(hidden, anchor))
        return added.float()

    def calibration_inner(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """The calibration up to the last linear layer: [..., calibration size]."""
        both = torch.cat([anchor.expand_as(hidden).to(hidden.dtype), hidden], -1)
        return F.silu(self.calibration.inner(both))

"""FlexDraft (arXiv 2605.20022): the target drafts for itself, behind mask rows in its last layers.

    layers 0 .. split-1     the target's own rows only
    layers split .. L-1     mask rows as well: q, k, v and o projections and q/k norms of their own (trained copies),
                            the target's layer norms and MLP; they attend to the target's K/V
    after the last norm     head(h) + calibration([embedding of the anchor; h])

A block of γ mask rows starts as one learned embedding at the split layer and attends to [committed context ; own
block], not causal inside the block. Its K/V are dropped after the pass, and the target's rows never see them: the
target's outputs do not change by a bit. Mask rows do not know the anchor: a small network corrects their logits by it.

Sequential mode (`draft`): one block of mask rows behind the committed context, in a pass of its own. An anchored head,
which is not in the paper, starts slot 0 as a projection of the anchor's embedding: the anchor is known by then.
Parallel mode (`verify_and_draft`): the target verifies a tree, and in the same pass a block of mask rows behind each
node drafts for the case that the accepted path ends there. It sees what its node sees and the node itself, so the block
that is used equals the one that sequential mode drafts in the next step. Anchored heads have no such mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig, FlexConfig
from d2sd.modeling.decoder import Decoder, DecoderOutput, TargetModel
from d2sd.modeling.inference import InferenceLayers, JointLayers
from d2sd.modeling.kv_pool import KVPool
from d2sd.modeling.layers import MLP, Attend, Attention, Layer, RMSNorm
from d2sd.modeling.rope import Rotary
from d2sd.modeling.rows import Rows

# Shape letters: B requests, T mask rows, N nodes, G block size γ, S tokens of a sequence, E hidden, L layers that
# draft, Hkv heads, D head size, V vocabulary or draft vocabulary.


class DraftLayer(Layer):
    """A target layer whose attention is a copy; the rest is the target's, and no part of this module's parameters."""

    def __init__(self, config: BodyConfig) -> None:
        nn.Module.__init__(self)
        self.self_attn = Attention(config)
        self.shared: tuple[Layer, ...] = ()  # one; a tuple, so that it is not registered

    @property
    def mlp(self) -> MLP:  # type: ignore[override]
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


class FlexHead(nn.Module):
    """What FlexDraft adds to a target. `state_dict` holds the added tensors only; `join` comes before any pass."""

    native: InferenceLayers | None
    draft_ids: Tensor | None  # as in `DraftModel`
    norm: RMSNorm

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
        self.register_module("native", None)  # in place of `layers`, see d2sd.modeling.packed
        with torch.device("cpu"):  # the ids are known even under torch.device("meta")
            self.register_buffer("draft_ids", None if ids is None else torch.tensor(ids), persistent=False)

    def join(self, target: Decoder) -> None:
        """Take the target's layer norms, MLPs and last norm: the same modules, not copies. The target is not packed."""
        deep = cast("list[DraftLayer]", list(self.layers))
        sources = cast("list[Layer]", list(target.layers)[self.config.split_layer :])
        for layer, source in zip(deep, sources, strict=True):
            layer.shared = (source,)
        object.__setattr__(self, "norm", target.norm)  # not registered: it is the target's

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
            x, _, _ = layer(x, cos_sin, index, attend)
        out: Tensor = self.norm(x)
        return out

    def draft(self, x: Tensor, rows: Rows, pool: KVPool) -> Tensor:
        """`forward` over the committed context in `pool`: the target's from the split layer, `KVPool.from_layer`."""
        if self.native is not None:
            out: tuple[Tensor, ...] = self.native(x, self.rotary, rows, pool)
            return out[0]
        hidden: Tensor = self(x, rows.positions, pool.attend(rows))
        return hidden

    def verify_and_draft(
        self, target: TargetModel, tokens: Tensor, rows: Rows, pool: KVPool, aux_layer_ids: tuple[int, ...] = ()
    ) -> tuple[DecoderOutput, Tensor]:
        """The target's pass over tokens [B, N], and hidden states [B, N, G, E] of the mask rows behind each node.

        `pool` has the target's pages. Not for anchored heads: mask rows behind a node do not know what follows it.
        """
        assert not self.config.anchored
        count, size = tokens.shape[1], self.config.block_size
        behind = rows_behind(rows, size)
        layers = getattr(target, "native", None)
        if isinstance(layers, JointLayers) and self.native is not None:
            both, *rest = layers.with_masks(
                target.embed_tokens(tokens), self.mask_embedding, self.native, self.rotary, rows, behind, pool,
                aux_layer_ids,
            )  # fmt: skip
            out, masks = DecoderOutput(both[:, :count], *rest), both[:, count:]
        else:  # in a second pass, over the same keys and values
            out = target(tokens, rows, pool, aux_layer_ids)
            masks = self._behind(out, behind, pool)
        return out, masks.reshape(len(masks), count, size, -1)

    def _behind(self, out: DecoderOutput, behind: Rows, pool: KVPool) -> Tensor:
        """Hidden states [B, N·G, E] of the mask rows of `behind`, whose first rows are those of `out`."""
        split, count = self.config.split_layer, out.hidden.shape[1]
        attend_all = pool.from_layer(split).attend(behind)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = torch.cat([q.new_zeros(len(q), count, *q.shape[2:]), q], 1)
            k, v = (torch.cat([own[split + index], new], 1) for own, new in ((out.k, k), (out.v, v)))
            return attend_all(index, q, k, v)[:, count:]

        positions = behind.positions[:, count:]
        hidden: Tensor = self(self.mask_embedding.expand(*positions.shape, -1), positions, attend)
        return hidden

    @torch.no_grad()
    def context_keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [B, S, E], outputs of the layer before the split at `positions [B, S]` from 0 on -> k, v
        [L, B, S, Hkv, D] fp32 of the target's last layers, which are computed again: for training, where the target's
        pages are not kept.
        """
        own = next(cast("DraftLayer", self.layers[0]).shared[0].parameters())

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        with torch.autocast(features.device.type, enabled=False):
            x = features.to(own.dtype)
            cos_sin, pairs = self.rotary(positions, x.dtype), []
            for index, layer in enumerate(cast("Iterable[DraftLayer]", self.layers)):
                x, k, v = layer.shared[0](x, cos_sin, index, attend)
                pairs.append((k.float(), v.float()))
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def calibrate(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """What is added to logits of `hidden [..., E]`: [..., V] fp32; `anchor [..., E]` embeds the anchor."""
        added: Tensor = self.calibration.outer(self.calibration_inner(hidden, anchor))
        return added.float()

    def calibration_inner(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """The same up to the last linear layer: [..., calibration size]."""
        both = torch.cat([anchor.expand_as(hidden).to(hidden.dtype), hidden], -1)
        return F.silu(self.calibration.inner(both))


def rows_behind(rows: Rows, size: int) -> Rows:
    """The rows of `rows`, then behind each of them, in their order, a block of `size` mask rows.

    A block sees what its row sees, and itself; nothing else sees it.
    """
    count, device = rows.positions.shape[1], rows.positions.device
    slots = torch.arange(size, device=device)
    positions = (rows.positions[:, :, None] + 1 + slots).flatten(1)
    of_block = torch.arange(count, device=device).repeat_interleave(size)
    masks = torch.cat([rows.attn_mask[:, of_block], (of_block[:, None] == of_block).expand(len(positions), -1, -1)], 2)
    own = F.pad(rows.attn_mask, (0, count * size))
    attn_mask = torch.cat([own, masks], 1)
    return Rows(torch.cat([rows.positions, positions], 1), attn_mask, rows.page_table, rows.context_len)

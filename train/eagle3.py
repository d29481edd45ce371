"""An EAGLE-3 head in training: its initial weights, and its rows over packed blocks, each behind its own output.

Training-time test (arXiv 2503.01840): a block's first row reads the target's features, and each later one the output of
the row before, as when drafting; its tokens are the text's. It starts as an early exit: the fusion passes the last
features on, the layer is the target's last one on them, and the head is the target's.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.eagle3_config import Eagle3Config
from d2sd.modeling.layers import KeysValues, Layer
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed
from d2sd.train.dflash import dense, drafter_config
from d2sd.train.kinds import TrainedKind
from d2sd.train.objectives.head import Added
from d2sd.train_recipe import Geometry

# Shape letters: B sequences, A blocks of each, G block size γ, S tokens, Hq/Hkv heads, D head size, E hidden.


def eagle_config(geometry: Geometry, target: DecoderConfig) -> Eagle3Config:
    """Config of a head over the full vocabulary. Raises D2SDError as `drafter_config`, and for more than a layer."""
    if geometry.layers > 1:
        what, key = "An EAGLE-3 head has one layer.", "drafter.layers"
        raise D2SDError(what, where=key, found=geometry.layers, expected=1)
    ids = drafter_config(geometry, target).target_layer_ids
    return Eagle3Config(target.body.dense(1), target.vocab_size, geometry.block_size, ids)


@torch.no_grad()
def eagle_head(geometry: Geometry, target: Decoder, _data: TrainingData, seed: int) -> Eagle3:
    """The initial head in fp32 on the CPU."""
    head, generator = Eagle3(eagle_config(geometry, target.config)), torch.Generator().manual_seed(seed)
    source = cast("Layer", target.layers[target.config.body.attention_layers[-1]])
    weights, hidden = dense(source, head.config.layer, generator), head.config.layer.hidden_size
    for part in ("q_proj", "k_proj", "v_proj"):  # which read nothing of the embedding yet
        name = f"self_attn.{part}.weight"
        weights[name] = torch.cat([torch.zeros_like(weights[name]), weights[name]], 1)
    weights["hidden_norm.weight"] = source.input_layernorm.scale
    head.layer.load_state_dict({name: weights[name].float() for name in head.layer.state_dict()})
    head.norm.weight.copy_(target.norm.scale)
    head.fc.weight.normal_(std=0.02 * hidden**-0.5, generator=generator)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    head.draft_head.weight.copy_(target.head)
    head.target_head = target.head.detach()
    return head


def eagle_hidden(head: Eagle3, embedding: Tensor, packed: Packed, _visible: Tensor) -> Tensor:
    """[B, A, G, E]: the hidden states that predict each slot; the anchor's slot has zeros."""
    layer, attention, places = head.layer, head.layer.self_attn, torch.arange(packed.text.shape[1])
    places, before = places.to(packed.text.device), packed.positions - 1  # of features
    fused = head.fc(packed.features.float())
    behind = F.embedding(packed.text.roll(-1, 1), embedding).float()  # the token behind each, as the authors pair them
    x = layer.joined(behind, fused)
    context = KeysValues(*attention.keys_values(x, head.rotary(places.expand(len(x), -1), x.dtype)))
    unseen = (places >= before[:, :, :1])[:, :, None, None]  # [B, A, 1, 1, S]
    h = fused.gather(1, before[:, :, 0, None].clamp(min=0).expand(-1, -1, fused.shape[-1]))
    found, own = [torch.zeros_like(h)], list[KeysValues]()
    for slot in range(packed.tokens.shape[-1] - 1):
        x = layer.joined(F.embedding(packed.tokens[:, :, slot], embedding).float(), h)
        angles = head.rotary(before[:, :, slot], x.dtype)
        own.append(KeysValues(*attention.keys_values(x, angles)))
        out = _attended(attention.queries(x, angles), context, KeysValues.stack(own), unseen)
        h = layer.behind_attention(h, attention.output(out))
        found.append(head.norm(h))
    return torch.stack(found, 2)


def _attended(q: Tensor, context: KeysValues, own: KeysValues, unseen: Tensor) -> Tensor:
    """q [B, A, Hq, D] over keys and values of sequences [B, S, Hkv, D] and of rows [j, B, A, Hkv, D]."""
    heads = q.view(*q.shape[:2], own.k.shape[3], -1, q.shape[-1])  # [B, A, Hkv, g, D]
    outer = torch.einsum("bahgd,bshd->bahgs", heads, context.k.to(q.dtype)).masked_fill(unseen, float("-inf"))
    inner = torch.einsum("bahgd,jbahd->bahgj", heads, own.k.to(q.dtype))
    weights = (torch.cat([outer, inner], -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(own.v.dtype)
    outer, inner = weights.split([outer.shape[-1], inner.shape[-1]], -1)
    out = torch.einsum("bahgs,bshd->bahgd", outer, context.v) + torch.einsum("bahgj,jbahd->bahgd", inner, own.v)
    return out.flatten(2, 3)


def eagle_added(head: Eagle3, hidden: Tensor, _embedding: Tensor, _packed: Packed) -> Added:
    """The change that its head makes to logits of the target's."""
    change = head.draft_head.weight - cast("Tensor", head.target_head)
    return Added(hidden, change, change.new_zeros(len(change)))


TRAINED: TrainedKind[Geometry, Eagle3] = TrainedKind(
    eagle_config, eagle_head, eagle_hidden, eagle_added, ("draft_head.weight",)
)

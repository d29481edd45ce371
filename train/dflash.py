"""A DFlash drafter in training: its initial weights, and its hidden states over packed blocks.

It starts from the target's last layers, and a fusion that starts as one well-scaled auxiliary layer. Its context K/V
come from hidden_norm(fc(features)). With fc picking the deepest auxiliary layer and hidden_norm holding a target
layer's input_layernorm, the drafter's layer approximates that target layer's K/V before any training. The other
auxiliary layers' columns start small, scaled by each layer's typical norm: norms differ by a factor of ten and more.
The first token's massive activations (rms above 100 in SmolLM2) would dominate a plain mean, so the median over tokens
is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.feed_forward import MLP
from d2sd.modeling.layers import GatedAttention, Layer, RMSNorm
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed, attend_packed
from d2sd.train.dense_attention import attend_dense, takes, token_context
from d2sd.train.kinds import TrainedKind
from d2sd.train_recipe import Geometry, SecondSettings

# Shape letters: B sequences, A blocks of each, G block size γ, E hidden, n auxiliary layers, N tokens.

#: Sequences used to measure the typical norm of each auxiliary layer's features.
_SAMPLE = 64


def drafter_config(geometry: Geometry, target: DecoderConfig) -> DrafterConfig:
    """Config of a first drafter with the target's hidden size, q/k norms and no biases, as in the DFlash layout.

    Raises D2SDError if the target has too few layers or too small a vocabulary for the geometry.
    """
    layers = target.body.num_layers
    # a new one starts from the last layers that attend
    attending = len(target.body.attention_layers)
    for key, found, limit in (
        ("layers", geometry.layers, attending),
        ("target_layer_ids", geometry.target_layer_ids[-1], layers - 1),
        ("mask_token_id", geometry.mask_token_id, target.vocab_size - 1),
    ):
        if found > limit:
            raise D2SDError(
                "the drafter does not fit the target", where=f"drafter.{key}", found=found, expected=f"at most {limit}"
            )
    return DrafterConfig(
        body=replace(target.body.dense(geometry.layers), qk_norm=True),
        vocab_size=target.vocab_size,
        block_size=geometry.block_size,
        mask_token_id=geometry.mask_token_id,
        target_layer_ids=tuple(geometry.target_layer_ids),
        num_target_layers=target.body.num_layers,
        role="first",
    )


def first_drafter(geometry: Geometry, target: Decoder, data: TrainingData, seed: int) -> Drafter:
    """The initial first drafter for training on `data`. Raises D2SDError as `drafter_config` does."""
    # a sequence's first token is an outlier
    sample = torch.cat([data[i].features[1:] for i in range(min(_SAMPLE, len(data)))])
    config = drafter_config(geometry, target.config)
    return drafter_from_target(config, target, sample, torch.Generator().manual_seed(seed))


def second_drafter(first: Drafter, settings: SecondSettings) -> Drafter:
    """The initial second drafter: a copy of the first, or of its first layers, for blocks with prefixes. It is plain
    DFlash: what the first has besides is left out.
    """
    layers = settings.layers or first.config.body.num_layers
    config = replace(
        first.config,
        body=replace(first.config.body, num_layers=layers, windows=(), causal=(), sinks=False),
        role="variable_prefix",
        prefix_weight_base=settings.prefix_base,
        draft_vocabulary=None,
        sample_from_anchor=False,
        mask_embedding=False,
        head=None,
    )
    drafter, weights = Drafter(config), first.state_dict()
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    return drafter


@torch.no_grad()
def drafter_from_target(config: DrafterConfig, target: Decoder, sample: Tensor, generator: torch.Generator) -> Drafter:
    """A new fp32 drafter on the CPU; `sample [N, n·E]`, features of ordinary tokens, sets the scale of each layer."""
    drafter = Drafter(config)
    sample = sample.to(target.embed_tokens.weight.device)
    body = config.body
    attending = [target.layers[layer] for layer in target.config.body.attention_layers]
    sources = cast("list[Layer]", attending[len(attending) - body.num_layers :])
    for layer, source in zip(cast("Iterable[Layer]", drafter.layers), sources, strict=True):
        weights = {k: v for k, v in dense(source, body, generator).items() if k in layer.state_dict()}
        left = layer.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False).missing_keys
        assert all("_norm." in name for name in left), f"the target's layer lacks {left}"
        if not target.config.body.qk_norm:
            normed = source.input_layernorm(sample[:, -body.hidden_size :].to(source.input_layernorm.weight.dtype))
            for part in ("q", "k"):
                heads = getattr(source.self_attn, f"{part}_proj")(normed).float().view(-1, body.head_dim)
                # q_norm/k_norm start at the RMS of the target's un-normed heads, so attention starts equally sharp.
                getattr(layer.self_attn, f"{part}_norm").weight.fill_(float(heads.square().mean().sqrt()))
    drafter.norm.weight.copy_(target.norm.scale)
    drafter.hidden_norm.weight.copy_(sources[0].input_layernorm.scale)

    aux_layer_ids = len(config.target_layer_ids)
    rms = sample.float().view(len(sample), aux_layer_ids, -1).square().mean(-1).sqrt().median(0).values.cpu()  # [n]
    hidden = body.hidden_size
    fusion = torch.randn(hidden, aux_layer_ids, hidden, generator=generator) * (0.2 * hidden**-0.5) / rms[None, :, None]
    fusion[:, -1] += torch.eye(hidden) / rms[-1]
    drafter.fc.weight.copy_(fusion.reshape(hidden, -1))
    return drafter


def dense(source: Layer, config: BodyConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights for a layer of Llama's form: those of `source`, and an MLP that adds nothing yet in place of experts."""
    weights = source.state_dict()
    norms = {name: part for name, part in source.named_modules() if isinstance(part, RMSNorm)}
    weights |= {f"{name}.weight": part.scale for name, part in norms.items()}
    weights["post_attention_layernorm.weight"] = source.feed_forward_norm.scale
    if isinstance(source.self_attn, GatedAttention):  # the queries, without the gates behind each
        for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias"):
            if name in weights:
                weights[name] = weights[name].unflatten(0, (-1, 2, config.head_dim))[:, 0].flatten(0, 1)
    if not isinstance(source.mlp, MLP):
        hidden, inner = config.hidden_size, config.intermediate_size
        for name in ("gate", "up"):
            weights[f"mlp.{name}_proj.weight"] = torch.randn(inner, hidden, generator=generator) * hidden**-0.5
        weights["mlp.down_proj.weight"] = torch.zeros(hidden, inner)
    return weights


def block_hidden(drafter: Drafter, embedding: Tensor, packed: Packed, visible: Tensor) -> Tensor:
    """[B, A, G, E]: the hidden states that predict each slot; blocks have `visible [B, A]` real tokens, then masks. The
    anchor's slot has none that is of use.
    """
    slots = torch.arange(packed.tokens.shape[-1], device=visible.device)
    tokens = torch.where(slots < visible[..., None], packed.tokens, drafter.config.mask_token_id)
    # The target's tensors may be bf16; the drafter is fp32, and only autocast changes the dtype of its products.
    embedded = drafter.embedded(tokens, lambda ids: F.embedding(ids, embedding).float())
    if takes(drafter):
        attend = attend_dense(drafter, packed, *token_context(drafter, packed))
    else:
        attend = attend_packed(drafter, packed.features.float(), packed.positions)
    hidden: Tensor = drafter(embedded.flatten(1, 2), packed.positions.flatten(1), attend, tokens.shape[-1])
    hidden = hidden.view(*tokens.shape, -1)
    return hidden.roll(1, dims=2) if drafter.config.sample_from_anchor else hidden


TRAINED: TrainedKind[Geometry, Drafter] = TrainedKind(drafter_config, first_drafter, block_hidden)

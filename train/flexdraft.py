"""A FlexDraft head in training: its initial weights, its hidden states over packed blocks, its calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.layers import Layer
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import Packed, attend_packed
from d2sd.train.dense_attention import attend_dense, takes
from d2sd.train.kinds import TrainedKind
from d2sd.train.objectives.head import Added
from d2sd.train_recipe import FlexGeometry

# Shape letters: B sequences, A blocks of each, G block size γ, E hidden, R calibration size, V vocabulary.

#: Sequences that decide an anchored head's projection.
_SAMPLE = 64


def flex_config(geometry: FlexGeometry, config: DecoderConfig) -> FlexConfig:
    """Config of a head over the full vocabulary. Raises D2SDError if the target has too few layers, or special ones."""
    if config.body.beyond_llama:
        raise D2SDError(
            f"FlexDraft heads draft in no target with {config.body.beyond_llama[0]}.",
            where="flex",
            found=config.family,
            expected="a dense target",
            fix="train a DFlash drafter",
        )
    limit = config.body.num_layers - 1
    if geometry.layers > limit:
        raise D2SDError(
            "The head has more layers than the target can split off.",
            where="flex.head.layers",
            found=geometry.layers,
            expected=f"at most {limit}",
        )
    return FlexConfig(
        family=config.family,
        body=replace(config.body, num_layers=geometry.layers),
        vocab_size=config.vocab_size,
        block_size=geometry.block_size,
        num_target_layers=config.body.num_layers,
        calibration_size=geometry.calibration_size,
        anchored=geometry.anchored,
    )


@torch.no_grad()
def flex_head(geometry: FlexGeometry, target: Decoder, data: TrainingData, seed: int) -> FlexHead:
    """The initial FlexDraft head in fp32 on the CPU, not joined: copies of the target's attention, a small random mask
    embedding (as published), and a calibration that adds nothing. An anchored head's projection is the linear map that
    best gives the hidden states before the split from the embeddings of their tokens, over a part of `data`.
    Raises D2SDError as `flex_config` does.
    """
    generator = torch.Generator().manual_seed(seed)
    head = FlexHead(flex_config(geometry, target.config))
    head.mask_embedding.normal_(std=0.02, generator=generator)
    first, last = head.calibration.inner, head.calibration.outer
    first.weight.normal_(std=first.in_features**-0.5, generator=generator)
    for zero in (first.bias, last.weight, last.bias):
        zero.zero_()
    for layer, source in zip(head.layers, list(target.layers)[head.config.split_layer :], strict=True):
        weights = cast("Layer", source).self_attn.state_dict()
        cast("Layer", layer).self_attn.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    if head.anchor_projection is not None:
        head.anchor_projection.weight.copy_(_projection(target, data))
    return head


def _projection(target: Decoder, data: TrainingData) -> Tensor:
    """[E, E]: least squares with a ridge, which decides where the sample has fewer tokens than dimensions."""
    device = target.embed_tokens.weight.device
    sample = [data[i] for i in range(min(_SAMPLE, len(data)))]
    embedded = torch.cat([target.embed_tokens(sequence.tokens[1:].to(device)) for sequence in sample]).double()
    features = torch.cat([sequence.features[1:] for sequence in sample]).to(device).double()
    gram = embedded.T @ embedded
    gram += 0.01 * gram.diagonal().mean() * torch.eye(len(gram), device=device)
    weight: Tensor = torch.linalg.solve(gram, embedded.T @ features).T
    return weight


def flex_hidden(head: FlexHead, embedding: Tensor, packed: Packed, _visible: Tensor) -> Tensor:
    """[B, A, G, E]: hidden states of the mask rows; the anchor is the one real token of a block."""
    if packed.features.is_cuda and takes(head):
        batch, length = packed.features.shape[:2]
        places = torch.arange(length, device=packed.features.device).expand(batch, -1)
        attend = attend_dense(head, packed, *head.context_keys_values(packed.features, places))
    else:
        attend = attend_packed(head, packed.features, packed.positions)
    x = head.blocks(_anchors(embedding, packed)).flatten(1, 2)
    hidden: Tensor = head(x, packed.positions.flatten(1), attend)
    return hidden.view(*packed.tokens.shape, -1)


def flex_added(head: FlexHead, hidden: Tensor, embedding: Tensor, packed: Packed) -> Added:
    """The calibration, of all rows [B, A, G] and over the vocabulary."""
    inner = head.calibration_inner(hidden, _anchors(embedding, packed)[:, :, None])
    return Added(inner, head.calibration.outer.weight, head.calibration.outer.bias)


def _anchors(embedding: Tensor, packed: Packed) -> Tensor:
    return F.embedding(packed.tokens[:, :, 0], embedding).float()


TRAINED: TrainedKind[FlexGeometry, FlexHead] = TrainedKind(
    flex_config, flex_head, flex_hidden, flex_added, ("calibration.outer.weight", "calibration.outer.bias")
)

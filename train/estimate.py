"""Teacher-forced estimate of tau: what greedy chain drafting would have accepted along answers already written.

Quick enough for use during training; the figure that counts is measured by the runtime.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafter import Drafter
from d2sd.train.blocks import attend_in_sequence, blocks_at
from d2sd.train.features import FeatureCache
from d2sd.train.objectives import first_errors


@torch.no_grad()
def estimate_tau(target: Decoder, drafter: Drafter, sequences: FeatureCache) -> float:
    """Mean over sequences of tokens a step (bonus included), walking each greedy answer from its first anchor."""
    means = []
    for index in range(len(sequences)):
        sequence = sequences[index]
        anchors = torch.arange(sequence.prompt_length - 1, len(sequence.tokens) - 1)
        blocks = blocks_at(sequence, anchors, drafter.config.block_size)
        slots = torch.arange(drafter.config.block_size)
        tokens = torch.where(slots < 1, blocks.tokens, drafter.config.mask_token_id)
        with torch.autocast("cpu", torch.bfloat16):
            attend = attend_in_sequence(drafter, sequence.features, blocks.positions)
            hidden = drafter(target.embed_tokens(tokens), blocks.positions, attend)
            drafted = F.linear(hidden, target.head).argmax(-1)
        gains = first_errors(drafted, blocks.tokens).tolist()  # past the end a gain may be anything: the walk is over
        steps, place = 0, 0
        while place < len(gains):
            place += gains[place]
            steps += 1
        means.append(len(gains) / steps)
    return sum(means) / len(means)

"""When two ways of computing the same logits may fairly disagree: the two best candidates are equal up to rounding."""

from __future__ import annotations

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.rows import KVPool, Rows
from d2sd.runtime.request import SamplingParams
from d2sd.runtime.sampling import Sampling, scored

#: The largest gap at which a difference counts as rounding: of fp32 logits of order 10, a hundred units in the last
#: place.
TIE = 1e-4


@torch.inference_mode()
def score_gap(target: Decoder, tokens: list[int], sampling: SamplingParams | None = None) -> float:
    """Distance of the two best scores behind `tokens`: of logits if greedy, else of what Gumbel-max compares."""
    body, weight = target.config.body, target.embed_tokens.weight
    device = str(weight.device)
    no_pages = KVPool(body.num_layers, 1, 1, body.num_kv_heads, body.head_dim, weight.dtype, device)
    nothing = torch.zeros(1, dtype=torch.long, device=device)
    rows = Rows.chain(len(tokens), nothing.view(1, 1)[:, :0], nothing)
    logits = target.logits(target(torch.tensor([tokens], device=device), rows, no_pages).hidden[:, -1:])
    params = Sampling.of([sampling or SamplingParams()], target.config.vocab_size, device)
    if params.any_random:
        logits = scored(logits, nothing[:, None], nothing + len(tokens) - 1, 1, params)
    best, second = logits[0, 0].topk(2).values.tolist()
    return float(best - second)


def first_difference(answer: list[int], expected: list[int]) -> int | None:
    """Index of the first token that differs (or is missing in one of the two); None where the answers are equal."""
    for index, (a, b) in enumerate(zip(answer, expected, strict=False)):
        if a != b:
            return index
    return None if len(answer) == len(expected) else min(len(answer), len(expected))

"""Near ties: two computations of the same logits may disagree if the two best candidates are equal up to rounding."""

from __future__ import annotations

from itertools import zip_longest

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.runtime.sampling.penalties import Text
from d2sd.runtime.sampling.sample import Sampling, token_scores
from d2sd.runtime.sampling_params import SamplingParams

#: The largest gap at which a difference counts as rounding: of fp32 logits of order 10, a hundred units in the last
#: place.
TIE_TOLERANCE = 1e-4


@torch.inference_mode()
def top2_margin(target: Decoder, tokens: list[int], sampling: SamplingParams | None = None) -> float:
    """Distance of the two best scores after `tokens`: of the logits if greedy, else of the Gumbel scores.

    All `tokens` count as the prompt, for parameters that depend on the answer.
    """
    device = str(target.embed_tokens.weight.device)
    logits = target.logits(target.full_pass(torch.tensor([tokens], device=device)).hidden[:, -1])
    text = Text(tokens, len(tokens))
    params = Sampling.of([sampling or SamplingParams()], target.config.vocab_size, device, [text])
    noise = params.noise(torch.tensor([len(tokens) - 1], device=device), 1, logits.shape[-1])
    position = torch.tensor([len(tokens)], device=device)
    scores = token_scores(logits, position, params, None if noise is None else noise[:, 0])
    best, second = scores[0].topk(2).values.tolist()
    return float(best - second)


def first_mismatch(answer: list[int], expected: list[int]) -> int | None:
    """Index of the first token that differs (or is missing in one of the two); None where the answers are equal."""
    return next((index for index, (a, b) in enumerate(zip_longest(answer, expected)) if a != b), None)

"""Constrained decoding the slow way: the whole text computed anew for each token, by a fresh matcher."""

from __future__ import annotations

import math

import torch

from d2sd.modeling.decoder import Decoder
from d2sd.plugins.choice.reference import gumbel
from d2sd.runtime.grammar.grammar import has
from d2sd.runtime.request import Request
from tests.runtime.grammar.tokens import END
from tests.runtime.oracle import allowed
from tests.tiny import full_logits


def constrained_text(decoder: Decoder, request: Request) -> list[int]:
    """The answer of plain decoding, where only tokens that the grammar allows have a probability."""
    text, params = list(request.prompt), request.sampling
    while len(text) < len(request.prompt) + request.max_new_tokens:
        logits = full_logits(decoder, torch.tensor([text]))[0, -1]
        if request.grammar is not None:
            matcher = request.grammar.matcher()
            assert all(matcher.consume(token) for token in text[len(request.prompt) :])
            bits = matcher.allowed()
            logits = torch.tensor([p if has(bits, t) else -math.inf for t, p in enumerate(logits.tolist())])
        if params.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            noise = gumbel(torch.tensor([params.seed or 0]), torch.tensor([[len(text)]]), len(logits))[0, 0].tolist()
            kept = {t: p for t, p in allowed(logits.tolist(), params).items() if p}
            text.append(max(kept, key=lambda t: math.log(kept[t]) + noise[t]))
        if text[-1] == END:
            break
    return text[len(request.prompt) :]

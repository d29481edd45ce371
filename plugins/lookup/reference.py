"""A copy of a request's own earlier text, in plain PyTorch: the specification.

A copy is what followed the latest of the longest earlier occurrences of the text's end:

    text      … the cat sat on the mat. Then the cat │ sat on the
                └─────┘└─────────┘           └─────┘   └────────┘
                 match   copied                end      proposed

Past the end of the text a copy repeats itself, so that repetitions go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from d2sd.plugins.dispatch import op
from d2sd.plugins.lookup.types import LONGEST, Copy, CopyScores, Text, length_entry, support_entry
from d2sd.plugins.trees import Accepted, Draft

# Shape letters: B requests, M pages a request, Z tokens a page, H = 1 + M·Z places of a text, S slots, N nodes, G block
# size γ.

OP = "prompt lookup"


@op(OP, launcher="kernel", of="pages", library=True)
def find_copy(text: Text, first: Draft, scores: CopyScores, temperature: Tensor) -> Copy:
    """The continuation of the longest match of each text's end in the text itself.

    Args:
        text: what the requests have said so far.
        first: the draft [B, S, M] at the root, which says how likely a copied token is.
        scores: how likely it is, at temperature 0 and 1.
        temperature: [B] fp32.
    """
    batch, slots, _ = first.tokens.shape
    tokens = text.pages[text.page_table].view(batch, -1)
    tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
    last = text.context_len[:, None]  # the anchor's place
    tokens.scatter_(1, last, text.anchor[:, None])
    place = torch.arange(tokens.shape[1], device=tokens.device)
    alive, length = place < last, torch.zeros_like(tokens)
    for back in range(LONGEST):
        here, there = (place - back).clamp(min=0), (last - back).clamp(min=0)
        alive = alive & (place >= back) & (tokens[:, here] == tokens.gather(1, there))
        length += alive
    best = (length * len(place) + place).argmax(-1, keepdim=True)  # the latest of the longest
    matched = length.gather(1, best)
    behind = torch.arange(slots, device=tokens.device) % (last - best).clamp(min=1)
    copied = tokens.gather(1, (best + 1 + behind).clamp(max=len(place) - 1)).where(matched > 0, 0)

    slot = torch.arange(slots, device=tokens.device)
    greedy, sampled = scores.table[:, length_entry(matched), support_entry(first, copied), slot].unbind(0)
    logprob = greedy + temperature.clamp(0, 1)[:, None] * (sampled - greedy)
    logprob = logprob.masked_fill(matched == 0, float("-inf"))
    return Copy(Draft(copied[..., None], logprob[..., None]), matched[:, 0])


@op(OP, launcher="kernel", of="pages")
def append(text: Text, tokens: Tensor, accepted: Accepted, active: Tensor) -> None:
    """Write the accepted path of each request to the pages of its text, in place.

    Args:
        text: the texts; page 0, the scratch page, may hold anything afterwards.
        tokens: [B, N], of the tree's nodes.
        accepted: the paths; the token chosen behind the last node is the next anchor and is not written.
        active: [B] bool; nothing is written for other requests.
    """
    page_size, steps = text.pages.shape[1], torch.arange(accepted.path.shape[1], device=tokens.device)
    place = text.context_len[:, None] + steps
    column, last = place // page_size, text.page_table.shape[1] - 1
    kept = (steps < accepted.count[:, None]) & active[:, None] & (column <= last)
    page = torch.where(kept, text.page_table.gather(1, column.clamp(max=last)), 0)
    text.pages[page, place % page_size] = tokens.gather(1, accepted.path)

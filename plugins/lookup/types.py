"""Inputs and outputs of the lookup op: a request's own text in pages, and a continuation copied from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d2sd.plugins.trees import Draft

# Shape letters: B requests, P pages, Z tokens a page, M pages a request, S slots.

#: Longest suffix that is compared: a longer match says no more.
LONGEST = 16
#: Lengths of a match at which the entries of `CopyScores.table` begin.
LENGTHS = (1, 2, 3, 4, 6, 9, 16)
#: Probabilities of a draft for the copied token, between the entries of `CopyScores.table`, as logarithms.
SUPPORT = (-3.912, -2.303, -1.204, -0.5108, -0.1625, -0.0408)


@dataclass(frozen=True, slots=True)
class Text:
    """The text of each request so far, prompt and answer: the tokens of its pages, then its anchor."""

    pages: Tensor  # [P, Z] int64, of committed tokens, in the pages that hold their K/V
    page_table: Tensor  # [B, M] int64
    context_len: Tensor  # [B] int64, committed tokens
    anchor: Tensor  # [B] int64


@dataclass(frozen=True, slots=True)
class Copy:
    """A continuation of an earlier occurrence of the end of each text."""

    draft: Draft  # [B, S, 1]
    length: Tensor  # [B] int64, tokens of the text's end that occurred before; 0: no proposal


@dataclass(frozen=True, slots=True)
class CopyScores:
    """Log-probabilities that a copied token is accepted, by what is known before it is verified."""

    #: [2, lengths, supports, S] fp32: at temperature 0 and 1; by length of the match; by probability of the draft for
    #: the token, the first entry where it does not propose it; by slot
    table: Tensor

    def to(self, device: str) -> CopyScores:
        return CopyScores(self.table.to(device))


def length_entry(length: Tensor) -> Tensor:
    """Entry of a match's length; 0 also for no match, which proposes nothing."""
    return sum((length >= least).long() for least in LENGTHS[1:]) + torch.zeros_like(length)


def support_entry(first: Draft, tokens: Tensor) -> Tensor:
    """Entry of the log-probability that a draft [B, S, M] gives to tokens [B, S]."""
    logprob = first.logprob.masked_fill(first.tokens != tokens[..., None], float("-inf")).amax(-1)
    return sum((logprob > least).long() for least in (float("-inf"), *SUPPORT)) + torch.zeros_like(tokens)

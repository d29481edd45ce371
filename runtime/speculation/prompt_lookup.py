"""Prompt lookup: drafts the tokens after the last earlier occurrence of the text's suffix. The free baseline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from d2sd.plugins.trees import Draft

#: Suffix lengths, longest first: a longer match is likelier to continue the same way.
SUFFIXES = (3, 2, 1)


def lookup(tokens: list[int], count: int) -> list[int]:
    """`count` tokens that followed the last earlier occurrence of the longest suffix of at most 3 tokens, or none."""
    for size in SUFFIXES:
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                copied = list(tokens)
                for index in range(start + size, start + size + count):
                    copied.append(copied[index])  # past the end it copies its own output, so repetitions continue
                return copied[len(tokens) :]
    return []


def lookup_draft(texts: Sequence[list[int]], slots: int, batch_size: int) -> Draft:
    """A first draft [B, S, 1] for a batch of `batch_size`: probability 1 if a text has a match, else no proposal.

    It is searched on the host and stays there: an input of the step.
    """
    found = [lookup(tokens, slots) for tokens in texts]
    found += [[]] * (batch_size - len(found))
    tokens = torch.tensor([ids or [0] * slots for ids in found], dtype=torch.long)
    known = torch.tensor([bool(ids) for ids in found])
    logprob = torch.where(known[:, None], 0.0, float("-inf")).expand(-1, slots)
    return Draft(tokens.view(-1, slots, 1), logprob[..., None])

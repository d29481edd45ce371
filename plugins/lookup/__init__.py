"""Prompt lookup: a continuation of earlier text of the same request, as candidates of its draft tree.

types.py       a request's text in pages, a copy, and how likely its tokens are
reference.py   the specification in plain PyTorch
triton/        the kernels: the search, one program a request, and the write of committed tokens
cpu.py         the search by the compiled library
"""

from __future__ import annotations

from torch import Tensor

from d2sd.plugins import dispatch
from d2sd.plugins.dispatch import Implementation
from d2sd.plugins.lookup import cpu
from d2sd.plugins.lookup.reference import append_reference, find_copy_reference
from d2sd.plugins.lookup.types import LENGTHS, SUPPORT, Copy, CopyScores, Text, length_entry, support_entry
from d2sd.plugins.trees import Accepted, Draft

__all__ = ["LENGTHS", "SUPPORT", "Copy", "CopyScores", "Text", "append", "find_copy", "length_entry", "support_entry"]

# Shape letters: B requests, S slots, M candidates a slot, N nodes.

OP = "prompt lookup"


def find_copy(text: Text, first: Draft, scores: CopyScores, temperature: Tensor) -> Copy:
    """The continuation of the longest match of each text's end in the text itself.

    Args:
        text: what the requests have said so far.
        first: the draft [B, S, M] at the root, which says how likely a copied token is.
        scores: how likely it is, at temperature 0 and 1.
        temperature: [B] fp32.
    """
    picked = dispatch.pick(OP, text.pages, library=True)
    if picked is Implementation.TRITON:
        from d2sd.plugins.lookup.triton.launch import find_copy_triton

        return find_copy_triton(text, first, scores, temperature)
    find = cpu.find_copy_cpu if picked is Implementation.LIBRARY else find_copy_reference
    return find(text, first, scores, temperature)


def append(text: Text, tokens: Tensor, accepted: Accepted, active: Tensor) -> None:
    """Write the accepted path of each request to the pages of its text, in place.

    Args:
        text: the texts; page 0, the scratch page, may hold anything afterwards.
        tokens: [B, N], of the tree's nodes.
        accepted: the paths; the token chosen behind the last node is the next anchor and is not written.
        active: [B] bool; nothing is written for other requests.
    """
    if dispatch.pick(OP, text.pages) is Implementation.TRITON:
        from d2sd.plugins.lookup.triton.launch import append_triton

        append_triton(text, tokens, accepted, active)
    else:
        append_reference(text, tokens, accepted, active)

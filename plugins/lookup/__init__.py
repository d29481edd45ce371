"""Prompt lookup: a continuation of earlier text of the same request, as candidates of its draft tree.

types.py       a request's text in pages, a copy, and how likely its tokens are
reference.py   the specification in plain PyTorch
triton/        the kernels: the search, one program a request, and the write of committed tokens
cpu.py         the search by the compiled library
"""

from __future__ import annotations

from d2sd.plugins.lookup.reference import append, find_copy
from d2sd.plugins.lookup.types import LENGTHS, SUPPORT, Copy, CopyScores, Text, length_entry, support_entry

__all__ = ["LENGTHS", "SUPPORT", "Copy", "CopyScores", "Text", "append", "find_copy", "length_entry", "support_entry"]

# Shape letters: B requests, S slots, M candidates a slot, N nodes.

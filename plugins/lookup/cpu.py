"""The search as a call of the compiled library: tensors on a CPU, arguments as of the specification."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from ctypes import Structure, byref, c_long, c_void_p

import torch

from d2sd.plugins.cpu.library import address, functions
from d2sd.plugins.lookup.types import LENGTHS, LONGEST, SUPPORT, Copy
from d2sd.plugins.trees import Draft


class Search(Structure):
    """`struct search`."""

    _fields_ = [
        *((name, c_long) for name in ("batch", "slots", "width", "page_size", "table_width")),
        *((name, c_long) for name in ("longest", "lengths", "supports")),
        *((name, c_void_p) for name in ("pages", "table", "context_len", "anchor")),
        *((name, c_void_p) for name in ("first_tokens", "first_logprob", "scores", "temperature")),
        *((name, c_void_p) for name in ("length_from", "support_to", "tokens", "length", "logprob")),
    ]


_LENGTHS, _SUPPORT = torch.tensor(LENGTHS), torch.tensor(SUPPORT)


def find_copy(text, first, scores, temperature):
    batch, slots, width = first.tokens.shape
    where = (x.long().contiguous() for x in (text.page_table, text.context_len, text.anchor, first.tokens))
    measures = (x.float().contiguous() for x in (first.logprob, scores.table, temperature))
    inputs = [text.pages, *where, *measures, _LENGTHS, _SUPPORT]
    tokens, length = torch.empty(batch, slots, dtype=torch.long), torch.empty(batch, dtype=torch.long)
    logprob = torch.empty(batch, slots)
    sizes = batch, slots, width, text.pages.shape[1], text.page_table.shape[1], LONGEST, len(LENGTHS), len(SUPPORT)
    functions().d2sd_copy(byref(Search(*sizes, *map(address, (*inputs, tokens, length, logprob)))))
    return Copy(Draft(tokens[..., None], logprob[..., None]), length)

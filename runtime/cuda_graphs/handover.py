"""Tensors that a captured step leaves for the next one, which is launched before the host reads its tokens.

    state of the step before -> anchors, context lengths, which rows are active -> decode_step -> state

A row of a step is *late* if its request had a row in the step before and the host does not have its tokens yet. The
device then decides for itself whether the answer has ended: by its length, by one of the smallest `STOP_TOKENS` - 1
stop tokens, or because the logits were not finite. A row that has ended is padding. Stop strings and further stop
tokens are found by the host; either way the host drops what a step computed for a request that has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from d2sd.plugins import handover
from d2sd.runtime.batch import Batch
from d2sd.runtime.decode import StepResult
from d2sd.runtime.sequence import Sequence
from d2sd.token_codes import NOT_FINITE

# Shape letters: B requests (a bucket), G block size γ.

#: Stop tokens of a request that the device checks, with `NOT_FINITE` always among them.
STOP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Link:
    """How the rows of a step follow from those of the step before it, and where their answers end."""

    late: Tensor  # [B] bool
    source: Tensor  # [B] int64, the row in the step before, of late rows
    limit: Tensor  # [B] int64, the context length at which the answer has all its tokens
    stop: Tensor  # [B, STOP_TOKENS] int64, `NOT_FINITE` past the last

    @staticmethod
    def pack(sequences: SequenceOf[Sequence], size: int, before: SequenceOf[Sequence] = ()) -> Link:
        """Links a step over `sequences`, padded to `size` rows, on the host; `before` are those of the step before it,
        if its tokens have not been read.
        """
        rows = {id(sequence): row for row, sequence in enumerate(before)}
        source = [rows.get(id(sequence), -1) for sequence in sequences]
        padding = [-1] * (size - len(sequences))
        requests = [sequence.request for sequence in sequences]
        limit = [len(request.prompt) + request.max_new_tokens - 1 for request in requests]
        stop = [sequence.stop_tokens[: STOP_TOKENS - 1] for sequence in sequences] + [[]] * len(padding)
        found = torch.tensor(source + padding)
        return Link(
            late=found >= 0,
            source=found.clamp(min=0),
            limit=torch.tensor(limit + [sys.maxsize] * len(padding)),
            stop=torch.tensor([[*tokens, *[NOT_FINITE] * (STOP_TOKENS - len(tokens))] for tokens in stop]),
        )


class Handover:
    """The state of the captured step that ran last, on the device."""

    @torch.inference_mode(False)
    def __init__(self, rows: int, device: str) -> None:
        #: [3, rows] int64: anchor, context length, and whether the row is still active
        self._state = torch.zeros(3, rows, dtype=torch.long, device=device)

    @torch.inference_mode()
    def begin(self, batch: Batch, link: Link) -> Batch:
        """The batch with anchors and context lengths of its late rows."""
        rows = batch.anchor, batch.context_len, batch.active
        anchor, context_len, active = handover.begin(*rows, link.late, link.source, self._state)
        return replace(batch, anchor=anchor, context_len=context_len, active=active)

    @torch.inference_mode()
    def end(self, batch: Batch, link: Link, result: StepResult) -> None:
        """Keep the state of the rows of this step."""
        count, tokens = result.accepted.count, result.accepted.tokens
        handover.end(batch.context_len, batch.active, tokens, count, link.limit, link.stop, self._state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Steps that run inside do not change the state."""
        before = self._state.clone()
        try:
            yield
        finally:
            self._state.copy_(before)

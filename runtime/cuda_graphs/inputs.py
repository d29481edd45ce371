"""The inputs of captured decode steps: tensors on the device that keep their addresses, filled by one copy a step.

A row of a step is *late* if its request had a row in the step before and the host does not have its tokens yet: it
reads what that step left on the device (`Handover`). The device then decides for itself whether the answer has ended:
by its length, by one of the smallest `STOP_TOKENS` - 1 stop tokens, or because the logits were not finite. A row that
has ended is padding. Stop strings and further stop tokens are found by the host; either way the host drops what a step
computed for a request that has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from d2sd.modeling.where import tensors_of, with_tensors
from d2sd.runtime.batch import Batch
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.sequence import Sequence
from d2sd.runtime.staging import aligned_sizes, parts_like
from d2sd.token_codes import NOT_FINITE

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
        earlier_row = torch.tensor(source + padding)
        return Link(
            late=earlier_row >= 0,
            source=earlier_row.clamp(min=0),
            limit=torch.tensor(limit + [sys.maxsize] * len(padding)),
            stop=torch.tensor([[*tokens, *[NOT_FINITE] * (STOP_TOKENS - len(tokens))] for tokens in stop]),
        )


@dataclass(slots=True)
class _Buffer:
    """The bytes of all inputs, and the tensors in them."""

    whole: Tensor  # uint8
    parts: list[Tensor]
    columns: int = 0  # of the page table that was written last; those behind are 0


class StaticInputs:
    """Static inputs of a batch bucket: tensors on the device that one copy from a pinned buffer fills.

    Two such buffers take turns: a step is packed while the copy of the one before it may not have begun.
    """

    @torch.inference_mode(False)  # else only callers in inference mode could load values
    def __init__(self, batch: Batch, pages: int, device: str) -> None:
        """Shapes and types are those of `batch`, but the page tables have `pages` columns."""
        size = len(batch.anchor)
        where = batch.where.map_tables(lambda table: table.new_zeros(size, pages))
        wide = replace(batch, where=where)
        like = _tensors(wide, Link.pack([], size))

        def buffer(**where: Any) -> _Buffer:
            whole = torch.zeros(sum(aligned_sizes(like)), dtype=torch.uint8, **where)
            return _Buffer(whole, parts_like(whole, like))

        self._hosts = cycle([buffer(pin_memory=device.startswith("cuda")) for _ in range(2)])
        on_device = buffer(device=device)
        self._device, parts = on_device.whole, iter(on_device.parts)
        where, sampling = batch.where, batch.sampling
        batch = with_tensors(batch, parts)  # in the order of `_tensors`
        self._batch = replace(batch, where=with_tensors(where, parts), sampling=with_tensors(sampling, parts))
        self.link = with_tensors(Link.pack([], size), parts)

    def batch(self, sampling: Sampling) -> Batch:
        """The inputs as a batch that samples in the way of `sampling`.

        Filters that no request uses keep all tokens, so one graph serves every combination of them.
        """
        flags = sampling.with_all_filters()
        own = replace(self._batch.sampling, any_sampled=flags.any_sampled, used=flags.used)
        return replace(self._batch, sampling=own)

    def load(self, batch: Batch, link: Link) -> None:
        """Copy the values of these host tensors to the device; does not wait.

        At most one step whose inputs were loaded before may still be running.
        """
        host = next(self._hosts)
        columns = batch.where.pages.shape[1]
        for part, tensor in zip(host.parts, _tensors(batch, link), strict=True):
            if part.shape == tensor.shape:
                part.copy_(tensor)
            else:  # a narrower page table
                part[:, :columns] = tensor
                part[:, columns : host.columns] = 0
        host.columns = columns
        self._device.copy_(host.whole, non_blocking=True)

    def clear(self) -> None:
        """Make every row padding, which commits nothing."""
        self._device.zero_()


def _tensors(batch: Batch, link: Link) -> list[Tensor]:
    """The tensors of a step's inputs."""
    return [tensor for state in (batch, batch.where, batch.sampling, link) for tensor in tensors_of(state)]

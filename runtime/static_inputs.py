"""The inputs of captured decode steps: tensors on the device that keep their addresses, filled by one copy a step."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from d2sd.runtime.batch import Batch
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.speculation.draft import Draft

#: Bytes: addresses that are multiples of it let a kernel load 16 bytes at a time, and TensorRT requires them.
_ALIGNMENT = 256


class StaticInputs:
    """Static inputs of a batch bucket: tensors on the device that one copy from a pinned buffer fills."""

    @torch.inference_mode(False)  # else only callers in inference mode could load values
    def __init__(self, batch: Batch, draft: Draft | None, pages: int, device: str) -> None:
        """Shapes and types are those of `batch` and `draft`, but the page table has `pages` columns."""
        like = _tensors(replace(batch, page_table=batch.page_table.new_zeros(len(batch.anchor), pages)), draft)
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._slots = [_view(part, tensor) for part, tensor in zip(torch.split(self._host, sizes), like, strict=True)]
        inputs = [_view(part, tensor) for part, tensor in zip(torch.split(self._device, sizes), like, strict=True)]
        self._batch, rest = _batch(batch, inputs)
        self.draft = Draft(*rest) if rest else None

    def batch(self, sampling: Sampling) -> Batch:
        """The inputs as a batch that samples in the way of `sampling`.

        Filters that no request uses keep all tokens, so one graph serves every combination of them.
        """
        filtered = sampling.any_filter
        own = replace(
            self._batch.sampling, any_sampled=sampling.any_sampled, any_top_p=filtered, any_top_k=filtered,
            any_min_p=filtered,
        )  # fmt: skip
        return replace(self._batch, sampling=own)

    def load(self, batch: Batch, draft: Draft | None) -> None:
        """Copy the values of these host tensors to the device; does not wait."""
        for slot, tensor in zip(self._slots, _tensors(batch, draft), strict=True):
            if slot.shape != tensor.shape:  # a narrower page table
                slot.zero_()
            slot[tuple(map(slice, tensor.shape))] = tensor
        self._device.copy_(self._host, non_blocking=True)

    def clear(self) -> None:
        """Make every row padding, which commits nothing."""
        self._device.zero_()


def _tensors(batch: Batch, draft: Draft | None) -> list[Tensor]:
    """The tensors of a step's inputs, in the order of `_batch`."""
    own = [value for _, value in _fields(batch) + _fields(batch.sampling)]
    return own if draft is None else [*own, draft.tokens, draft.logprob]


def _batch(batch: Batch, tensors: list[Tensor]) -> tuple[Batch, list[Tensor]]:
    """The same batch with other tensors, and the tensors that it does not need."""
    values = iter(tensors)
    own: dict[str, Any] = {name: next(values) for name, _ in _fields(batch)}
    sampling: dict[str, Any] = {name: next(values) for name, _ in _fields(batch.sampling)}
    return replace(batch, **own, sampling=replace(batch.sampling, **sampling)), list(values)


def _fields(state: Batch | Sampling) -> list[tuple[str, Tensor]]:
    values = ((field.name, getattr(state, field.name)) for field in fields(state))
    return [(name, value) for name, value in values if isinstance(value, Tensor)]


def _view(part: Tensor, like: Tensor) -> Tensor:
    """The leading bytes of `part` as a tensor like `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)

"""Runs decode steps: on CUDA as graphs, one launch a step, else operator by operator.

    host tensors of a batch -> one pinned buffer -> one copy -> static inputs -> graph -> one tensor that the host reads

A graph holds a whole step, from the first draft to the K/V of the committed tokens in the target's pages and in those
of the drafters that its policy runs. There is one for each (policy, batch bucket, kind of sampling), captured at its
first use; the page table always has the width of the longest context, because attention reads `context_len` tokens of
it. A drafter that the policy does not run stays behind: what it must catch up with is copied out of the graph's memory
into its queue.

Batches whose shapes vary take the other path on CUDA too: those with a grammar, log-probabilities, biases or penalties
(`Batch.has_static_shapes`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from d2sd.errors import D2SDError
from d2sd.plugins.dispatch import NO_FALLBACK
from d2sd.runtime.backends.model_runner import ModelRunner
from d2sd.runtime.backends.pending_context import ContextRows
from d2sd.runtime.batch import Batch
from d2sd.runtime.buckets import bucket
from d2sd.runtime.decode import StepResult, Timer, decode_step
from d2sd.runtime.request import Limits
from d2sd.runtime.sampling.sample import Sampling
from d2sd.runtime.speculation.calibration import Calibration
from d2sd.runtime.speculation.draft import Draft
from d2sd.runtime.speculation.policy import Policy

#: Bytes: addresses that are multiples of it let a kernel load 16 bytes at a time, and TensorRT requires them.
_ALIGNMENT = 256


class DecodeSteps:
    """The decode steps of one engine: one model runner with its pools allocated, one calibration."""

    def __init__(self, runner: ModelRunner, limits: Limits, calibration: Calibration | None = None) -> None:
        self._runner, self._calibration = runner, calibration
        self._pages = bucket(limits.pages_for(limits.max_context + runner.block_size))
        self._inputs: dict[tuple[int, bool], _Inputs] = {}  # by batch bucket, and with or without prompt lookup
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._refused = False  # a capture failed: nothing is captured any more

    def run(
        self, policy: Policy, batch: Batch, prompt_lookup: Draft | None = None, timer: Timer = nullcontext
    ) -> StepResult:
        """`decode_step` of tensors on the host. Read its result before the next call, which overwrites it.

        Raises D2SDError if CUDA cannot capture the step, under `D2SD_NO_FALLBACK=1`; else that is a warning.
        """
        graph = self._graph(policy, batch, prompt_lookup)
        if graph is None:
            device = self._runner.device
            draft = prompt_lookup and Draft(prompt_lookup.tokens.to(device), prompt_lookup.logprob.to(device))
            return decode_step(self._runner, policy, batch.to(device), self._calibration, draft, timer)
        with timer("decode"):
            graph.inputs.load(batch, prompt_lookup)
            graph.replay()
            waiting = set(range(self._runner.drafters)).difference(policy.required_drafters)
            if waiting and graph.context is not None:
                self._runner.queue(graph.context.clone(), waiting)
        return graph.result

    def _graph(self, policy: Policy, batch: Batch, draft: Draft | None) -> _Graph | None:
        """The graph of this step, captured now if it is the first of its kind; None if it runs without."""
        if self._runner.capture is None or self._refused or not batch.has_static_shapes:
            return None
        size, sampling = len(batch.anchor), batch.sampling
        key = (policy, size, sampling.any_sampled, sampling.any_filter)
        if key not in self._graphs:
            inputs = self._inputs.get((size, draft is not None))
            if inputs is None:
                inputs = _Inputs(batch, draft, self._pages, self._runner.device)
                self._inputs[size, draft is not None] = inputs
            try:
                self._graphs[key] = self._captured(policy, inputs, sampling)
            except Exception as error:  # of PyTorch, Triton or TensorRT
                self._refused = True
                _refuse(error)
                return None
        return self._graphs[key]

    def _captured(self, policy: Policy, inputs: _Inputs, sampling: Sampling) -> _Graph:
        assert self._runner.capture is not None
        batch = inputs.batch(sampling)

        def run() -> tuple[StepResult, ContextRows | None]:
            result = decode_step(self._runner, policy, batch, self._calibration, inputs.draft)
            context = self._runner.take_committed()
            if context is not None:
                self._runner.inject(context, policy.required_drafters)
            return result, context

        inputs.clear()  # what runs before the capture then writes to the scratch page alone
        (result, context), replay = self._runner.capture(run)
        return _Graph(inputs, result, context, replay)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step; `result` and `context` are in the graph's memory."""

    inputs: _Inputs
    result: StepResult
    context: ContextRows | None  # what the step committed, for drafters that it did not run
    replay: Callable[[], None]


class _Inputs:
    """Static inputs of a batch bucket: tensors on the device that one copy from a pinned buffer fills."""

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


def _refuse(error: Exception) -> None:
    """Say that steps run without graphs; an error where falling back is forbidden."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if os.environ.get(NO_FALLBACK) == "1":
        raise D2SDError(
            "The decode step cannot be captured as a CUDA graph.", where=f"{NO_FALLBACK}=1", found=reason,
            fix=f"unset {NO_FALLBACK} to launch its operators one by one, slower",
        ) from error  # fmt: skip
    print(f"d2sd: decode steps run without CUDA graphs: {reason}", file=sys.stderr, flush=True)

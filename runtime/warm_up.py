"""Work of every shape that a GPU may be given, done once before the first request: none waits for a compiler.

Triton compiles a kernel for the types and constants of its launch, among them what depends on shapes. A decode step has
the shapes of its graph (`DecodeSteps.warm_ups`). Of a prefill pass it is attention alone: its tile is chosen by the
longest chunk, and the splits of the context by the number of chunks and the width of their page table. All three are
padded to a power of two here, or are few, so that the passes below are all that there are. The last one is also the
largest: the memory that it takes is there afterwards.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from d2sd.plugins.cascade_attention import chunk_kernel
from d2sd.plugins.compilations import watch_compilations
from d2sd.progress import Progress, silent
from d2sd.runtime.cuda_graphs.steps import DecodeSteps
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, power_of_two, powers_of_two
from d2sd.runtime.speculation.policy import Policy

logger = logging.getLogger(__name__)

#: More prompts are more programs than a GPU has multiprocessors, so that no context is split, as for this many.
_MOST_SPLIT = 512
#: Rows whose logits are made for `prompt_logprobs`.
_REPORTED = 64


def _warn(name: str) -> None:
    """A request waits for a kernel: `prefill_shapes` or `DecodeSteps.warm_ups` lacks a shape."""
    logger.warning("the kernel %s was compiled while requests waited for it", name)


class PrefillShape(NamedTuple):
    """The shape of a prefill pass."""

    requests: int
    rows: int  # of the longest chunk; the others have one
    pages: int  # columns of the page table


def warm_up(
    runner: ModelRunner,
    steps: DecodeSteps,
    limits: Limits,
    served: Iterable[tuple[Policy, int]],
    progress: Progress = silent,
) -> None:
    """Prefill and decode in all shapes for these policies and batch buckets; nothing on a CPU."""
    if runner.capture is None:
        return
    start, compiled = time.perf_counter(), Counter[str]()
    watch_compilations(lambda name: compiled.update([name]))
    prefills: list[Callable[[], object]] = [
        partial(_prefill, runner, shape) for shape in prefill_shapes(runner, limits)
    ]
    decodes = [*steps.prefills.warm_ups(), *steps.warm_ups(served)]
    with progress("compiling kernels", len(prefills) + len(decodes)) as advance:
        for work in prefills:
            work()
            advance(1)
        for work in decodes:
            try:
                work()
            except torch.OutOfMemoryError as error:  # few requests are of such a kind, and never a whole batch
                logger.warning("a full batch of one kind of requests does not fit in memory: %s", error)
            advance(1)
    counts = len(prefills), len(decodes), compiled.total(), time.perf_counter() - start
    logger.info("warmed up: %d shapes of prompts and %d of decode steps, %d kernels, in %.1f s", *counts)
    watch_compilations(_warn)


def prefill_shapes(runner: ModelRunner, limits: Limits) -> list[PrefillShape]:
    """A pass for each set of kernels that prefills of these limits may run, the smallest of each; the largest last."""
    most = min(limits.max_batch, limits.prefill_chunk)
    counts = [*range(1, min(most, _MOST_SPLIT) + 1), most]
    widest = power_of_two(limits.pages_for(limits.max_context + runner.block_size))
    found: dict[object, PrefillShape] = {}
    for requests, rows, pages in product(counts, powers_of_two(limits.prefill_chunk), powers_of_two(widest)):
        held = min(rows, pages * limits.page_size)  # a table covers the positions of a chunk
        if power_of_two(held) == rows:
            shape = PrefillShape(requests, held, pages)
            found.setdefault(_kernels(runner, shape), shape)
    # Prompts one by one, as `exact` attends to them: where the inputs of each begin decides their alignment.
    few = [PrefillShape(*shape) for shape in product((1, min(3, most)), (1, 2), {1, min(2, widest), widest})]
    largest = PrefillShape(most, min(limits.prefill_chunk - most + 1, widest * limits.page_size), widest)
    return list(dict.fromkeys([*found.values(), *few, largest]))


def _kernels(runner: ModelRunner, shape: PrefillShape) -> object:
    """A value for the kernels of a pass of this shape."""
    body, pools = runner.target.config.body, runner.target_pool.tensors[::2]
    itemsize = runner.target.embed_tokens.weight.element_size()
    windows = sorted({window for window, _ in body.views}, key=lambda window: window or 0)
    given = [(pages, *shape, body.num_heads, itemsize) for pages in pools]
    return tuple(chunk_kernel(*one, window) for window in windows for one in given)


def _prefill(runner: ModelRunner, shape: PrefillShape) -> None:
    """Prefill chunks of nothing: all pages are the scratch page 0. Their features go to the drafters."""
    lengths = [shape.rows] + [1] * (shape.requests - 1)
    tokens = torch.zeros(sum(lengths), dtype=torch.long)
    hidden, _ = runner.prefill(tokens, lengths, runner.scratch(shape.requests, shape.pages), tokens)
    runner.prompt_logits(hidden[:_REPORTED])
    runner.context.inject(runner.drafters)

"""Launches the kernels from logits to tokens. Nothing here waits for the device: a CUDA graph can capture it."""
# mypy: disable-error-code="no-untyped-def,import-untyped,import-not-found"

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.choice.reference import FILTERS, SamplingTensors, pool_size_of
from d2sd.plugins.choice.triton.drafts import pool_kernel, segments_kernel
from d2sd.plugins.choice.triton.filters import filtered_kernel
from d2sd.plugins.choice.triton.tokens import combine_kernel, scores_kernel
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, K branches, S slots, N nodes, R rows of logits, M candidates of a slot, V vocabulary.

#: Logits that one program reads.
BLOCK = 4096
WARPS = 8
#: Where the target filters: neighbours of one maximum, segments looked into at once, few and most tokens of a list.
SEGMENT, TILE, FEW, LIST = 128, 16, 256, 1024
#: Logits that it reads at once where it reads a row again.
TURN = 1024
#: Low bits of an fp32 number's order that all numbers of a type share.
SHIFT = {torch.bfloat16: 16, torch.float16: 13}


def segment_size(vocab: int, pool: int) -> int:
    """Neighbours of one maximum: as many segments as tokens in the segments that are looked into."""
    size = 32
    while size < 256 and size * size * 2 <= vocab // pool:
        size *= 2
    return size


def pool_constants(vocab: int, pool: int, width: int) -> dict[str, int]:
    blocks, seg = -(-vocab // BLOCK), segment_size(vocab, pool)
    segments = blocks * (BLOCK // seg)
    return {
        "POOL": pool,
        "POOLP": power(pool),
        "WIDTH": width,
        "SEG": seg,
        "SEGMENTS": segments,
        "SEGMENTSP": max(power(-(-vocab // seg)), power(pool)),
        "BLOCKS": blocks,
        "BLOCKSP": power(blocks),
    }


def candidates(logits, context_len, sampling, width, ids=None, branches=None):
    """By logits in any type, which nothing changes."""
    batch, count, slots, vocab = logits.shape
    rows, device, width = batch * count * slots, logits.device, min(width, vocab)
    constants = pool_constants(vocab, pool_size_of(logits, sampling, width), width)
    blocks, size = constants["BLOCKS"], constants["POOLP"]
    maxima = torch.empty(rows, constants["SEGMENTS"], dtype=torch.int32, device=device)
    partial = torch.empty(rows, 2, blocks, dtype=torch.float32, device=device)
    segments = torch.empty(rows, size, dtype=torch.int32, device=device)
    entries = torch.empty(rows, size, dtype=torch.long, device=device)
    tokens = torch.empty(batch, count, slots, width, dtype=torch.long, device=device)
    logprob = torch.empty(batch, count, slots, width, dtype=torch.float32, device=device)
    logits = logits.contiguous()
    at = (None, None) if branches is None else (branches.rejected.contiguous(), branches.prefix_len.contiguous())
    sampled = sampling.any_sampled
    arguments = [context_len, sampling.temperature, sampling.seed] if sampled else [None] * 3
    filters = sampling.filters if sampled else dict.fromkeys(FILTERS)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        segments_kernel[(rows, blocks)](
            logits, *at, ids if branches is not None else None, maxima, partial, vocab,
            SLOTS=slots, BLOCKS=blocks, BLOCK=BLOCK, SEG=constants["SEG"], num_warps=WARPS,
        )  # fmt: skip
        pool_kernel[(rows,)](
            logits, *at, maxima, partial, ids, *arguments, segments, entries, tokens, logprob, vocab, **filters,
            ROWS=count * slots, SLOTS=slots, **constants, SHIFT=SHIFT.get(logits.dtype, 0),
            SAMPLED=sampled, num_warps=WARPS,
        )  # fmt: skip
    return Draft(tokens, logprob)


def choose(logits, context_len, depth, sampling):
    """By logits in any type."""
    logits, depth = logits.contiguous(), depth.contiguous()
    sampled = sampling.any_sampled
    if sampled and sampling.any_filter:
        return choose_filtered(logits, context_len, depth, sampling)
    batch, nodes, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    partial = torch.empty(batch * nodes, blocks, dtype=torch.long, device=logits.device)
    chosen = torch.empty(batch, nodes, dtype=torch.long, device=logits.device)
    arguments = [sampling.temperature, sampling.seed, context_len, depth] if sampled else [None] * 4
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        scores_kernel[(batch * nodes, blocks)](
            logits, *arguments, None, partial, None, None, vocab,
            ROWS=nodes, BLOCKS=blocks, BLOCK=BLOCK, SEG=SEGMENT, SAMPLED=sampled, num_warps=WARPS,
        )  # fmt: skip
        combine_kernel[(batch * nodes,)](partial, chosen, BLOCKS=blocks, BLOCKSP=power(blocks), num_warps=1)
    return chosen


def choose_filtered(
    logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors, threshold: Tensor | None = None
) -> Tensor:
    """`choose` of contiguous tensors where a request filters.

    threshold [B·N] int32: takes the smallest order (`ascending_of`) of scaled logits that the filters keep.
    """
    (batch, nodes, vocab), device = logits.shape, logits.device
    rows, blocks = batch * nodes, -(-vocab // BLOCK)
    count = blocks * (BLOCK // SEGMENT)
    partial = torch.empty(rows, blocks, dtype=torch.long, device=device)
    maxima = torch.empty(rows, count, dtype=torch.int32, device=device)
    sums = torch.empty(rows, count, dtype=torch.float32, device=device)
    segments = torch.empty(rows, count, dtype=torch.int32, device=device)
    entries = torch.empty(rows, LIST, dtype=torch.long, device=device)
    chosen = torch.empty(batch, nodes, dtype=torch.long, device=device)
    given = (
        logits, sampling.temperature, sampling.seed, context_len, depth, sampling.filtered, partial, maxima, sums,
    )  # fmt: skip
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        scores_kernel[(rows, blocks)](
            *given, vocab,
            ROWS=nodes, BLOCKS=blocks, BLOCK=BLOCK, SEG=SEGMENT, SAMPLED=True, num_warps=WARPS,
        )  # fmt: skip
        filtered_kernel[(rows,)](
            *given, segments, entries, chosen, threshold, vocab, **sampling.filters,
            ROWS=nodes, BLOCKS=blocks, BLOCKSP=power(blocks), SEG=SEGMENT, SEGMENTS=count,
            SEGMENTSP=power(-(-vocab // SEGMENT)), TILE=TILE, FEW=FEW, LIST=LIST, SHIFT=SHIFT.get(logits.dtype, 0),
            BLOCK=TURN, num_warps=WARPS,
        )  # fmt: skip
    return chosen

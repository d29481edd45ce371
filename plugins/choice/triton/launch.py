"""Launches the kernels from logits to tokens. Nothing here waits for the device: a CUDA graph can capture it."""
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2 as power

from d2sd.plugins.choice.reference import SamplingTensors
from d2sd.plugins.choice.triton.drafts import pool_kernel, segments_kernel, threshold_kernel
from d2sd.plugins.choice.triton.tokens import combine_kernel, scores_kernel
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, K branches, S slots, N nodes, R rows of logits, M candidates of a slot, V vocabulary.

#: Logits that one program reads.
BLOCK = 4096
WARPS = 8
#: Of a program that reads a whole row.
ROW_WARPS = 16


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
        "SEGMENTSP": max(power(segments), power(pool)),
        "BLOCKS": blocks,
        "BLOCKSP": power(blocks),
    }


def candidates_triton(
    logits: Tensor, context_len: Tensor, width: int, pool: int, ids: Tensor | None, sampling: SamplingTensors | None
) -> Draft:
    """[B, K, S, M] of logits [B, K, S, V] in any type; `sampling` None: all greedy."""
    batch, count, slots, vocab = logits.shape
    rows, device = batch * count * slots, logits.device
    constants = pool_constants(vocab, pool, width)
    maxima = torch.empty(rows, constants["SEGMENTS"], dtype=torch.int32, device=device)
    partial = torch.empty(rows, 2, constants["BLOCKS"], dtype=torch.float32, device=device)
    tokens = torch.empty(batch, count, slots, width, dtype=torch.long, device=device)
    logprob = torch.empty(batch, count, slots, width, dtype=torch.float32, device=device)
    logits = logits.contiguous()
    arguments = (
        [None] * 5
        if sampling is None
        else [sampling.temperature, sampling.seed, sampling.min_p, sampling.top_k, sampling.top_p]
    )
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        segments_kernel[(rows, constants["BLOCKS"])](
            logits,
            maxima,
            partial,
            vocab,
            BLOCKS=constants["BLOCKS"],
            BLOCK=BLOCK,
            SEG=constants["SEG"],
            num_warps=WARPS,
        )
        pool_kernel[(rows,)](
            logits, maxima, partial, ids, None if sampling is None else context_len, *arguments, tokens, logprob, vocab,
            ROWS=count * slots, SLOTS=slots, **constants, SAMPLED=sampling is not None,
            MIN_P=sampling is not None and sampling.any_min_p, TOP_K=sampling is not None and sampling.any_top_k,
            TOP_P=sampling is not None and sampling.any_top_p, num_warps=WARPS if pool <= 16 else 2 * WARPS,
        )  # fmt: skip
    return Draft(tokens, logprob)


def choose_triton(logits: Tensor, context_len: Tensor, depth: Tensor, sampling: SamplingTensors | None) -> Tensor:
    """The token [B, N] after each node: logits [B, N, V] in any type, depth [B, N]; `sampling` None: all greedy."""
    batch, nodes, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    partial = torch.empty(batch * nodes, blocks, dtype=torch.long, device=logits.device)
    chosen = torch.empty(batch, nodes, dtype=torch.long, device=logits.device)
    logits = logits.contiguous()
    arguments: list[Tensor | None] = [None] * 5
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        if sampling is not None:
            arguments = [sampling.temperature, sampling.seed, context_len, depth.contiguous(), None]
            flags = {"MIN_P": sampling.any_min_p, "TOP_K": sampling.any_top_k, "TOP_P": sampling.any_top_p}
            if any(flags.values()):
                arguments[-1] = torch.empty(batch * nodes, dtype=torch.int32, device=logits.device)
                threshold_kernel[(batch * nodes,)](
                    logits,
                    sampling.temperature,
                    sampling.min_p,
                    sampling.top_k,
                    sampling.top_p,
                    arguments[-1],
                    vocab,
                    ROWS=nodes,
                    BLOCK=BLOCK,
                    **flags,
                    num_warps=ROW_WARPS,
                )
        scores_kernel[(batch * nodes, blocks)](
            logits,
            *arguments,
            partial,
            vocab,
            ROWS=nodes,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            SAMPLED=sampling is not None,
            num_warps=WARPS,
        )
        combine_kernel[(batch * nodes,)](partial, chosen, BLOCKS=blocks, BLOCKSP=power(blocks), num_warps=1)
    return chosen

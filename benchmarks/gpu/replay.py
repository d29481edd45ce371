"""One CUDA graph of the fused kernel, replayed with other queries, pages and context lengths: nothing is read on the
host, so the same graph serves every step of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.call import Call, compare, make_call
from benchmarks.gpu.cases import Case, Note
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import captured
from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import cascade_attention_triton

#: Captured with the first lengths, replayed with all; one request at least always fills the bucket's 2048 slots.
LENGTHS = ((2048, 2048), (2048, 1), (0, 2048), (700, 2048), (2048, 1999))


def cases() -> Iterator[Case]:
    for shape in (Shape(LENGTHS[0], 64), Shape(LENGTHS[0], 64, fp8=True), Shape(LENGTHS[0], 1)):
        yield f"replay/{shape.name}", partial(replayed, shape)


def replayed(shape: Shape, _: Note, device: str = "cuda") -> dict[str, Any]:
    """The largest errors over all replays, as fractions of their bounds."""
    call = make_call(shape, device)
    packed = pack_mask_bits(call.attn_mask)

    def run() -> torch.Tensor:
        return cascade_attention_triton(call.q, call.k, call.v, call.context, packed)

    replay, out = captured(run)
    worst: dict[str, float] = {}
    for seed, lengths in enumerate(LENGTHS, start=1):
        _fill(call, make_call(replace(shape, contexts=lengths), device, seed))
        packed.copy_(pack_mask_bits(call.attn_mask))
        out.fill_(float("nan"))
        replay()
        errors = compare(out, call)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    return worst | {"replays": len(LENGTHS)}


def _fill(call: Call, other: Call) -> None:
    """Copy another call's values into the memory that the graph was captured with."""
    for tensor, values in zip(call.tensors(), other.tensors(), strict=True):
        tensor.copy_(values)

"""The tests of this folder share where kernels run, and the fused attention with what it may be off by.

The same tests run the kernels under Triton's interpreter (TRITON_INTERPRET=1) on a CPU, compiled on a GPU, and as
executed PTX on a CPU: tests/ptx/ imports them and sets DEVICE.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from d2sd.plugins.cascade_attention import pack_mask_bits
from d2sd.plugins.cascade_attention.triton.launch import launch
from d2sd.plugins.shared.fp8 import from_pages, to_pages
from tests.plugins.cascade_attention.cases import BUDGET
from tests.plugins.test_cascade_attention import Call, Chunks

#: The interpreter cuts bf16 and FP8 off where a GPU rounds.
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"


def there(given: Any) -> Any:
    """On the device of the kernels: a tensor, or a dataclass or list of them."""
    if isinstance(given, Tensor):
        return given.to(DEVICE)
    if isinstance(given, list):
        return [there(one) for one in given]
    if is_dataclass(given) and not isinstance(given, type):
        return type(given)(*(there(getattr(given, field.name)) for field in fields(given)))
    return given


def fused(call: Call, splits: int, scale: Tensor | None = None) -> Tensor:
    """The kernel's result of a call, on the CPU; with `scale` in FP8."""
    q, k, v, context = there(call.q), there(call.k), there(call.v), there(call.context)
    mask = call.mask
    words, first, sinks = there(pack_mask_bits(mask.allowed)), there(mask.first), there(call.sinks)
    return launch(q, k, v, context, words, splits=splits, first=first, sinks=sinks, scale=there(scale)).cpu()


def fused_chunks(chunks: Chunks, splits: int) -> Tensor:
    """The kernel's result of chunks of prompts, on the CPU."""
    q, k, v, context, mask = (there(getattr(chunks, name)) for name in ("q", "k", "v", "context", "mask"))
    return launch(q, k, v, context, mask, splits=splits, sinks=there(chunks.sinks)).cpu()


def in_fp8(call: Call, k_scale: Tensor, v_scale: Tensor) -> Call:
    """The call over FP8 pages."""
    k_pages, v_pages = to_pages(call.context.k_pages, k_scale), to_pages(call.context.v_pages, v_scale)
    return call.over(k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)


def read_back(call: Call) -> Call:
    """The call over FP8 pages, over plain pages of the same values."""
    context, dtype = call.context, call.q.dtype
    assert context.k_scale is not None
    assert context.v_scale is not None
    k_pages = from_pages(context.k_pages, context.k_scale, dtype)
    v_pages = from_pages(context.v_pages, context.v_scale, dtype)
    return call.over(k_pages=k_pages, v_pages=v_pages, k_scale=None, v_scale=None)


def assert_within_budget(found: Tensor, expected: Tensor, call: Call) -> None:
    """`expected`: [B, T, Hq, D] of this call over plain pages; NaN in pages is what nobody may read."""
    assert found.isfinite().all()
    error = (found.double() - expected.double()).abs().max()
    largest = torch.cat([call.v.flatten(), call.context.v_pages.flatten()]).double().nan_to_num(0).abs().max()
    assert error <= BUDGET[found.dtype] * largest, error

"""What a TensorRT plugin does when it runs: the kernels over tensors that TensorRT points at. **Not yet run.**"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.onnx import BLOCK

_TYPES = {"HALF": "<f2", "FLOAT": "<f4", "INT32": "<i4", "BF16": "<i2"}


def run(
    name: str, described: list[tuple[tuple[int, ...], str]], inputs_at: list[int], output_at: int, stream: int
) -> None:
    """Run the node `name` on `stream`: inputs by (shape, type) and address, the output shaped like the first."""
    from d2sd.plugins.cascade_attention.triton.launch import fused_cascade_attention
    from d2sd.plugins.kv_pages.triton.launch import fused_write_rows

    given = [_tensor(shape, kind, at) for (shape, kind), at in zip(described, inputs_at, strict=True)]
    out = _tensor(*described[0], output_at)
    # not ExternalStream: of the default stream's handle, 0, it makes a new one
    theirs = torch.cuda.get_stream_from_external(stream, out.device)
    with torch.cuda.stream(theirs):
        q, k, v, *new, k_pages, v_pages, page_table, context_len, attn_mask = given
        if name == BLOCK:
            # New rows go to the pages before anything is read. Committed rows stay as they are: these lie behind the
            # context, and none is written where `new_len` is 0. They are a request's until it commits them for good;
            # were TensorRT to give us a copy of the pages, only that later commit would count, and nothing be wrong.
            new_k, new_v, new_len = new
            steps = torch.arange(new_k.shape[1], device=q.device)
            places, keep = context_len[:, None] + steps, steps < new_len[:, None]
            fused_write_rows(new_k[None], new_v[None], k_pages[None], v_pages[None], page_table, places, keep)
            context_len = context_len + new_len
        out.copy_(fused_cascade_attention(q, k, v, k_pages, v_pages, page_table, context_len, attn_mask))


class _Memory:
    """CUDA's array interface of memory that is not ours."""

    def __init__(self, shape: tuple[int, ...], kind: str, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape, "typestr": kind, "data": (address, False), "version": 3
        }  # fmt: skip


def _tensor(shape: tuple[int, ...], kind: str, address: int) -> Tensor:
    tensor = torch.as_tensor(_Memory(shape, _TYPES[kind], address), device="cuda")
    assert tensor.data_ptr() == address, "a copy would swallow what is written"
    return tensor.view(torch.bfloat16) if kind == "BF16" else tensor  # the interface knows no bf16

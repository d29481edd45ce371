"""Runs a TensorRT plugin: launches the Triton kernels over TensorRT's device pointers. **Not yet run.**"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d2sd.plugins.cascade_attention.arguments import PagedContext
from d2sd.plugins.cascade_attention.onnx import INPUTS, TREE
from d2sd.plugins.kv_pages import write_pages

_TYPES = {"HALF": "<f2", "FLOAT": "<f4", "INT32": "<i4", "BF16": "<i2"}


def run(
    name: str, described: list[tuple[tuple[int, ...], str]], inputs_at: list[int], output_at: int, stream: int
) -> None:
    """Run the node `name` on the CUDA stream `stream`.

    Args:
        described: shape and TensorRT type name of each input, in the order of `INPUTS`. The output has those of
            the first.
        inputs_at, output_at: device addresses.
    """
    from d2sd.plugins.cascade_attention.triton.launch import launch
    from d2sd.plugins.shared.dependent_launch import without_dependent_launch

    tensors = (_tensor(shape, kind, at) for (shape, kind), at in zip(described, inputs_at, strict=True))
    given = dict(zip(INPUTS[name], tensors, strict=True))
    out = _tensor(*described[0], output_at)
    # not ExternalStream: for the default stream's handle, 0, it creates a new stream
    theirs = torch.cuda.get_stream_from_external(stream, out.device)
    with torch.cuda.stream(theirs), without_dependent_launch():  # how TensorRT's own are launched is not known
        k_pages, v_pages, page_table, context_len = (given[part] for part in INPUTS[TREE][3:7])
        if "new_len" in given:
            # The new rows' K/V are written past the committed context before the block reads it; nothing is written
            # where `new_len` is 0. The runtime commits the same rows again later, so this write need not persist: if
            # TensorRT passed a copy of the pages, results would still be right.
            new_k, new_v, new_len = (given[part] for part in ("new_k", "new_v", "new_len"))
            steps = torch.arange(new_k.shape[1], device=out.device)
            places, keep = context_len[:, None] + steps, steps < new_len[:, None]
            write_pages.triton(new_k[None], new_v[None], k_pages[None], v_pages[None], page_table, places, keep)
            context_len = context_len + new_len
        context = PagedContext(k_pages, v_pages, page_table, context_len)
        q, k, v, mask = (given[part] for part in ("q", "k", "v", "attn_mask"))
        first, sinks = given.get("first"), given.get("sinks")
        launch(q, k, v, context, mask, first=first, sinks=sinks, out=out)


class _Memory:
    """CUDA array interface of memory that TensorRT owns."""

    def __init__(self, shape: tuple[int, ...], kind: str, address: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "version": 3,
        }


def _tensor(shape: tuple[int, ...], kind: str, address: int) -> Tensor:
    tensor = torch.as_tensor(_Memory(shape, _TYPES[kind], address), device="cuda")
    assert tensor.data_ptr() == address, "writes to a copy would be lost"
    return tensor.view(torch.bfloat16) if kind == "BF16" else tensor  # the interface has no bf16

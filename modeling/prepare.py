"""Prepares models for inference."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fused import fuse
from d2sd.modeling.native import pack


def prepare_for_inference(target: TargetModel, drafters: Iterable[DraftModel] = (), *, exact: bool = False) -> None:
    """Pack the layers of models on a CPU (`native.py`), or fuse those on CUDA (`fused.py`), in place.

    Afterwards they can serve, but not be saved or trained. Preparing twice is fine. `exact`: the target's step is
    batch-invariant on CUDA (docs/accuracy.md); compiled CPU layers always are.
    Raises `D2SDError` if `exact` cannot be had.
    """
    on_cpu = target.embed_tokens.weight.device.type == "cpu"
    if on_cpu:
        pack(target)
    else:
        if isinstance(target, Decoder):  # else it is TensorRT-LLM's, as are the process and its products
            sum_in_fp32()
        fuse(target, exact=exact)
    for drafter in drafters:
        (pack if on_cpu else fuse)(drafter, target if drafter.config.borrows_mlps else None)


def sum_in_fp32() -> None:
    """Let PyTorch's products on CUDA, of this process, keep all sums in fp32, and those of fp32 round nothing."""
    # PyTorch lets cuBLAS add the parts of a product that it splits in bf16 or fp16. It splits few rows and not many, so
    # that verification would round otherwise than plain decoding, and choose another token more often.
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_tf32 = False

"""Prepares models for inference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import nn

from d2sd.modeling.decoder import Decoder, TargetModel
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fused import fuse
from d2sd.modeling.inference import ServedModel
from d2sd.modeling.native import pack

Target = TypeVar("Target", bound=TargetModel)
Key = TypeVar("Key")


def prepare_for_inference(
    target: Target, drafters: Mapping[Key, DraftModel] | None = None, *, exact: bool = False, keep: bool = True
) -> tuple[Target, dict[Key, DraftModel]]:
    """Make models that serve of these: layers are packed on a CPU (`native.py`), fused on CUDA (`fused.py`).

    The given ones stay whole, and share what is not repacked. With `keep=False` they serve themselves, so that no
    weight is held twice. A model that serves already is returned as it is. `exact`: the target's step is
    batch-invariant on CUDA (docs/accuracy.md); compiled CPU layers always are.
    Raises `D2SDError` if `exact` cannot be had.
    """
    made: dict[int, nn.Module] = {}
    given = dict(drafters or {})
    if keep:
        target, given = _shell(target, made), {key: _shell(drafter, made) for key, drafter in given.items()}
    on_cpu = target.embed_tokens.weight.device.type == "cpu"
    if not on_cpu and isinstance(target, Decoder):  # else it is TensorRT-LLM's, as are the process and its products
        sum_in_fp32()
    if not target.served:
        pack(target) if on_cpu else fuse(target, exact=exact)
    for drafter in given.values():
        if not drafter.served:
            (pack if on_cpu else fuse)(drafter, target if drafter.config.borrows_mlps else None)
    target.served = True
    for drafter in given.values():
        drafter.served = True
    return target, given


Module = TypeVar("Module", bound=nn.Module)


def _shell(module: Module, made: dict[int, nn.Module]) -> Module:
    """A copy of a module, those below it and those it borrows, over the same tensors; `made` has the copies."""
    if isinstance(module, ServedModel) and module.served:
        return module
    if id(module) not in made:
        shell = made[id(module)] = copy.copy(module)
        fields = vars(shell)
        for kind in ("_parameters", "_buffers"):
            fields[kind] = dict(fields[kind])
        fields["_modules"] = {name: part and _shell(part, made) for name, part in fields["_modules"].items()}
        for name, value in fields.items():
            if isinstance(value, nn.Module):
                fields[name] = _shell(value, made)
            elif isinstance(value, tuple) and value and all(isinstance(part, nn.Module) for part in value):
                fields[name] = tuple(_shell(part, made) for part in value)
    return cast("Module", made[id(module)])


def sum_in_fp32() -> None:
    """Let PyTorch's products on CUDA, of this process, keep all sums in fp32, and those of fp32 round nothing."""
    # PyTorch lets cuBLAS add the parts of a product that it splits in bf16 or fp16. It splits few rows and not many, so
    # that verification would round otherwise than plain decoding, and choose another token more often.
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_tf32 = False

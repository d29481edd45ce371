"""Tensors on disk: safetensors only, strictly checked against the module that they are loaded into.

`headers.py` has what is known of them without reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from d2sd.convert.checkpoint.headers import (
    Rename,
    Shapes,
    check_headers,
    open_tensors,
    os_errors,
    read_headers,
    stored_as,
)
from d2sd.errors import CheckpointError
from d2sd.modeling.shard import Cut

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE: Mapping[str, Cut] = MappingProxyType({})


def expected_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `module` (usually built under `torch.device("meta")`) expects."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def read_tensors(
    directory: Path,
    expected: Shapes,
    dtype: torch.dtype,
    rename: Rename = lambda name: name,
    cuts: Mapping[str, Cut] = _WHOLE,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file name, {our name: tensor in `dtype`}) file by file, so that one shard at a time is in memory.

    Of tensors in `cuts`, by our names, that part alone is read. `check` is called before each tensor, and may raise.

    Quantized tensors are not converted; scales are in fp32. All headers are checked before the first file is read; NaN
    and infinities (of the source, or from the cast to fp16) and scales that are not positive are refused by name.
    """
    headers = read_headers(directory)
    names = check_headers(directory, headers, expected, rename)
    for file in sorted({info.file for info in headers.values()}):
        tensors: dict[str, Tensor] = {}
        with open_tensors(file) as handle:
            for name in sorted(n for n in names if headers[n].file == file):
                check()
                kind = stored_as(names[name], expected)
                part, shape = cuts.get(names[name]), expected[names[name]]
                tensor: Tensor = handle.get_tensor(name) if part is None else part.read(handle.get_slice(name))
                if kind in ("unquantized", "scale"):
                    tensor = tensor.to(dtype if kind == "unquantized" else torch.float32)
                check_values(tensor, kind, f"{file}: {name}")
                # The number of a scale may be stored with fewer or more axes of size 1.
                whole = shape if part is None else (*tensor.shape, *(1,) * (len(shape) - tensor.dim()))
                tensors[names[name]] = tensor.reshape(whole)
        yield file.name, tensors


def check_values(tensor: Tensor, kind: str, where: str) -> None:
    """Refuse NaN, infinities, and scales that are not positive, by name."""
    if not tensor.is_floating_point():
        return
    # min and max propagate NaN: one pass, and a copy for FP8 only, which lacks aminmax
    low, high = (tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor).aminmax()
    if not (low.isfinite() and high.isfinite()):
        raise CheckpointError("A tensor holds NaN or infinity.", where=where, expected=f"finite in {tensor.dtype}")
    if kind == "scale" and low <= 0:
        raise CheckpointError("A scale is not positive.", where=where, found=low.item())
    if kind == "FP8 scale" and low < 0:  # zero is that of a group of zeros
        raise CheckpointError("A scale is negative.", where=where, found=low.item())


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor as it is stored."""
    with open_tensors(file) as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors whose bytes depend on the tensors alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with os_errors(file):
        save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors creates 0600: other users than the builder read a bundle


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors into a module built on the meta device, and prepare it for inference."""
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    module.requires_grad_(False).eval()

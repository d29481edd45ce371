"""Tensors on disk: safetensors only, strictly checked against the module that will hold them.

Nothing here unpickles. Headers are read by hand, so that `--plan` reads no weights and
a truncated file is named as such.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from d2sd.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX = "model.safetensors.index.json"
_STORED = {"wide": ("F32", "BF16", "F16"), "FP8": ("F8_E4M3",), "scale": ("F32",)}

Shapes = Mapping[str, tuple[int, ...]]
#: Name in the file -> name in our module; None for tensors that carry nothing.
Rename = Callable[[str], "str | None"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def expected_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `module` (usually built under `torch.device("meta")`) wants."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def stored_as(name: str, expected: Shapes) -> str:
    """How a tensor of a module with the names `expected` is stored: "scale", "FP8" (it has a scale), or "wide"."""
    if name.endswith(("_scale", "_cache.scale")):
        return "scale"
    return "FP8" if f"{name}_scale" in expected else "wide"


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory, one file or sharded, without reading any data."""
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        pickled = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        if pickled:
            raise CheckpointError(
                "Pickle files are never opened: they can run code.",
                where=directory / pickled[0],
                expected="model.safetensors",
                fix="convert it with safetensors.torch.save_file on a machine that trusts it",
            )
        raise CheckpointError("No weights found.", where=directory, expected=f"model.safetensors or {INDEX}")
    return _read_sharded(directory, index)


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("The index of the shards is damaged.", where=index, found=repr(error)) from None
    found: dict[str, TensorInfo] = {}
    for name in files:
        if PurePath(name).name != name:
            raise CheckpointError("A shard lies outside its checkpoint.", where=index, found=name)
        found |= _read_header(directory / name)
    if found.keys() != weight_map.keys():
        odd = sorted(found.keys() ^ weight_map.keys())
        raise CheckpointError("The index and the shards disagree.", where=index, found=_some(odd))
    return found


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Parse one file's header: u64 length, JSON, data. Offsets count from the end of the JSON."""
    if not file.is_file():
        raise CheckpointError("A weight file is missing.", where=file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            if start.startswith((b"PK", b"\x80")):
                raise CheckpointError("Pickle files are never opened: they can run code.", where=file)
            raise CheckpointError("The safetensors file is truncated.", where=file, found=f"{size} bytes")
        text = stream.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("Not a safetensors file.", where=file, found=repr(error)) from None
    if end != size:
        raise CheckpointError(
            "The safetensors file is truncated or padded.", where=file, found=f"{size} bytes", expected=f"{end} bytes"
        )
    return tensors


def check_headers(directory: Path, found: Mapping[str, TensorInfo], expected: Shapes, rename: Rename) -> dict[str, str]:
    """Demand exactly the expected tensors. Return {name in the file: name in our module} of those to read."""
    names = {name: ours for name in found if (ours := rename(name)) is not None}
    missing = sorted(expected.keys() - names.values())
    unknown = sorted(name for name, ours in names.items() if ours not in expected)
    if missing or unknown:
        parts = [f"missing {_some(missing)}" if missing else "", f"unknown {_some(unknown)}" if unknown else ""]
        raise CheckpointError(
            "The tensors are not those of the configuration.", where=directory, found="; ".join(p for p in parts if p),
            fix="scales belong to FP8, which quantization_config or hf_quant_config.json must describe"
            if any(name.endswith("_scale") for name in unknown) else None,
        )  # fmt: skip
    for name, ours in names.items():
        info = found[name]
        if info.shape != expected[ours]:
            raise CheckpointError(
                "A tensor has the wrong shape.",
                where=f"{info.file}: {name}",
                found=list(info.shape),
                expected=list(expected[ours]),
            )
        allowed = _STORED[stored_as(ours, expected)]
        if info.dtype not in allowed:
            raise CheckpointError(
                "A tensor's type is not supported.",
                where=f"{info.file}: {name}",
                found=info.dtype,
                expected=" or ".join(allowed),
                fix="its quantization_config and hf_quant_config.json say what is FP8" if "F8" in info.dtype else None,
            )
    return names


def read_tensors(
    directory: Path, expected: Shapes, dtype: torch.dtype, rename: Rename = lambda name: name
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file name, {our name: tensor in `dtype`}) file by file, so that one shard at a time is in memory.

    FP8 tensors and their scales are given as they are. All headers are checked before the first file is read; NaN and
    infinities (of the source, or born in the cast to fp16) and scales that are not positive are refused by name.
    """
    found = read_headers(directory)
    names = check_headers(directory, found, expected, rename)
    for file in sorted({info.file for info in found.values()}):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as handle:
            for name in sorted(n for n in names if found[n].file == file):
                kind = stored_as(names[name], expected)
                tensor: Tensor = handle.get_tensor(name)
                tensor = tensor.to(dtype) if kind == "wide" else tensor
                _check_values(tensor, kind, f"{file}: {name}")
                tensors[names[name]] = tensor
        yield file.name, tensors


def _check_values(tensor: Tensor, kind: str, where: str) -> None:
    # NaN propagates through the extremes: one pass, no copy but of FP8, which has none
    least, most = (tensor.float() if kind == "FP8" else tensor).aminmax()
    if not (least.isfinite() and most.isfinite()):
        raise CheckpointError("A tensor holds NaN or infinity.", where=where, expected=f"finite in {tensor.dtype}")
    if kind == "scale" and least <= 0:
        raise CheckpointError("A scale is not positive.", where=where, found=least.item())


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor as it is stored."""
    with safe_open(file, framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors whose bytes depend on the tensors alone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, file, metadata={"format": "pt"})
    except SafetensorError as error:  # its I/O errors carry the number only in their text
        if f"os error {errno.ENOSPC}" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(file)) from None
        raise
    file.chmod(0o644)  # safetensors creates 0600: a bundle is read by other users than the one that built it


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module built on the meta device its tensors, ready for inference."""
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    module.requires_grad_(False).eval()


def _some(names: list[str]) -> str:
    """Name all, up to a screenful."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

"""Headers of safetensors: names, types and shapes, without their data and without PyTorch.

Pickles are never opened. Plans read no more than this.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from d2sd.errors import CheckpointError
from d2sd.io import open_regular, read_json

#: Bytes of a number in a recipe's precision.
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: How a tensor is stored -> its types in files, and bytes of a number in memory; None: of the model's type.
_STORED: dict[str, tuple[tuple[str, ...], int | None]] = {
    "unquantized": (("F32", "BF16", "F16"), None),
    "FP8": (("F8_E4M3",), 1),
    "FP4": (("U8",), 1),  # two numbers a byte
    "exponents": (("U8",), 1),
    "scale": (("F32", "BF16", "F16"), 4),
    "FP8 scale": (("F8_E4M3",), 1),
}
#: Last part of a tensor's name, another tensor of its layer where that decides, and how it is stored; the first row
#: that holds.
_KINDS: tuple[tuple[str, str | None, str], ...] = (
    ("weight", "weight_scale_2", "FP4"),
    ("weight", "weight_scale", "FP8"),
    ("weight", "weight_scale_inv", "FP8"),
    ("weight_packed", "weight_global_scale", "FP4"),
    ("weight_scale", "weight_scale_2", "FP8 scale"),
    ("weight_scale", "weight_global_scale", "FP8 scale"),
    ("blocks", "scales", "FP4"),
    ("scales", "blocks", "exponents"),
    *((name, None, "scale") for name in ("weight_scale_inv", "weight_scale_2")),
)

Shapes = Mapping[str, tuple[int, ...]]
#: Name in the file -> name in our module; None for tensors that are not needed.
Rename = Callable[[str], "str | None"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def stored_as(name: str, expected: Shapes) -> str:
    """How a tensor of a module with names `expected` is stored: a key of the table above."""
    stem, _, last = name.rpartition(".")
    for kind, other, stored in _KINDS:
        if last == kind and (other is None or f"{stem}.{other}" in expected):
            return stored
    return "scale" if name.endswith(("_scale", "_cache.scale")) else "unquantized"


def stored_bytes(name: str, expected: Shapes, itemsize: int) -> int:
    """Bytes in memory of a tensor of a module with names `expected`, whose plain numbers have `itemsize` bytes."""
    size = _STORED[stored_as(name, expected)][1]
    return math.prod(expected[name]) * (itemsize if size is None else size)


def has_weights(directory: Path) -> bool:
    """Whether a checkpoint directory holds files of weights, of a format that is read or not."""
    return any(path.suffix in (".safetensors", *_PICKLES) or path.name == INDEX for path in directory.iterdir())


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint directory, one file or sharded, without reading any data."""
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        pickled = sorted(p.name for p in directory.glob("*") if p.suffix in _PICKLES)
        if pickled:
            raise CheckpointError(
                "Pickle files are never opened: they can run code.",
                where=directory / pickled[0],
                expected="model.safetensors",
                fix="if you trust it, convert it with safetensors.torch.save_file",
            )
        raise CheckpointError("No weights found.", where=directory, expected=f"model.safetensors or {INDEX}")
    return _read_sharded(directory, index)


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorInfo]:
    values = read_json(index, error=CheckpointError)
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(
            "The index of the shards is damaged.",
            where=f"{index}: weight_map",
            found=weight_map,
            expected="names of tensors and of their files",
        )
    headers: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        if PurePath(name).name != name or "\0" in name:
            raise CheckpointError("A shard is outside its checkpoint.", where=index, found=ascii(name))
        headers |= read_header(directory / name)
    if headers.keys() != weight_map.keys():
        odd = sorted(headers.keys() ^ weight_map.keys())
        raise CheckpointError("The index and the shards disagree.", where=index, found=_some(odd))
    return headers


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of one file."""
    with open_tensors(file, "np") as handle:  # for "pt", torch reserves memory for the whole file
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118, not a mapping
        return {name: TensorInfo(file, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


@contextmanager
def open_tensors(file: Path, framework: Literal["pt", "np"] = "pt") -> Iterator[Any]:
    """Open a safetensors file: a handle of `safe_open`, which reads the header and maps the data.

    Raises `CheckpointError` where the file, or what is read inside the block, is missing, unreadable, damaged or
    truncated.
    """
    try:
        with _mapped(file, framework) as handle:
            yield handle
    except (SafetensorError, ValueError, OverflowError) as error:
        if _is_pickle(file):
            raise CheckpointError("Pickle files are never opened: they can run code.", where=file) from None
        raise CheckpointError("The safetensors file is damaged or truncated.", where=file, found=error) from None


def _mapped(file: Path, framework: Literal["pt", "np"]) -> Any:
    """Open a file by `safe_open`, whose own errors have no number, and call a file without permission missing."""
    try:
        open_regular(file).close()
    except FileNotFoundError:
        raise CheckpointError("A weight file is missing.", where=file) from None
    except OSError as error:
        raise CheckpointError("A weight file cannot be read.", where=file, found=error.strerror) from None
    try:
        return safe_open(file, framework=framework)
    except (OSError, RuntimeError) as error:  # of the mapping; torch raises RuntimeError
        raise CheckpointError(
            "A weight file cannot be mapped into memory.",
            where=file,
            found=error,
            fix="split it into shards of a few gigabytes, or use a machine with more memory",
        ) from None


def _is_pickle(file: Path) -> bool:
    """Whether a file that safetensors cannot read begins like a pickle, alone or in torch's archive.

    A safetensors header may begin with these bytes too; they are then its length, which does not exceed the file's.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
    return start.startswith((b"PK", b"\x80")) and int.from_bytes(start, "little") > file.stat().st_size


def check_headers(directory: Path, found: Mapping[str, TensorInfo], expected: Shapes, rename: Rename) -> dict[str, str]:
    """Require exactly the expected tensors. Return {name in the file: name in our module} of those to read."""
    names = {name: ours for name in found if (ours := rename(name)) is not None}
    if len(set(names.values())) < len(names):
        twice = sorted(name for name, ours in names.items() if list(names.values()).count(ours) > 1)
        raise CheckpointError("A tensor is there under two names.", where=directory, found=_some(twice))
    missing = sorted(expected.keys() - names.values())
    unknown = sorted(name for name, ours in names.items() if ours not in expected)
    if missing or unknown:
        parts = [f"missing {_some(missing)}" if missing else "", f"unknown {_some(unknown)}" if unknown else ""]
        raise CheckpointError(
            "The tensors are not those of the configuration.",
            where=directory,
            found="; ".join(p for p in parts if p),
            fix="scales belong to FP8 and the like, which quantization_config or hf_quant_config.json must describe"
            if any("scale" in name for name in unknown)
            else None,
        )
    for name, ours in names.items():
        info = found[name]
        if info.shape != expected[ours] and not _same_scales(info.shape, ours, expected):
            raise CheckpointError(
                "A tensor has the wrong shape.",
                where=f"{info.file}: {name}",
                found=list(info.shape),
                expected=list(expected[ours]),
            )
        allowed = _STORED[stored_as(ours, expected)][0]
        if info.dtype not in allowed:
            raise CheckpointError(
                "A tensor's type is not supported.",
                where=f"{info.file}: {name}",
                found=info.dtype,
                expected=" or ".join(allowed),
                fix="quantization_config or hf_quant_config.json must describe FP8 layers"
                if "F8" in info.dtype
                else None,
            )
    return names


def _same_scales(found: tuple[int, ...], name: str, expected: Shapes) -> bool:
    """Whether scales differ in axes of size 1 alone: compressed-tensors stores one scale as [1]."""
    plain = [[size for size in shape if size != 1] for shape in (found, expected[name])]
    return stored_as(name, expected) == "scale" and plain[0] == plain[1]


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Raise safetensors' write errors (a full disk, a quota, a failing device) as the `OSError` that they are."""
    try:
        yield
    except SafetensorError as error:  # has the errno only in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None


def _some(names: list[str]) -> str:
    """List up to 20 names."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")

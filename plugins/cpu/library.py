"""The compiled library: its structures and functions, and the packed form of weights.

Arguments are checked here: the library trusts its pointers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_double, c_int, c_long, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.cpu.compiler import build
from d2sd.plugins.cpu.memory import empty

# Shape letters: P panels, N outputs, K inputs.

#: Outputs a panel, as in linear.h.
PANEL = 32
#: Numbers of the types that weights may have, as in vector.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Head sizes that the attention takes: multiples of the first, up to the second.
HEAD_STEP, LARGEST_HEAD = 16, 512


class Linear(Structure):
    """`struct linear`."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("inputs", c_long), ("outputs", c_long), ("type", c_int)]


class Layer(Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "branch_norm", "sinks")),
        ("view", c_long),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
    ]


class Body(Structure):
    """`struct body`."""

    _fields_ = [
        *((name, c_long) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "type")),
        ("norm", c_void_p),
        ("layer", POINTER(Layer)),
        ("eps", c_double),
    ]


class Context(Structure):
    """`struct context`."""

    _fields_ = [
        *((name, c_long) for name in ("rows", "hidden", "layers", "heads", "head_dim", "type")),
        ("eps", c_double),
        ("product", POINTER(Linear)),
        *((name, c_void_p) for name in ("norm", "k_norm", "x", "cos", "sin", "input", "sums", "k", "v")),
    ]


class View(Structure):
    """`struct view`."""

    _fields_ = [
        ("mask", c_void_p), ("mask_batch", c_long), ("mask_row", c_long),
        ("first", c_void_p), ("table", c_void_p), ("table_width", c_long),
        ("cos", c_void_p), ("sin", c_void_p),
    ]  # fmt: skip


class Pass(Structure):
    """`struct pass`."""

    _fields_ = [
        ("batch", c_long), ("rows", c_long), ("starts", c_void_p),
        ("x", c_void_p),
        ("view", POINTER(View)), ("views", c_long),
        ("k_pages", POINTER(c_void_p)), ("v_pages", POINTER(c_void_p)), ("page_size", c_long),
        ("context", c_void_p), ("k", c_void_p), ("v", c_void_p),
        ("aux", c_void_p), ("aux_count", c_long), ("features", c_void_p), ("hidden", c_void_p),
        ("begin", c_long), ("end", c_long),
        ("from", c_long), ("joined", POINTER(Layer)), ("own", c_long),
    ]  # fmt: skip


class OpenMP(Structure):
    """`struct openmp`."""

    _fields_ = [(name, c_void_p) for name in ("parallel", "barrier", "thread", "threads")]


class Memory(Structure):
    """`struct memory`."""

    _fields_ = [("at", c_void_p), ("bytes", c_size_t)]


@cache
def load() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    built = build()
    if not isinstance(built, Path):
        return built
    try:
        library = ctypes.CDLL(str(built))
        _declare(library)
    except (OSError, AttributeError) as error:  # not a library, or not ours
        return str(error)
    library.d2sd_use_openmp(byref(_openmp()))
    # A forked child has none of OpenMP's threads, and would wait for them forever.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Give every function its types; raises AttributeError for one that the library lacks."""
    types: dict[str, list[Any] | None] = {
        "layers": [POINTER(Body), POINTER(Pass), POINTER(Memory), c_int],
        "linear": [POINTER(Linear), c_void_p, c_long, c_long, c_void_p, c_long, c_int],
        "attend": [POINTER(Body), POINTER(Pass), c_void_p, c_void_p, POINTER(Memory), c_int],
        "keys_values": [POINTER(Context), c_int],
        "free": [POINTER(Memory)],
        "use_openmp": [POINTER(OpenMP)],
        "argmax": [c_void_p, c_long, c_long, c_void_p],
        "delta_rule": [c_void_p, c_int],
        "convolution": [c_void_p, c_int],
        "likeliest": [c_void_p, c_int],
        "condition": [c_void_p, c_int],
        **dict.fromkeys(("grow", "accept", "write_pages")),  # their callers convert the arguments
    }
    for name, arguments in types.items():
        function = getattr(library, f"d2sd_{name}")
        function.argtypes, function.restype = arguments, None


def _openmp() -> OpenMP:
    """The functions of the OpenMP that PyTorch has loaded: GNU's, or another's with its interface. Zeros: not found."""
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    if not all(hasattr(process, name) for name in names):
        return OpenMP()
    return OpenMP(*(ctypes.cast(getattr(process, name), c_void_p) for name in names))


def available() -> bool:
    """Whether the kernels can be used on this machine."""
    return isinstance(load(), ctypes.CDLL)


def name() -> str | None:
    """The name of the library's file, a hash of its sources, compiler and processor; None if it is not `available`."""
    return Path(functions()._name).name if available() else None


def functions() -> ctypes.CDLL:
    """The library, where it is `available`."""
    library = load()
    assert isinstance(library, ctypes.CDLL), library
    return library


def addresses(of: Sequence[int]) -> Array[c_void_p]:
    """An array of addresses for a C function."""
    return (c_void_p * len(of))(*of)


def address(tensor: Tensor | None) -> int | None:
    """Address of a contiguous CPU tensor's data."""
    if tensor is None:
        return None
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def in_panels(weight: Tensor) -> Tensor:
    """[N, K] -> [P, K, 32], or [P, ceil(K / 2), 32, 2] for bf16; missing outputs and inputs are zeros."""
    outputs, inputs = weight.shape
    pairs = weight.dtype == torch.bfloat16
    padded = F.pad(weight.detach(), (0, inputs % 2 if pairs else 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, padded.shape[1] // 2, 2) if pairs else padded.view(-1, PANEL, inputs)
    panels = panels.transpose(1, 2)
    return empty(tuple(panels.shape), panels.dtype).copy_(panels)


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer in panels."""

    weight: Tensor  # of `in_panels`
    bias: Tensor | None  # [outputs] fp32, padded
    outputs: int  # without padding
    inputs: int

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [N, K] in a type of `TYPES`, bias [N]."""
        padded = None if bias is None else F.pad(bias.detach().float(), (0, -len(bias) % PANEL)).contiguous()
        return PackedLinear(in_panels(weight), padded, *weight.shape)

    @property
    def struct(self) -> Linear:
        """For the library; `self` must outlive it."""
        panels, depth = self.weight.shape[:2]
        depth *= 2 if self.weight.dtype == torch.bfloat16 else 1
        return Linear(address(self.weight), address(self.bias), depth, panels * PANEL, TYPES[self.weight.dtype])

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] in any type -> x Wᵀ + b, [..., N] fp32. bf16 layers round x to bf16."""
        assert x.shape[-1] == self.inputs
        pairs = self.weight.dtype == torch.bfloat16
        rows = x.reshape(-1, self.inputs).to(torch.bfloat16 if pairs else torch.float32)
        rows = F.pad(rows, (0, self.inputs % 2)) if pairs and self.inputs % 2 else rows.contiguous()
        out = torch.empty(len(rows), self.outputs)
        functions().d2sd_linear(
            byref(self.struct),
            address(rows),
            rows.shape[1],
            len(rows),
            address(out),
            self.outputs,
            torch.get_num_threads(),
        )
        return out.view(*x.shape[:-1], self.outputs)

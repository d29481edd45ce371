"""Selects the implementation of an op: its Triton kernel, the compiled CPU library, or its PyTorch reference.

CPU tensors take the compiled library where it has the op, else the reference. CUDA tensors take the kernel. Where a
CUDA device cannot run it, the reference runs and a warning is logged once; under `D2SD_NO_FALLBACK=1` that is an
error, so that no benchmark measures it.
"""

# Triton has no types, and may be missing where a user's type checker follows these sources.
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from functools import cache, cached_property, update_wrapper
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from packaging.version import Version

from d2sd.errors import D2SDError
from d2sd.extras import install_line
from d2sd.plugins.cpu import library as compiled
from d2sd.plugins.head_sizes import HEAD_STEP, LARGEST_HEAD, LARGEST_UNFUSED

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Types of queries, and of pages that are not FP8.
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Older devices have neither FP8 tensor cores nor an instruction that converts from E4M3.
FP8_CAPABILITY = (8, 9)
#: Major compute capabilities with grouped products in CUTLASS (`aten/src/ATen/native/cuda/GroupedBlas.cpp`), which
#: align rows to 16 bytes.
GROUPED_CAPABILITIES, GROUPED_STEP = (9, 10), 8
#: The one generation whose products of FP8 with fp32 scales of blocks PyTorch calls, and the block.
BLOCK_GEMM_CAPABILITY, _BLOCK = (9, 0), 128
#: The first with FP4 tensor cores.
FP4_CAPABILITY = (10, 0)
#: Triton before this leaves out a fence between cp.async and wgmma (its pull request 9610): the attention kernel reads
#: keys and values that may not have arrived. tests/ptx shows it. Devices before Hopper have no such instructions.
FENCED_TRITON = Version("3.7.1")
FENCE_CAPABILITY = (9, 0)
#: The first PyTorch whose wheels for CUDA pin a Triton that has it: 2.12.1 pins 3.7.1, older ones an older one exactly.
FENCED_TORCH = Version("2.12.1")
NO_FALLBACK = "D2SD_NO_FALLBACK"


class NoKernel(D2SDError):
    """A CUDA device would run no kernel, under `D2SD_NO_FALLBACK=1`; `found` has the reason."""


class Implementation(Enum):
    """An implementation that runs an op."""

    TRITON = "the kernels of its folder triton/"
    LIBRARY = "its cpu.py, over the compiled library of d2sd.plugins.cpu"
    REFERENCE = "its specification in PyTorch"


#: Names of their own: to look one up in the class takes as long as a call.
TRITON, LIBRARY, REFERENCE = Implementation


def pick(
    op: str,
    x: torch.Tensor,
    *,
    pages: bool = False,
    loaded: bool = False,
    reason: str | None = None,
    library: bool = False,
) -> Implementation:
    """The implementation of `op` over tensors like `x`: how every op of d2sd.plugins chooses.

    Args:
        op: what falls back, for the report.
        pages: x is K/V pages [..., D], of which the kernel takes some head sizes and types.
        loaded: the device was checked when the model was loaded (`use_fused_layers`), so that CUDA is the kernel.
        reason: why the kernel does not take this call.
        library: whether the compiled library has this op and takes this call.

    Raises:
        NoKernel: a CUDA device runs no kernel, under `D2SD_NO_FALLBACK=1`.
    """
    if use_kernels(op, x, pages=pages, loaded=loaded, reason=reason):
        return TRITON
    if library and x.is_cpu and compiled.available():  # `device.type` makes a string, which costs six times as much
        return LIBRARY
    return REFERENCE


#: Every op that was imported, by folder and name.
OPS: dict[str, Op[..., Any]] = {}


class Op(Generic[P, R]):
    """An op as its specification declares it: a call runs what is picked for its arguments."""

    def __init__(
        self,
        reference: Callable[P, R],
        what: str,
        launcher: str,
        of: str | None,
        picked: Callable[..., Implementation] | None,
        loaded: bool,
        library: bool,
    ) -> None:
        update_wrapper(self, reference)
        self.reference, self.what = reference, what
        self.folder, self.name = reference.__module__.split(".")[2], reference.__name__
        self._launcher, self._of, self._picked, self._loaded, self._library = launcher, of, picked, loaded, library
        OPS[f"{self.folder}.{self.name}"] = self

    @cached_property
    def triton(self) -> Callable[P, R]:
        """The launcher of its kernels; imported when it first runs."""
        return self._found(f"triton.{self._launcher}")

    @cached_property
    def cpu(self) -> Callable[P, R]:
        """The call of the compiled library."""
        return self._found("cpu")

    def _found(self, module: str) -> Callable[P, R]:
        found: Callable[P, R] = getattr(import_module(f"d2sd.plugins.{self.folder}.{module}"), self.name)
        return found

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._picked is None:
            x: Any = args[0]
            x = x if self._of is None else getattr(x, self._of)
            picked = pick(self.what, x, loaded=self._loaded, library=self._library)
        else:
            picked = self._picked(*args, **kwargs)
        if picked is TRITON:
            return self.triton(*args, **kwargs)
        return self.cpu(*args, **kwargs) if picked is LIBRARY else self.reference(*args, **kwargs)


def op(
    what: str,
    *,
    launcher: str = "launch",
    of: str | None = None,
    picked: Callable[..., Implementation] | None = None,
    loaded: bool = False,
    library: bool = False,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of its specification, whose signature and documentation it has.

    The others have its name: in its folder, the function of `cpu.py` calls the compiled library, and that of
    `triton/launch.py` launches kernels.

    Args:
        what: the `op` of `pick`.
        launcher: the file in `triton/`, if another.
        of: the field of the first argument by which `pick` chooses, unless that is a tensor.
        picked: chooses by the arguments of a call, in place of `pick`.
        loaded, library: as of `pick`.
    """
    return lambda reference: Op(reference, what, launcher, of, picked, loaded, library)


def use_kernels(
    op: str, x: torch.Tensor, *, pages: bool = False, loaded: bool = False, reason: str | None = None
) -> bool:
    """Whether `pick` takes the kernels; arguments as there."""
    if not x.is_cuda:
        return False
    if loaded:
        return True
    capability = torch.cuda.get_device_capability(x.device)
    reason = reason or (unsupported(x.shape[-1], x.dtype, capability) if pages else _unsupported_device(capability))
    return reason is None or _fall_back(op, reason)


def use_fp8_gemm(x: torch.Tensor) -> bool:
    """Whether FP8 linear layers multiply FP8 by FP8 for this input, rather than the same values in a wider type.

    Raises `NoKernel` for a CUDA device without FP8 tensor cores, under `D2SD_NO_FALLBACK=1`.
    """
    if x.device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(x.device)
    if capability >= FP8_CAPABILITY:
        return True
    return _fall_back("FP8 matrix multiplication", f"it needs compute capability 8.9, this is {capability}")


def use_grouped_products(x: torch.Tensor, *shapes: torch.Size) -> bool:
    """Whether products of experts of these shapes [X, N, K] with rows like `x` are PyTorch's grouped products.

    On devices before and after Hopper and Blackwell those read the groups' sizes on the host, and elsewhere than in
    bf16 too: a CUDA graph cannot capture that.
    Raises `NoKernel` for a CUDA device without them, under `D2SD_NO_FALLBACK=1`.
    """
    capability = torch.cuda.get_device_capability(x.device)
    reason = None
    if capability[0] not in GROUPED_CAPABILITIES:
        reason = f"it needs compute capability 9.0 or 10.0, this is {capability}"
    elif x.dtype != torch.bfloat16:
        reason = f"it needs bf16, this is {x.dtype}"
    elif any(size % GROUPED_STEP for shape in shapes for size in shape[1:]):
        reason = f"it needs sizes that are multiples of {GROUPED_STEP}"
    return reason is None or _fall_back("grouped products of experts", reason)


def use_block_gemm(x: torch.Tensor, inputs: int, outputs: int) -> bool:
    """Whether FP8 linear layers with scales of 128 × 128 blocks multiply FP8 by FP8 for this input, as `use_fp8_gemm`.

    Raises `NoKernel` for a CUDA device or a layer for which PyTorch has no such product, under `D2SD_NO_FALLBACK=1`.
    """
    if x.device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(x.device)
    what, reason = "FP8 matrix multiplication with scales of blocks", None
    if capability != BLOCK_GEMM_CAPABILITY:
        reason = f"PyTorch has it for compute capability 9.0 alone, this is {capability}"
    elif inputs % _BLOCK or outputs % _BLOCK:
        reason = f"a layer [{outputs}, {inputs}] is not of whole blocks of {_BLOCK}"
    return reason is None or _fall_back(what, reason)


def require_fp4_gemm(device: torch.device) -> None:
    """Raise `D2SDError` for a CUDA device without FP4 tensor cores: carrying FP4 there would be slower than 16 bits."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device)) >= FP4_CAPABILITY:
        return
    raise D2SDError(
        "This GPU has no product for NVFP4.",
        where=str(device),
        found=f"compute capability {capability}",
        expected=f"{FP4_CAPABILITY} or higher",
        fix="build with `target.dequantize: true`, or from an FP8 checkpoint of this model",
    )


def use_fused_layers(weight: torch.Tensor, size: int, *, fp8: bool, unlike: str | None) -> bool:
    """Whether a model's layers run as the fused kernels of `d2sd.plugins.layer_ops`; asked when it is loaded.

    `weight` is one of its weights that is not FP8, `size` its head size; `fp8`: it has FP8 layers or K/V. `unlike` says
    why its layers cannot be joined.
    Raises `NoKernel` for a CUDA model that the kernels do not take, under `D2SD_NO_FALLBACK=1`.
    """
    if weight.device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(weight.device)
    if fp8 and capability < FP8_CAPABILITY:
        unlike = f"FP8 layers need compute capability 8.9, this is {capability}"
    if size > LARGEST_HEAD:
        unlike = f"head size {size} is above {LARGEST_HEAD}"
    reason = unsupported(size, weight.dtype, capability) or unlike
    return reason is None or _fall_back("unfused layers", reason)


def _fall_back(what: str, reason: str) -> bool:
    """False, after a warning; raises `D2SDError` where falling back is forbidden."""
    if os.environ.get(NO_FALLBACK) == "1":
        raise NoKernel(
            f"{what[0].upper()}{what[1:]} would run as plain PyTorch on this GPU.",
            where=f"{NO_FALLBACK}=1",
            found=reason,
            fix=f"unset {NO_FALLBACK} to run it that way, slower",
        )
    _warn_once(what, reason)
    return False


@cache
def unsupported(size: int, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not take heads of `size` in pages of `dtype`; None where they do."""
    if find_spec("triton") is None:
        return f"triton is not installed ({install_line('triton')})"
    if capability >= FENCE_CAPABILITY and (version := triton_version()) < FENCED_TRITON:
        return (
            f"triton {version} leaves out a fence that the attention kernel needs on compute capability 9.0 and above:"
            f" results may be wrong ({_newer_triton()})"
        )
    largest = LARGEST_UNFUSED if dtype in (torch.bfloat16, torch.float16) else LARGEST_HEAD
    if size % HEAD_STEP or not 0 < size <= largest:
        return f"head size {size} is not a multiple of {HEAD_STEP} up to {largest}"
    if dtype == torch.float8_e4m3fn:
        return None if capability >= FP8_CAPABILITY else f"FP8 pages need compute capability 8.9, this is {capability}"
    if dtype not in TYPES:
        return f"pages of {dtype}"
    return _unsupported_device(capability)


@cache
def _unsupported_device(capability: tuple[int, int]) -> str | None:
    if find_spec("triton") is None:
        return f"triton is not installed ({install_line('triton')})"
    return None if capability >= (8, 0) else f"compute capability {capability} is below 8.0"


def _newer_triton() -> str:
    """The command that replaces a Triton that is refused. An older PyTorch pins its own exactly: pip takes another by
    force alone.
    """
    pinned = Version(torch.__version__) < FENCED_TORCH
    return f"pip install --no-deps triton=={FENCED_TRITON}" if pinned else f"pip install 'triton>={FENCED_TRITON}'"


def triton_version() -> Version:
    """Version of the installed package, whatever distribution brought it."""
    try:
        return Version(metadata.version("triton"))
    except metadata.PackageNotFoundError:
        import triton

        return Version(triton.__version__)


@cache
def _warn_once(what: str, reason: str) -> None:
    logger.warning("%s runs as plain PyTorch on this GPU: %s", what, reason)

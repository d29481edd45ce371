"""Checks that an engine can run on this machine, with an error and its fix for each, and opens it.

An engine is tied to one TensorRT version, to one or several GPU architectures, and to the ABI of d2sd's plugins. The
bundle's metadata is compared first, because TensorRT's own errors are less specific. **Not yet run** on a GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from d2sd.errors import BundleError
from d2sd.plugins.cascade_attention.onnx import VERSION
from d2sd.plugins.cascade_attention.tensorrt.plugin import register
from d2sd.runtime.backends.exported import IOSpec
from d2sd.tensorrt_env import COMPUTE, NATIVE, PORTABLE, Builder, ErrorLog, TensorRT

#: Input -> min, opt and max shape.
Profile = Mapping[str, tuple[list[int], list[int], list[int]]]
#: Types of our graphs, by TensorRT's names.
TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32}
_AGAIN = "build the bundle again"


@dataclass(frozen=True, slots=True)
class EngineFile:
    """An engine of a bundle, with its metadata from the manifest."""

    path: Path
    builder: Builder
    version: str  # of the builder
    plugin_abi: str
    compute: str  # of COMPUTE, "portable" or "native"
    profiles: Sequence[Profile]  # entry i is the engine's optimisation profile i


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that engines are opened on."""

    name: torch.device
    capability: tuple[int, int]


def this_device(file: Path) -> Device:
    """PyTorch's current GPU. Raises `BundleError` if there is none; `file` is the engine to run."""
    if not torch.cuda.is_available():
        raise BundleError(
            "Engines need an NVIDIA GPU, and PyTorch finds none.",
            where=file,
            fix="serve the bundle with PyTorch, or install a CUDA build of torch and the driver",
        )
    index = torch.cuda.current_device()
    return Device(torch.device("cuda", index), torch.cuda.get_device_capability(index))


def incompatibility(compute: str, capability: tuple[int, int]) -> str | None:
    """The compute capability an engine built for `compute` needs, if it differs from `capability`; else None.

    Portable engines are left to TensorRT-RTX, which documents 8.0, 8.6, 8.9, 12.0 and later; on 9.0 (H100, H200),
    which its builder does not list, they have **not been run**. Native engines are left to classic TensorRT.
    """
    if compute in (PORTABLE, NATIVE) or compute == "sm{}{}".format(*capability):
        return None
    digits = compute.removeprefix("sm")
    return f"{digits[:-1]}.{digits[-1:]}"


def check_compatible(trt: TensorRT, engine: EngineFile, capability: tuple[int, int]) -> None:
    """Raise `BundleError` if the engine's metadata does not match the installed plugins, TensorRT or GPU."""
    if engine.plugin_abi != VERSION:
        raise BundleError(
            "Plugin ABI mismatch.",
            where=engine.path,
            found=f"plugin ABI {engine.plugin_abi}",
            expected=VERSION,
            fix=_AGAIN,
        )
    # Both TensorRTs document that an engine runs only with the version that built it, unless built version-compatible.
    if (engine.builder, engine.version) != (trt.name, trt.version):
        raise BundleError(
            "The engine was built by another TensorRT than the installed one.",
            where=engine.path,
            found=f"{engine.builder} {engine.version}",
            expected=f"{trt.name} {trt.version}",
            fix=f"{_AGAIN}, or install {engine.builder} {engine.version}",
        )
    for_others = incompatibility(engine.compute, capability)
    if for_others is not None:
        raise BundleError(
            "The engine was built for another GPU.",
            where=engine.path,
            found=f"compute capability {for_others}",
            expected=_spelled(capability),
            fix=_elsewhere(trt, capability),
        )


def open_engine(trt: TensorRT, engine: EngineFile, errors: ErrorLog, capability: tuple[int, int]) -> tuple[Any, Any]:
    """TensorRT's runtime and engine. Raises `BundleError` with TensorRT's errors if it cannot load the file."""
    if not engine.path.is_file() or not engine.path.stat().st_size:
        raise BundleError("The engine is missing.", where=engine.path, fix=_AGAIN)
    register(trt.module)
    runtime = trt.module.Runtime(errors.log)
    with engine.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        if hasattr(runtime, "get_engine_validity"):  # TensorRT-RTX alone
            validity, reasons = runtime.get_engine_validity(blob)
            if validity == trt.module.EngineValidity.INVALID:
                kinds = trt.module.EngineInvalidityDiagnostics.__members__.items()
                named = ", ".join(name for name, bit in kinds if int(bit) & int(reasons))
                of_others = "UNSUPPORTED_CC" in named
                raise BundleError(
                    f"{trt.name} cannot run the engine on this GPU.",
                    where=engine.path,
                    found=named or errors.drain(),
                    expected=f"an engine for {_spelled(capability)}" if of_others else None,
                    fix=_elsewhere(trt, capability) if of_others else None,
                )
        opened = runtime.deserialize_cuda_engine(blob)
    if opened is None:
        raise BundleError(f"{trt.name} cannot open the engine.", where=engine.path, found=errors.drain(), fix=_AGAIN)
    return runtime, opened


def check_io(trt: TensorRT, engine: EngineFile, opened: Any, surface: IOSpec) -> None:
    """Raise `BundleError` if the engine's I/O tensors are not those of `surface`."""
    expected = {("input", *item) for item in surface.inputs.items()} | {
        ("output", *item) for item in surface.outputs.items()
    }
    actual: set[tuple[Any, ...]] = set()
    for name in map(opened.get_tensor_name, range(opened.num_io_tensors)):
        side = "input" if opened.get_tensor_mode(name) == trt.module.TensorIOMode.INPUT else "output"
        kind = str(opened.get_tensor_dtype(name)).rpartition(".")[2]
        actual.add((side, name, TYPES.get(kind, kind)))
    if actual != expected:
        raise BundleError(
            "Engine I/O tensors do not match this version of d2sd.",
            where=engine.path,
            found=_listed(actual - expected),
            expected=_listed(expected - actual),
            fix=_AGAIN,
        )
    if opened.num_optimization_profiles != len(engine.profiles):
        raise BundleError(
            "The number of optimisation profiles differs from the manifest.",
            where=engine.path,
            found=opened.num_optimization_profiles,
            expected=len(engine.profiles),
            fix=_AGAIN,
        )


def _listed(tensors: set[tuple[Any, ...]]) -> str:
    return ", ".join(sorted(" ".join(map(str, tensor)) for tensor in tensors)) or "nothing else"


def _spelled(capability: tuple[int, int]) -> str:
    return "compute capability {}.{}".format(*capability)


def _elsewhere(trt: TensorRT, capability: tuple[int, int]) -> str:
    name = "sm{}{}".format(*capability)
    if NATIVE in trt.targets:
        return f"{_AGAIN} on this machine"
    if name in COMPUTE:
        return f"{_AGAIN} with engines.compute: [{name}]"
    return f"serve the bundle with PyTorch: {trt.name} cannot build for {name}, and portable engines are untested there"

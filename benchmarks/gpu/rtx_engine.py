"""One engine of TensorRT-RTX, built or tried step by step.

python -m benchmarks.gpu.rtx_engine build FOLDER          for capabilities and for none of them, without a GPU
python -m benchmarks.gpu.rtx_engine run ENGINE|current    a line of JSON a step, so that a crash loses none before it
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import said
from d2sd.extras import install_line

#: The module of the wheel, and the one that is left when only the libraries and their bindings are carried.
MODULES = ("tensorrt_rtx", "tensorrt_rtx_bindings")
PORTABLE, CURRENT = "portable", "current"
PREBUILT = (PORTABLE, "sm80", "sm89", "sm120")
ROWS, INNER, COLUMNS = 64, 256, 128


def tensorrt() -> Any:
    """The module; leaves the process where there is none."""
    name = next((name for name in MODULES if find_spec(name)), None)
    if name is None:
        sys.exit(f"TensorRT-RTX is not importable: {install_line('engines')}")
    return importlib.import_module(name)


def build(trt: Any, log: Any, target: str) -> bytes:
    """A serialized engine of a [64, 256] · b [256, 128] in fp16 for "sm80" ..., "portable" or "current"."""
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    a, b = (
        network.add_input(name, trt.float16, shape) for name, shape in (("a", (ROWS, INNER)), ("b", (INNER, COLUMNS)))
    )
    none = trt.MatrixOperation.NONE
    out = network.add_matrix_multiply(a, none, b, none).get_output(0)
    out.name = "out"
    network.mark_output(out)
    config = builder.create_builder_config()
    if target != PORTABLE:
        config.num_compute_capabilities = 1
        assert config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise RuntimeError("the builder gave no engine")
    return bytes(made)


class Steps:
    """Prints what every step gave or said; the process ends at one that fails and is needed by the next."""

    def __init__(self, messages: list[str]) -> None:
        self._messages = messages  # errors that TensorRT-RTX logs, as they come

    def __call__(self, name: str, act: Callable[[], Any], needed: bool = True) -> Any:
        self._messages.clear()
        begun, result, raised = time.perf_counter(), None, []
        try:
            result = act()
        except Exception as error:
            raised = [said(error)]
        fine = result is not None
        words = " | ".join([*raised, *self._messages]) or ("" if fine else "gave nothing")
        found = str(result) if isinstance(result, (str, float)) else ""
        line = {"step": name, "ok": fine, "said": words[:500], "found": found}
        print(json.dumps(line | {"seconds": round(time.perf_counter() - begun, 3)}), flush=True)
        if needed and not fine:
            sys.exit(0)
        return result


def run(engine: str) -> None:
    """All steps of an engine file, or of one built for the device that is here."""
    trt, messages = tensorrt(), list[str]()
    step, log = Steps(messages), collecting_log(trt, messages)
    step("driver", _driver, needed=False)
    data = step("build", lambda: build(trt, log, CURRENT)) if engine == CURRENT else Path(engine).read_bytes()
    runtime = step("runtime", lambda: trt.Runtime(log))
    step("validity", partial(_validity, runtime, data), needed=False)
    loaded = step("deserialize", lambda: runtime.deserialize_cuda_engine(data))
    context = step("context", loaded.create_execution_context)
    step("execute", lambda: _execute(context))


def collecting_log(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps errors."""

    def log(_: Any, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            messages.append(message)

    return type("Log", (trt.ILogger,), {"__init__": lambda self: trt.ILogger.__init__(self), "log": log})()


def _driver() -> str:
    """Compute capability, driver's CUDA version, asked of libcuda itself."""
    import ctypes

    cuda, number, both = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), list[int]()
    if result := cuda.cuInit(0):
        raise RuntimeError(f"cuInit gives {result}")
    for attribute in (75, 76):  # major, minor
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        both.append(number.value)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    return f"compute capability {both[0]}.{both[1]}, CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def _validity(runtime: Any, data: bytes) -> str:
    validity, why = runtime.get_engine_validity(data)
    if "INVALID" in str(validity):
        raise RuntimeError(f"{validity}, diagnostics {why}")
    return f"{validity}, diagnostics {why}"


def _execute(context: Any) -> float:
    """Relative error of the product against fp32; raises where it is one of no fp16 product."""
    import torch

    a, b = (torch.randn(shape, device="cuda").half() for shape in ((ROWS, INNER), (INNER, COLUMNS)))
    out = torch.full((ROWS, COLUMNS), torch.nan, device="cuda", dtype=torch.float16)
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        assert context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    assert context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    expected = a.double() @ b.double()
    error = float((out.double() - expected).norm() / expected.norm())
    if not error < 2e-3:
        raise RuntimeError(f"relative error {error}")
    return error


def main(arguments: list[str]) -> None:
    verb, where = arguments
    if verb == "run":
        run(where)
        return
    trt, folder = tensorrt(), Path(where)
    folder.mkdir(parents=True, exist_ok=True)
    log = trt.Logger(trt.Logger.ERROR)
    for name in PREBUILT:
        size = (folder / f"{name}.engine").write_bytes(build(trt, log, name))
        print(name, size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])

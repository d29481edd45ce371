"""Makes a model runner for a bundle: PyTorch modules, graphs in ONNX Runtime, or TensorRT engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from d2sd.errors import BundleError, D2SDError

if TYPE_CHECKING:
    from d2sd.convert.bundle.load import Bundle
    from d2sd.manifest import Engines
    from d2sd.modeling.drafter import Drafter
    from d2sd.runtime.backends.model_runner import ModelRunner

BackendName = Literal["torch", "onnx", "tensorrt"]
#: Names of the models' folders, graphs and engines.
MODELS = ("target", "drafter_first", "drafter_second")


def make_runner(
    bundle: Bundle, drafters: Sequence[Drafter], name: BackendName, device: str, *, flex: bool = False
) -> ModelRunner:
    """Make a runner of the target and `drafters`: none, the first, or both drafters of the bundle; FlexDraft if asked.

    Raises `BundleError` if the bundle has no graphs or engines or they cannot run on this machine, `BuildError` if
    TensorRT is not installed.
    """
    from d2sd.runtime.backends.model_runner import ModelRunner

    if name == "torch":
        check_device(device)
        first, second = (*(drafter.to(device) for drafter in drafters), None, None)[:2]
        head = bundle.flex.to(device) if flex and bundle.flex is not None else None
        size = bundle.recipe.tree.block_size
        return ModelRunner(
            bundle.target.to(device), first, second, flex=head, block_size=size, exact=bundle.recipe.exact
        )
    if flex:
        raise BundleError(
            "FlexDraft has neither graphs nor engines: PyTorch runs it.", where=bundle.path, found=name,
            fix="serve it with --executor torch, or choose another policy",
        )  # fmt: skip
    built = bundle.manifest.engines
    if built is None:
        raise BundleError(
            "The bundle has neither graphs nor engines.", where=bundle.path,
            fix="build it with --set 'engines={compute: [portable]}', or serve it with --executor torch",
        )  # fmt: skip
    if name == "onnx":
        return _onnx(bundle, drafters)
    return _tensorrt(bundle, drafters, built)


def check_device(device: str) -> None:
    """Raise `D2SDError` unless `device` is cpu, cuda, or cuda:N with a GPU of that number."""
    import torch

    gpus = torch.cuda.device_count()
    number = re.fullmatch(r"cuda(?::([0-9]{1,3}))?", device)
    if device != "cpu" and (number is None or int(number[1] or 0) >= gpus):
        raise D2SDError(
            "No such device.", where="device", found=repr(device),
            expected=", ".join(["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]),
            fix="choose one of these" if gpus else "use cpu: PyTorch finds no CUDA GPU on this machine",
        )  # fmt: skip


def _onnx(bundle: Bundle, drafters: Sequence[Drafter]) -> ModelRunner:
    from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, OnnxSession
    from d2sd.runtime.backends.model_runner import ModelRunner

    recipe = bundle.recipe
    if recipe.precision == "bf16":
        raise BundleError(
            "ONNX Runtime does not support bf16 on CPUs.", where=f"{bundle.path}: precision",
            fix="build the bundle in fp16 or fp32, or serve it with --executor torch",
        )  # fmt: skip
    sessions = [OnnxSession(bundle.path / "onnx" / f"{model}.onnx") for model in MODELS[: 1 + len(drafters)]]
    graphs = [GraphDrafter(d, s, recipe.limits.page_size) for d, s in zip(drafters, sessions[1:], strict=True)]
    aux_layer_ids = bundle.first.config.target_layer_ids if bundle.first else ()
    return ModelRunner(
        GraphDecoder(bundle.target, aux_layer_ids, sessions[0]), *graphs, block_size=recipe.tree.block_size
    )


def _tensorrt(bundle: Bundle, drafters: Sequence[Drafter], built: Engines) -> ModelRunner:
    from d2sd.runtime.backends.tensorrt import engine_runner
    from d2sd.runtime.backends.tensorrt_checks import EngineFile, this_device
    from d2sd.tensorrt_env import find_tensorrt

    trt, folder = find_tensorrt(built.builder), bundle.path / "engines"
    capability = this_device(folder).capability
    compute = choose_compute(built.compute, capability, folder)
    files = [
        EngineFile(
            folder / compute / f"{model}.engine", built.builder, built.version, built.plugin_abi, compute,
            built.profiles[model],
        )
        for model in MODELS[: 1 + len(drafters)]
    ]  # fmt: skip
    recipe = bundle.recipe
    aux_layer_ids = bundle.first.config.target_layer_ids if bundle.first else ()
    return engine_runner(
        trt,
        (bundle.target, files[0]),
        *zip(drafters, files[1:], strict=True),
        aux_layer_ids=aux_layer_ids,
        page_size=recipe.limits.page_size,
        block_size=recipe.tree.block_size,
    )


def choose_compute(built: Sequence[str], capability: tuple[int, int], folder: Path) -> str:
    """Select the engines for a GPU of this compute capability: its own, else `native`, else `portable`."""
    own = "sm{}{}".format(*capability)
    for compute in (own, "native", "portable"):
        if compute in built:
            return compute
    raise BundleError(
        "The bundle has no engines for this GPU.", where=folder, found=", ".join(built), expected=own,
        fix="build it with engines.compute for this GPU, or serve it with --executor torch",
    )  # fmt: skip

"""Makes a model runner for a bundle: PyTorch modules, graphs in ONNX Runtime, or TensorRT engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from d2sd.errors import BundleError, D2SDError

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.manifest import Engines
    from d2sd.modeling.drafters.dflash import Drafter
    from d2sd.modeling.drafters.flexdraft import FlexHead
    from d2sd.runtime.backends.model_runner import ModelRunner

BackendName = Literal["torch", "onnx", "tensorrt"]
#: Names of the models' folders, graphs and engines.
MODELS, FLEX = ("target", "drafter_first", "drafter_second"), "drafter_flex"


def make_runner(
    bundle: Bundle, drafters: Sequence[Drafter], name: BackendName, device: str, *, flex: bool = False
) -> ModelRunner:
    """Make a runner of the target and `drafters`: none, the first, or both drafters of the bundle; FlexDraft if asked.

    Raises `BundleError` if the bundle has no graphs or engines or they cannot run on this machine, `BuildError` if
    TensorRT is not installed.
    """
    from d2sd.runtime.backends.model_runner import ModelRunner

    head = bundle.flex if flex else None
    if name == "torch":
        check_device(device)
        first, second = (*(drafter.to(device) for drafter in drafters), None, None)[:2]
        size = bundle.recipe.tree.block_size
        return ModelRunner(
            bundle.target.to(device), first, second, flex=head and head.to(device), block_size=size,
            exact=bundle.recipe.exact,
        )  # fmt: skip
    built = bundle.manifest.engines
    if built is None:
        raise BundleError(
            "The bundle has neither graphs nor engines.", where=bundle.path,
            fix="build it with --set 'engines={compute: [portable]}', or serve it with --executor torch",
        )  # fmt: skip
    if head is not None and FLEX not in built.profiles:
        raise BundleError(
            "The bundle has neither a graph nor an engine of its FlexDraft head.", where=bundle.path,
            found=f"graphs of {', '.join(built.profiles)}",
            fix="build it again, choose another policy, or serve it with --executor torch",
        )  # fmt: skip
    if name == "onnx":
        return _onnx(bundle, drafters, head)
    return _tensorrt(bundle, drafters, head, built)


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


def _onnx(bundle: Bundle, drafters: Sequence[Drafter], flex: FlexHead | None) -> ModelRunner:
    from d2sd.runtime.backends.exported import GraphDecoder, GraphDrafter, GraphFlex, OnnxSession
    from d2sd.runtime.backends.model_runner import ModelRunner

    recipe = bundle.recipe
    if recipe.precision == "bf16":
        raise BundleError(
            "ONNX Runtime does not support bf16 on CPUs.", where=f"{bundle.path}: precision",
            fix="build the bundle in fp16 or fp32, or serve it with --executor torch",
        )  # fmt: skip
    folder = bundle.path / "onnx"
    sessions = [OnnxSession(folder / f"{model}.onnx") for model in MODELS[: 1 + len(drafters)]]
    graphs = [GraphDrafter(d, s, recipe.limits.page_size) for d, s in zip(drafters, sessions[1:], strict=True)]
    aux_layer_ids = bundle.first.config.target_layer_ids if bundle.first else ()
    head = None if flex is None else GraphFlex(flex, OnnxSession(folder / f"{FLEX}.onnx"))
    return ModelRunner(
        GraphDecoder(bundle.target, aux_layer_ids, sessions[0]), *graphs, flex=head, block_size=recipe.tree.block_size
    )


def _tensorrt(bundle: Bundle, drafters: Sequence[Drafter], flex: FlexHead | None, built: Engines) -> ModelRunner:
    from d2sd.runtime.backends.tensorrt import engine_runner
    from d2sd.runtime.backends.tensorrt_checks import EngineFile, this_device
    from d2sd.tensorrt_env import find_tensorrt

    trt, folder = find_tensorrt(built.builder), bundle.path / "engines"
    capability = this_device(folder).capability
    compute = choose_compute(built.compute, capability, folder)
    files = {
        model: EngineFile(
            folder / compute / f"{model}.engine", built.builder, built.version, built.plugin_abi, compute, profiles
        )
        for model, profiles in built.profiles.items()
    }
    recipe = bundle.recipe
    aux_layer_ids = bundle.first.config.target_layer_ids if bundle.first else ()
    return engine_runner(
        trt,
        (bundle.target, files[MODELS[0]]),
        *((drafter, files[model]) for drafter, model in zip(drafters, MODELS[1:], strict=False)),
        aux_layer_ids=aux_layer_ids,
        page_size=recipe.limits.page_size,
        flex=None if flex is None else (flex, files[FLEX]),
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

"""Makes a model runner for a bundle: PyTorch modules, graphs in ONNX Runtime, or TensorRT engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2sd.bundle.devices import BackendName, check_device
from d2sd.errors import BundleError

if TYPE_CHECKING:
    from d2sd.bundle.load import Bundle
    from d2sd.manifest import Engines
    from d2sd.modeling.drafters.interface import DraftModel
    from d2sd.policies import DrafterRole
    from d2sd.runtime.model_runner import ModelRunner


def make_runner(bundle: Bundle, roles: Collection[DrafterRole], name: BackendName, device: str) -> ModelRunner:
    """Make a runner of the target and the bundle's drafters of these roles.

    Raises `BundleError` if the bundle has no graphs or engines or they cannot run on this machine, `BuildError` if
    TensorRT is not installed.
    """
    from d2sd.bundle.product_times import choose_products
    from d2sd.runtime.model_runner import ModelRunner

    if bundle.target.shared_head is not None and name != "torch":
        raise BundleError(
            "Graphs and engines hold a whole target.",
            where="tensor parallel",
            found=name,
            expected="torch",
            fix="choose torch for {executor}",
        )
    if name == "torch":
        check_device(device)
        bundle = bundle.serving(roles, device)
        target, drafters = bundle.target, bundle.drafters
        block_size = bundle.recipe.tree.depth
        if bundle.ranks is None:
            runner = ModelRunner(target, drafters, block_size=block_size)
        else:
            from d2sd.runtime.parallel.leader import LeadingRunner

            runner = LeadingRunner(target, drafters, block_size, bundle.ranks)
        choose_products(runner, None if target.shared_head is None else target.shared_head.group)
        return runner
    drafters = {role: drafter for role, drafter in bundle.drafters.items() if role in roles}
    built = bundle.manifest.engines
    if built is None:
        raise BundleError(
            "The bundle has neither graphs nor engines.",
            where=bundle.path,
            fix="build it with --set 'engines={compute: [portable]}', or choose torch for {executor}",
        )
    if missing := [role.folder for role in drafters if role.folder not in built.profiles]:
        raise BundleError(
            f"The bundle has neither a graph nor an engine of {missing[0]}.",
            where=bundle.path,
            found=f"graphs of {', '.join(built.profiles)}",
            fix="build it again, choose another {policy}, or torch for {executor}",
        )
    return _onnx(bundle, drafters) if name == "onnx" else _tensorrt(bundle, drafters, built)


def _onnx(bundle: Bundle, drafters: Mapping[DrafterRole, DraftModel]) -> ModelRunner:
    from d2sd.modeling.prepare import prepare_for_inference
    from d2sd.runtime.backends.exported import GraphDecoder, OnnxSession, graph_drafter
    from d2sd.runtime.model_runner import ModelRunner

    recipe = bundle.recipe
    if recipe.precision == "bf16":
        raise BundleError(
            "ONNX Runtime does not support bf16 on CPUs.",
            where=f"{bundle.path}: precision",
            fix="build the bundle in fp16 or fp32, or choose torch for {executor}",
        )
    folder = bundle.path / "onnx"
    target = GraphDecoder(bundle.target, aux_layer_ids(bundle), OnnxSession(folder / "target.onnx"))
    graphs = {
        role: graph_drafter(drafter, OnnxSession(folder / f"{role.folder}.onnx"), recipe.limits.page_size)
        for role, drafter in drafters.items()
    }
    return ModelRunner(*prepare_for_inference(target, graphs), block_size=recipe.tree.depth)


def aux_layer_ids(bundle: Bundle) -> tuple[int, ...]:
    """The layers whose outputs the graphs and engines of the target return."""
    return next((drafter.config.target_layer_ids for drafter in bundle.drafters.values() if drafter.has_context), ())


def _tensorrt(bundle: Bundle, drafters: Mapping[DrafterRole, DraftModel], built: Engines) -> ModelRunner:
    from d2sd.modeling.prepare import sum_in_fp32
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
    sum_in_fp32()  # the head is PyTorch's product
    return engine_runner(
        trt,
        (bundle.target, files["target"]),
        {role: (drafter, files[role.folder]) for role, drafter in drafters.items()},
        aux_layer_ids=aux_layer_ids(bundle),
        page_size=bundle.recipe.limits.page_size,
        block_size=bundle.recipe.tree.depth,
    )


def choose_compute(built: Sequence[str], capability: tuple[int, int], folder: Path) -> str:
    """Select the engines for a GPU of this compute capability: its own, else `native`, else `portable`."""
    architecture = "sm{}{}".format(*capability)
    for compute in (architecture, "native", "portable"):
        if compute in built:
            return compute
    raise BundleError(
        "The bundle has no engines for this GPU.",
        where=folder,
        found=", ".join(built),
        expected=architecture,
        fix="build it with engines.compute for this GPU, or choose torch for {executor}",
    )

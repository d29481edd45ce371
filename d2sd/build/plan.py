"""Plans a build from configs and tensor headers alone, without reading weights or using the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from d2sd.build.geometry import Place, check_geometry, described, models_of, read_drafter
from d2sd.build.quantized import Choice, bytes_of, choose, numbers_of
from d2sd.build.refused import refuse
from d2sd.build.sources import adapters_of, check_downloaded, located
from d2sd.build.vocabulary import narrowed
from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.convert.checkpoint.families import parse_target_config
from d2sd.convert.checkpoint.gguf import read_gguf_config
from d2sd.convert.checkpoint.headers import ITEMSIZES, has_weights
from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.convert.checkpoint.lora import read_adapters
from d2sd.convert.checkpoint.quantization import Quantization, read_quantization
from d2sd.convert.checkpoint.target_shapes import check_target_tensors, target_shapes
from d2sd.convert.drafter_kind import DrafterKind
from d2sd.convert.kinds import KINDS
from d2sd.errors import RecipeError
from d2sd.extras import require
from d2sd.licence import NOT_STATED, read_licence
from d2sd.modeling.config import BodyConfig, DecoderConfig, DraftConfig
from d2sd.plugins.head_sizes import HEAD_STEP, LARGEST_HEAD
from d2sd.policies import FACTS, DrafterRole
from d2sd.prompts import read_prompts
from d2sd.recipe import FP8, Recipe, Source
from d2sd.runtime.memory import KVMemory, PoolBytes, WindowedLayers, plan_kv_memory
from d2sd.runtime.request import Limits
from d2sd.tensorrt_env import ALIGNMENT

#: Nominal GPU memory in decimal bytes; the devices report slightly more.
GPUS = {"H100": 80 * 10**9, "H200": 141 * 10**9, "B200": 180 * 10**9}
#: What is published is in 16 bits where it is not quantized.
_STORED = ITEMSIZES["bf16"]
_NO_FP8 = FP8(target=False, drafters=False)
#: Bytes of the scales of an FP8 layer, of its weights and of its inputs.
_SCALES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """One model of the bundle."""

    name: str  # its stage, and its folder in the bundle
    source: str
    config: DecoderConfig | DraftConfig
    parameters: int
    weight_bytes: int  # in memory
    kv_token_bytes: int  # K and V of one token, all layers; 0 for a drafter without pages of its own
    has_weights: bool  # else the sizes are those of its config alone
    role: DrafterRole | None = None  # None: the target
    choice: Choice | None = None  # of a target whose checkpoint is quantized
    licence: str = NOT_STATED
    state_bytes: int = 0  # recurrent state of one request, of all layers that have one
    #: Of a published checkpoint in 16 bits or quantized; a drafter's copies of the target left out.
    stored_bytes: int = 0

    @property
    def body(self) -> BodyConfig:
        return self.config.body

    @property
    def draft_config(self) -> DraftConfig:
        """The config of a drafter."""
        assert not isinstance(self.config, DecoderConfig)
        return self.config

    @property
    def kind(self) -> DrafterKind[Any, Any]:
        """The kind of a drafter."""
        return KINDS[self.draft_config.kind]


@dataclass(frozen=True, slots=True)
class Plan:
    """Models that are `missing`, because they have to be fetched first, are left out, unless the recipe has their
    geometry.

    If the target's is unknown, `target` is None and the drafters have not been checked against it.
    """

    recipe: Recipe
    target_file: Path | None  # a GGUF in the cache, or a checkpoint folder, which may be missing
    target: Part | None
    drafters: dict[DrafterRole, Part]
    calibration: CalibrationFile | None = None
    missing: tuple[Source, ...] = ()
    ranks: int = 1  # GPUs that share the target, of one of which the sizes are (`d2sd.build.shares`)

    @property
    def places(self) -> dict[Place, Part]:
        """All models known by now, by their places in the recipe."""
        places: dict[Place, Part] = {} if self.target is None else {None: self.target}
        places.update(self.drafters.items())
        return places

    @property
    def parts(self) -> tuple[Part, ...]:
        """All models known by now, target first."""
        return tuple(self.places.values())

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)

    @property
    def graph_bytes(self) -> int:
        """Weights in the graphs, which share none: a drafter that borrows MLPs of the target has a copy of them."""
        if self.target is None:
            return self.weight_bytes
        bodies = [part.body for part in self.drafters.values() if part.draft_config.borrows_mlps]
        copied = sum(3 * body.num_layers * body.hidden_size * body.intermediate_size for body in bodies)
        return self.weight_bytes + round(copied * self.target.weight_bytes / self.target.parameters)

    def kv_memory(self) -> KVMemory:
        """Size of the K/V pools and recurrent states when serving with all models; of a share of memory the largest
        that it may be.
        """
        limits, token = self.recipe.limits, sum(part.kv_token_bytes for part in self.parts)
        each = PoolBytes(limits.page_size * token, self.windowed, self.state_bytes)
        return plan_kv_memory(Limits.of(limits), self.recipe.tree.depth, each)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one request, of all models."""
        return sum(part.state_bytes for part in self.parts)

    def windowed_token_bytes(self, part: Part) -> int:
        """The part of `kv_token_bytes` in layers with a window, which have pages of their own.

        None of a model that is to run as a graph, which takes one page table, and has other layers too.
        """
        windows = part.body.windows
        if self.recipe.engines and None in windows:
            return 0
        within = (layer for layer, window in enumerate(windows) if window is not None)
        return part.kv_token_bytes * _kv_bytes(part.body, 1, within) // _kv_bytes(part.body, 1)

    @property
    def windowed(self) -> WindowedLayers | None:
        """The layers with a window, of all models that have pages."""
        parts = [part for part in self.parts if self.windowed_token_bytes(part)]
        windows = [window for part in parts for window in part.body.windows if window is not None]
        if not windows:
            return None
        token = sum(map(self.windowed_token_bytes, parts))
        return WindowedLayers(max(windows), self.recipe.limits.page_size * token)

    def kv_bytes(self, part: Part) -> int:
        """Size of the K/V pools and recurrent states of one model."""
        memory, windowed = self.kv_memory(), self.windowed_token_bytes(part)
        tokens = memory.pool_pages * (part.kv_token_bytes - windowed) + (memory.windowed_pool_pages or 0) * windowed
        return self.recipe.limits.page_size * tokens + memory.states * part.state_bytes

    @property
    def request_bytes(self) -> int:
        """K/V and recurrent state of one request of max_context tokens, of all models."""
        limits, windowed = Limits.of(self.recipe.limits), self.windowed
        whole = sum(part.kv_token_bytes - self.windowed_token_bytes(part) for part in self.parts)
        pages = 0 if windowed is None else windowed.pages(limits, self.recipe.tree.depth) * windowed.page_bytes
        return limits.max_context * whole + pages + self.state_bytes

    def requests_in(self, memory: int) -> int:
        """How many such requests fit next to the weights in four fifths of `memory`; the rest is for activations."""
        return max(0, (memory * 4 // 5 - self.weight_bytes) // self.request_bytes)


def make_plan(recipe: Recipe, *, weights: bool = True) -> Plan:
    """Read every config and header a recipe names and check that they fit together.

    Without `weights` a checkpoint may be a config.json alone, or a geometry in the recipe, as long as nothing is built.
    """
    check_downloaded(recipe, weights=weights)
    if recipe.target.pypi is not None:
        require("gguf", ("gguf", "accelerate"), "A target in GGUF")
    with described(recipe) as folders:
        return _plan(recipe, folders, weights=weights)


def _plan(recipe: Recipe, geometries: Mapping[Place, Path], *, weights: bool) -> Plan:
    """`make_plan`; `geometries` are folders with the config.json that the recipe describes."""
    sources = models_of(recipe)
    here = {place: located(recipe, source) for place, source in sources.items()}
    told = {} if weights else {place: folder for place, folder in geometries.items() if not _has_config(here[place])}
    files = here | told
    target: Part | None = None
    config: DecoderConfig | None = None
    if (target_file := files[None]) is not None:
        target, config = _target(recipe, target_file, weights=weights)
        target = _known(recipe.target, target, None, geometries, told)
        if recipe.limits.max_context > config.body.max_positions:
            raise RecipeError(
                "The context is longer than the target's.",
                where="limits.max_context",
                found=recipe.limits.max_context,
                expected=f"at most {config.body.max_positions}",
                fix=f"set limits.max_context to {config.body.max_positions}, or less",
            )
    drafters = {
        role: _known(source, _drafter(recipe, role, source, folder, config, weights=weights), role, geometries, told)
        for role, source in recipe.drafters.sources.items()
        if (folder := files[role])
    }
    if len(drafters) == len(recipe.drafters.sources) and drafters:
        _check_block_size(recipe, drafters)
    first = drafters.get(DrafterRole.FIRST) if DrafterRole.SECOND in drafters else None
    if first is not None and (reason := first.draft_config.refusal("d2sd")):
        raise RecipeError(reason, where="recipe: drafters.second", fix="remove it")
    missing: list[Source] = [source for place, source in sources.items() if here[place] is None or place in told]
    calibration = recipe.drafters.calibration
    if calibration is not None and located(recipe, calibration) is None:
        missing.append(calibration)
    plan = Plan(recipe, here[None], target, drafters, _calibration(recipe), tuple(missing))
    _check_engines(plan)
    texts = recipe.drafters.vocabulary.texts if recipe.drafters.vocabulary else None
    for prompts in (recipe.checks.prompts, recipe.fp8.prompts if recipe.fp8 else None, texts):
        if prompts is not None:
            read_prompts(recipe.path(prompts))  # raises before anything is converted
    if plan.parts:
        plan.kv_memory()  # raises RecipeError where it does not hold a request
    return plan


def _has_config(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").is_file()


def _known(source: Source, part: Part, place: Place, geometries: Mapping[Place, Path], told: Collection[Place]) -> Part:
    """A model that is as its recipe says, or that is known by its recipe alone: then named by its repository."""
    if place in told:
        return replace(part, source=f"{source.repo or source.path}, by the geometry in the recipe")
    if place in geometries:
        other: DecoderConfig | DraftConfig
        if place is None:
            other = parse_target_config(HFConfig.read(geometries[place]))
        else:
            other = read_drafter(source, geometries[place])
        check_geometry(part.config, other, Path(part.source), place)
    return part


def _check_block_size(recipe: Recipe, drafters: Mapping[DrafterRole, Part]) -> None:
    """Raise `RecipeError` if no drafter proposes as many tokens as a block of the recipe holds."""
    most = max(part.draft_config.drafts for part in drafters.values())
    if recipe.tree.block_size > 1 + most:
        raise RecipeError(
            "No drafter was trained on blocks of that size.",
            where="recipe: tree.block_size",
            found=recipe.tree.block_size,
            expected=f"at most {1 + most}: {most} drafts, and the token that the target adds",
            fix=f"set tree.block_size to {1 + most}, or less",
        )
    if recipe.tree.block_size <= most and recipe.tree.depth > recipe.tree.block_size:
        raise RecipeError(
            "tree.max_depth needs drafters' blocks of their full size.",
            where="recipe: tree.block_size",
            found=recipe.tree.block_size,
            expected=f"{1 + most}, as the drafters were trained, under tree.max_depth {recipe.tree.depth}",
            fix=f"set tree.block_size to {1 + most}, or remove max_depth",
        )


def _check_engines(plan: Plan) -> None:
    """Raise `RecipeError` for shapes that kernels or TensorRT do not support, before hours of exporting."""
    drafters = plan.drafters.values() if plan.recipe.engines else ()
    for refusal in (part.draft_config.graph_refusal for part in drafters):
        if refusal is not None:
            raise RecipeError(refusal, where="recipe: engines", fix="remove engines from the recipe")
    for part in plan.parts if plan.recipe.engines else ():
        body, limits = part.body, plan.recipe.limits
        if body.head_dim % HEAD_STEP or body.head_dim > LARGEST_HEAD:
            raise RecipeError(
                "The attention kernels do not support this head size, so engines cannot be built.",
                where=f"{part.source}: head_dim",
                found=body.head_dim,
                expected=f"a multiple of {HEAD_STEP} up to {LARGEST_HEAD}",
                fix="remove engines from the recipe",
            )
        page = limits.page_size * body.num_kv_heads * body.head_dim * ITEMSIZES[plan.recipe.precision]
        if page % ALIGNMENT:  # the layers of a pool are contiguous
            raise RecipeError(
                "A page of K/V is not aligned for TensorRT.",
                where="limits.page_size",
                found=f"{limits.page_size} tokens, {page} bytes",
                expected=f"a multiple of {ALIGNMENT} bytes",
                fix="double limits.page_size",
            )


def _calibration(recipe: Recipe) -> CalibrationFile | None:
    if recipe.drafters.calibration is None or (path := located(recipe, recipe.drafters.calibration)) is None:
        return None
    calibration = load_calibration(path)
    if calibration.block_size not in (recipe.tree.block_size, recipe.tree.depth):
        raise RecipeError(
            "The calibration is for another block size.",
            where=f"{path}: block_size",
            found=calibration.block_size,
            expected=recipe.tree.block_size,
            fix="run d2sd calibrate",
        )
    return calibration.deepened(recipe.tree.depth).among(recipe.drafters.sources)


def _target(recipe: Recipe, file: Path, *, weights: bool) -> tuple[Part, DecoderConfig]:
    quantization, weights_present = None, True
    if recipe.target.pypi is not None:
        config = parse_target_config(read_gguf_config(file))
    else:
        config = parse_target_config(HFConfig.read(file))
        quantization, weights_present = _checked(file, check_target_tensors, config, weights=weights)
    refuse(recipe, config.body, f"{config.family} in {file}", target=True)
    fp8, plain = recipe.fp8 or _NO_FP8, target_shapes(config)
    published = target_shapes(config, quantization)
    choice, stored = choose(recipe, quantization, published, plain, file / "config.json"), bytes_of(published, _STORED)
    quantization = None if choice is None or choice.dequantize else choice.quantization
    read_adapters(file, config, quantization, adapters_of(recipe))
    if fp8.target:
        _refuse_fp8_twice(quantization, str(file), "target")
    if quantization is None:  # what the build makes of it
        quantization = Quantization(("lm_head",) if fp8.target else ("*",), fp8.kv, ("", ""))
    kv = fp8.kv or quantization.kv
    token = _kv_bytes(config.body, 1 if kv else ITEMSIZES[recipe.precision])
    size = bytes_of(target_shapes(config, quantization), ITEMSIZES[recipe.precision])
    sizes = numbers_of(plain), size, token, weights_present
    licence = _licence(recipe.target, file)
    states = config.body.state_bytes(ITEMSIZES[recipe.precision])
    part = Part("target", str(file), config, *sizes, None, choice, licence, states, stored)
    return part, config


C = TypeVar("C", DecoderConfig, DraftConfig)


def _checked(
    folder: Path, check: Callable[[Path, C], Quantization | None], config: C, *, weights: bool
) -> tuple[Quantization | None, bool]:
    """How a checkpoint is quantized, and whether it has weights; if so, or if they are required, they are checked."""
    if weights or has_weights(folder):
        return check(folder, config), True
    return read_quantization(folder, HFConfig.read(folder)), False


def _drafter(
    recipe: Recipe, role: DrafterRole, source: Source, folder: Path, target: DecoderConfig | None, *, weights: bool
) -> Part:
    policy, config = recipe.tree.policy, read_drafter(source, folder)
    kind = KINDS[config.kind]
    if (cut := recipe.drafters.vocabulary) is not None:  # the build chooses them, by the target's tokenizer
        config = narrowed(config, range(config.vocab_size), cut.size)
    refuse(recipe, config.body, f"the drafter in {folder}", target=False)
    if target is not None:
        kind.check(config, target, role, recipe.tree.block_size, folder)
    runs = () if policy == "auto" else FACTS[policy].among(recipe.drafters.sources).drafters
    if role in runs and (reason := config.refusal(policy)):
        raise RecipeError(reason, where="recipe: tree.policy", found=policy, fix="set another policy, or auto")
    if reason := config.precision_refusal(recipe.precision):
        raise RecipeError(reason, where="recipe: precision", found=recipe.precision, expected="bf16 or fp32")
    quantization, weights_present = _checked(folder, kind.check_tensors, config, weights=weights)
    shapes, rounded = kind.shapes(config, quantization), list(kind.fp8_inputs(folder, config))
    if recipe.fp8 is not None and recipe.fp8.drafters:
        _refuse_fp8_twice(quantization, str(folder), "drafters")
        rounded = kind.fp8_layers(config)
    plain, itemsize = kind.shapes(config), ITEMSIZES[recipe.precision]
    saved = sum(math.prod(plain[f"{layer}.weight"]) * (itemsize - 1) - _SCALES for layer in rounded)
    sizes = numbers_of(plain), bytes_of(shapes, itemsize) - saved
    token = _kv_bytes(config.body, itemsize) if config.target_layer_ids else 0
    stored = bytes_of(shapes, _STORED)
    licence = _licence(source, folder)
    sized = *sizes, token, weights_present
    return Part(role.folder, str(folder), config, *sized, role, licence=licence, stored_bytes=stored)


def _licence(source: Source, folder: Path) -> str:
    """The licence that a checkpoint's folder states, else the recipe's."""
    stated = read_licence(folder)
    return source.licence or stated if stated == NOT_STATED else stated


def _refuse_fp8_twice(quantization: Quantization | None, source: str, key: str) -> None:
    """Raise `RecipeError` for a quantized checkpoint that the recipe wants in FP8."""
    if quantization is not None:
        raise RecipeError(
            f"This checkpoint is {quantization.text} already.",
            where=source,
            fix=f"set fp8.{key} to false: it is kept as it is",
        )


def _kv_bytes(body: BodyConfig, size: int, layers: Iterable[int] | None = None) -> int:
    """K and V of one token in these layers; None: in all that attend."""
    bodies = map(body.at, body.attention_layers if layers is None else layers)
    return 2 * size * sum(layer.num_kv_heads * layer.head_dim for layer in bodies)

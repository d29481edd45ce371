"""A pretrained first drafter, named by the recipe: checked against recipe and target, and not trained."""

from __future__ import annotations

from pathlib import Path

import torch

from d2sd.build.sources import obtained
from d2sd.convert.checkpoint.drafter import check_compatible, check_drafter_tensors, load_drafter, read_drafter_config
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, DrafterConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.train.init_from_target import drafter_config, flex_config
from d2sd.train_recipe import TrainRecipe


def first_config(recipe: TrainRecipe, target: DecoderConfig) -> DrafterConfig:
    """Config of the first drafter: from the recipe's geometry and the target, or from the pretrained drafter.

    Raises D2SDError if it does not match the target or the recipe; called early, hours before the drafter is used.
    """
    config = drafter_config(recipe.geometry, target, None)
    if recipe.ready_first is None:
        return config
    folder, geometry = _folder(recipe), recipe.geometry
    ready = read_drafter_config(folder)
    check_compatible(ready, target, role="first", block_size=ready.block_size, where=folder)
    for key, found, expected in (
        ("num_hidden_layers", ready.body.num_layers, geometry.layers),
        ("block_size", ready.block_size, geometry.block_size),
        ("dflash_config.mask_token_id", ready.mask_token_id, geometry.mask_token_id),
        ("dflash_config.target_layer_ids", list(ready.target_layer_ids), geometry.target_layer_ids),
    ):
        if found != expected:
            raise CheckpointError(
                "The pretrained first drafter does not match the recipe's geometry.",
                where=f"{folder / 'config.json'}: {key}", found=found, expected=expected,
                fix="copy the drafter's value to `drafter` in the recipe",
            )  # fmt: skip
    if check_drafter_tensors(folder, ready) is not None:
        raise CheckpointError(
            "The pretrained first drafter is quantized, so the second cannot be initialised from it.", where=folder,
            fix="name the drafter before quantization",
        )  # fmt: skip
    return ready


def check_geometry(recipe: TrainRecipe, target: DecoderConfig) -> None:
    """Raise D2SDError if what the recipe trains, or its pretrained first drafter, does not fit the target."""
    if recipe.flex is not None:
        flex_config(recipe.flex.head, target)
    else:
        first_config(recipe, target)


def load_ready(recipe: TrainRecipe) -> Drafter:
    """The pretrained first drafter in fp32 on the CPU, without gradients. Call `first_config` first to check it."""
    return load_drafter(_folder(recipe), torch.float32)


def _folder(recipe: TrainRecipe) -> Path:
    assert recipe.ready_first is not None
    return obtained(recipe, recipe.ready_first)

"""A first drafter that is ready: read where the recipe names it, held against recipe and target, never trained."""

from __future__ import annotations

from pathlib import Path

import torch

from d2sd.convert.build.sources import obtained
from d2sd.convert.checkpoint.drafter import check_compatible, check_drafter_tensors, load_drafter, read_drafter_config
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig, DrafterConfig
from d2sd.modeling.drafter import Drafter
from d2sd.train.init_from_target import drafter_config
from d2sd.train_recipe import TrainRecipe


def first_config(recipe: TrainRecipe, target: DecoderConfig) -> DrafterConfig:
    """The first drafter's: what the recipe's geometry makes of the target, or, of a ready one, its own.

    Raises D2SDError, hours before it is used, where it does not fit the target or the recipe.
    """
    config = drafter_config(recipe.drafter, target, None)
    if recipe.ready_first is None:
        return config
    folder, geometry = _folder(recipe), recipe.drafter
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
                "The ready first drafter has another shape than the recipe says.",
                where=f"{folder / 'config.json'}: {key}", found=found, expected=expected,
                fix="write the drafter's own into the recipe, under `drafter`",
            )  # fmt: skip
    if check_drafter_tensors(folder, ready) is not None:
        raise CheckpointError(
            "The ready first drafter is quantized, and the second could not start from it.", where=folder,
            fix="name the drafter from before it was quantized",
        )  # fmt: skip
    return ready


def load_ready(recipe: TrainRecipe) -> Drafter:
    """The ready first drafter in fp32 on the CPU, without gradients. `first_config` has found that it fits."""
    return load_drafter(_folder(recipe), torch.float32)


def _folder(recipe: TrainRecipe) -> Path:
    assert recipe.ready_first is not None
    return obtained(recipe, recipe.ready_first)

"""A pretrained first drafter, named by the recipe: checked against recipe and target, and not trained."""

from __future__ import annotations

from pathlib import Path

import torch

from d2sd.build.sources import obtained
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import DrafterRole
from d2sd.train.kinds import TRAINED
from d2sd.train_recipe import TrainRecipe


def check_geometry(recipe: TrainRecipe, target: DecoderConfig) -> None:
    """Raise D2SDError if what the recipe trains does not fit the target, or if its pretrained first drafter does not
    match the target or the recipe; called early, hours before the drafter is used.
    """
    for role in recipe.trained:
        TRAINED[role].config(recipe.shape, target)
    geometry = recipe.drafter
    if recipe.ready_first is None or geometry is None:
        return
    folder = _folder(recipe)
    ready = DFLASH.read_config(folder)
    DFLASH.check(ready, target, DrafterRole.FIRST, ready.block_size, folder)
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
    if DFLASH.check_tensors(folder, ready) is not None:
        raise CheckpointError(
            "The pretrained first drafter is quantized, so the second cannot be initialised from it.", where=folder,
            fix="name the drafter before quantization",
        )  # fmt: skip


def load_ready(recipe: TrainRecipe) -> Drafter:
    """The pretrained first drafter in fp32 on the CPU, without gradients. Call `check_geometry` first."""
    return DFLASH.load(_folder(recipe), torch.float32)


def _folder(recipe: TrainRecipe) -> Path:
    assert recipe.ready_first is not None
    return obtained(recipe, recipe.ready_first)

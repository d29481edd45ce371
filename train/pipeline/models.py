"""The models that a training begins with: its target, and the pretrained drafters that the recipe names.

The target is pinned as a bundle without drafters in the work folder when the training begins. A pretrained drafter is
checked against recipe and target, and not trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from d2sd.build.pipeline import build
from d2sd.build.sources import obtained
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.convert.checkpoint.layout import misfit
from d2sd.convert.kinds import DFLASH
from d2sd.errors import CheckpointError, D2SDError
from d2sd.manifest import NAME, load_manifest
from d2sd.modeling.config import DecoderConfig
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.head_configs import PairConfig
from d2sd.policies import DrafterRole
from d2sd.progress import Progress
from d2sd.recipe import Drafters, Limits, Recipe, Sampling, Tree
from d2sd.train.kinds import trained_kind
from d2sd.train_recipe import TrainRecipe


def pinned_target(recipe: TrainRecipe, folder: Path, progress: Progress) -> Bundle:
    """Load the target from `folder`, after building it if necessary (fetch, convert, verify; resumable).

    Raises D2SDError if it is not the recipe's target: existing responses and features belong to the one in `folder`.
    """
    plain = plain_recipe(recipe)
    if (folder / NAME).is_file():
        before = load_manifest(folder).recipe
        if (before.target, before.precision) != (recipe.target, recipe.precision):
            raise D2SDError(
                "the target changed since this training began",
                where=folder,
                found=f"{recipe.target}, {recipe.precision}",
                expected=f"{before.target}, {before.precision}",
                fix="restore the recipe, or train into another --work folder",
            )
        if before.canonical() == plain.canonical():
            return load_bundle(folder, progress=progress)
    build(plain, folder, validate=False, progress=progress)
    return load_bundle(folder, progress=progress)


def plain_recipe(recipe: TrainRecipe) -> Recipe:
    """Recipe of a bundle with the target alone, with limits for `max_batch` of the longest requests of a training."""
    data, batch = recipe.data, recipe.max_batch
    new_tokens = max(data.max_new_tokens, recipe.evaluation.max_new_tokens)
    new_tokens = max([new_tokens, *(kind.max_tokens for kind in data.self_written)])
    return Recipe(
        d2sd=1,
        name=f"{recipe.name}-target",
        target=recipe.target,
        drafters=Drafters(),
        precision=recipe.precision,
        tree=Tree(policy="off"),
        sampling=Sampling(max_new_tokens=new_tokens),
        limits=Limits(
            max_batch=batch, max_context=-(-(data.max_prompt_tokens + new_tokens) // 16) * 16, prefill_chunk=4 * batch
        ),
    ).at(recipe.folder, recipe.home)


def check_geometry(recipe: TrainRecipe, target: DecoderConfig) -> None:
    """Raise D2SDError if what the recipe trains does not fit the target, or if a pretrained drafter does not match the
    target or the recipe; called early, hours before the drafter is used.
    """
    if target.body.global_heads is not None:
        raise D2SDError(
            "Nothing is trained behind this target: no objective knows how its logits are capped.",
            where="target",
            found=target.family,
            fix="name a published drafter in a recipe",
        )
    if recipe.trained:
        trained_kind(recipe.shape.kind).config(recipe.shape, target)
    for role, source in recipe.ready.items():
        _check_ready(recipe, role, obtained(recipe, source), target)
    for role, source in recipe.starts.items():
        _check_ready(recipe, role, obtained(recipe, source), target, start=True)


def _check_ready(
    recipe: TrainRecipe, role: DrafterRole, folder: Path, target: DecoderConfig, *, start: bool = False
) -> None:
    """`start`: it is trained further, in blocks of any size."""
    geometry = recipe.drafter
    assert geometry is not None, "validated"
    ready = DFLASH.read_config(folder)
    DFLASH.check(ready, target, role, ready.block_size, folder)
    for key, found, expected in (
        ("num_hidden_layers", ready.body.num_layers, geometry.layers),
        ("block_size", ready.block_size, ready.block_size if start else geometry.block_size),
        ("dflash_config.mask_token_id", ready.mask_token_id, geometry.mask_token_id),
        ("dflash_config.target_layer_ids", list(ready.target_layer_ids), geometry.target_layer_ids),
    ):
        if found != expected:
            what = f"The pretrained {role.key} drafter does not match the recipe's geometry."
            fix = "copy the drafter's value to `drafter` in the recipe"
            raise misfit(what, folder, key, found, expected, fix)
    if recipe.head is not None and ready.head is not None and not isinstance(ready.head, PairConfig):
        raise CheckpointError(
            f"The pretrained {role.key} drafter has a head already.",
            where=folder / "config.json",
            found=ready.head.name,
            fix="remove `head` from the recipe",
        )
    if DFLASH.check_tensors(folder, ready) is not None:
        raise CheckpointError(
            f"The pretrained {role.key} drafter is quantized, so nothing can be trained behind it.",
            where=folder,
            fix="name the drafter before quantization",
        )


def load_start(recipe: TrainRecipe, role: DrafterRole) -> Drafter:
    """The drafter that a training starts from: fp32, CPU, full vocabulary, the recipe's blocks. Call `check_geometry`
    first.
    """
    before = DFLASH.load(obtained(recipe, recipe.starts[role]), torch.float32)
    drafter = Drafter(replace(before.config, draft_vocabulary=None, head=None, block_size=recipe.block_size))
    weights = before.state_dict()
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    return drafter

"""The target of a training, pinned as a bundle without drafters in the work folder when the training begins."""

from __future__ import annotations

from pathlib import Path

from d2sd.build import build
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.errors import D2SDError
from d2sd.manifest import NAME, load_manifest
from d2sd.progress import Progress
from d2sd.recipe import Drafters, Limits, Recipe, Sampling, Tree
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
                "the target changed since this training began", where=folder,
                found=f"{recipe.target}, {recipe.precision}", expected=f"{before.target}, {before.precision}",
                fix="restore the recipe, or train into another --work folder",
            )  # fmt: skip
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
        d2sd=1, name=f"{recipe.name}-target", target=recipe.target, drafters=Drafters(), precision=recipe.precision,
        tree=Tree(policy="off"),
        sampling=Sampling(max_new_tokens=new_tokens),
        limits=Limits(
            max_batch=batch,
            max_context=-(-(data.max_prompt_tokens + new_tokens) // 16) * 16,
            prefill_chunk=4 * batch,
        ),
    ).at(recipe.folder, recipe.home)  # fmt: skip

"""Locates the models of a recipe: a local path, a file or folder of a wheel, or files of a commit on a hub."""

from __future__ import annotations

import os
from pathlib import Path

from d2sd.convert.build.fetch import cached_file, fetch
from d2sd.convert.build.hub import cached_files, fetch_files
from d2sd.progress import Progress, silent
from d2sd.recipe import Recipe, RecipeFile, Source


def sources_of(recipe: Recipe) -> list[Source]:
    """Every source that a bundle is built from."""
    named = (
        recipe.target,
        recipe.drafters.first,
        recipe.drafters.second,
        recipe.drafters.flex,
        recipe.drafters.calibration,
    )
    return [source for source in named if source is not None]


def located(recipe: RecipeFile, source: Source) -> Path | None:
    """The file or folder of `source`; None if it has to be fetched first. Nothing is fetched or written.

    A relative path of a recipe addressed by name leads into the current folder, as in a clone, or else the package.
    """
    if source.path is not None:
        here, beside = recipe.path(source.path), _beside(recipe, source.path)
        return beside if beside.exists() and not here.exists() else here
    if source.hf is not None:
        return cached_files(source.hf)
    assert source.pypi is not None, "a source has exactly one of three"
    if source.pypi.local is not None:
        local = _beside(recipe, source.pypi.local)
        if local.exists():
            return local
    return cached_file(source.pypi)


def _beside(recipe: RecipeFile, written: str) -> Path:
    """A path relative to the recipe's file: of a recipe by name, to the package, where the shipped drafters are."""
    return Path(os.path.normpath(recipe.home / written))  # home has no symbolic links


def obtained(recipe: RecipeFile, source: Source, progress: Progress = silent) -> Path:
    """The file or folder of `source`, downloaded if need be. Raises `BuildError` if that fails."""
    found = located(recipe, source)
    if found is not None:
        return found
    if source.hf is not None:
        return fetch_files(source.hf, progress)
    assert source.pypi is not None, "a local path is always located"
    return fetch(source.pypi, progress)

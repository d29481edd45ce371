"""The calibration of `d2sd build --calibrate`: fitted to the bundle that the build has made, and put into it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d2sd.build.pipeline import Fit
from d2sd.errors import RecipeError
from d2sd.prompts import OWN_PROMPTS, last_prompts
from d2sd.recipe import Recipe
from d2sd.train.confidence.fit import calibrate, refuse_uncalibrated

#: Prompts of each file, and tokens of an answer.
PROMPTS, TOKENS = 24, 64


def fit_of(recipe: Recipe, prompts: Sequence[Path], device: str) -> Fit:
    """The fit by the last prompts of these files, or of the package's.

    Raises D2SDError for a recipe that cannot be calibrated, before anything is built.
    """
    drafters = recipe.drafters
    if drafters.calibration is not None:
        raise RecipeError(
            "The recipe names a calibration, which the build puts into the bundle.",
            where="recipe: drafters.calibration",
            fix="build without --calibrate, or with --set drafters.calibration=null",
        )
    refuse_uncalibrated(recipe, drafters.sources, Path("recipe"))
    texts = [text for path in prompts or (OWN_PROMPTS,) for text in last_prompts(path, None, PROMPTS)]
    tokens = min(TOKENS, recipe.limits.max_context // 2)
    return Fit(lambda bundle: calibrate(bundle, texts, tokens, device), [texts, tokens, device])

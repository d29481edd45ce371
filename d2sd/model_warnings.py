"""Lines about a model that is served all the same: its licence, and prompts unlike those that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Iterator

from d2sd.licence import warning
from d2sd.recipe import Recipe


def model_warnings(recipe: Recipe, name: str, licence: str) -> Iterator[str]:
    """Yield what a plan, a build and `inspect` say of a model; `name` is that of its folder in the bundle."""
    if said := warning(name, licence):
        yield said
    trained = {role.folder: source.template for role, source in recipe.drafters.sources.items()}.get(name, {})
    for key, expected in trained.items():
        served = recipe.target.template
        if key not in served or served[key] != expected:
            found = json.dumps(served[key]) if key in served else "not set"
            yield (
                f"{name}: other prompts than it was trained with, so fewer drafts are accepted: target.template.{key}: "
                f"found {found}, expected {json.dumps(expected)}; set it so, or name a drafter that was trained with it"
            )

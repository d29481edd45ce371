"""The models that a recipe describes by their `geometry`: plans before a download, and the comparison after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from d2sd.convert.kinds import KINDS, read_kind
from d2sd.errors import CheckpointError, D2SDError
from d2sd.io import write_json
from d2sd.modeling.config import DecoderConfig, DraftConfig
from d2sd.policies import DrafterRole
from d2sd.recipe import Recipe, SecondSource, Source

#: A model's place in a recipe; None: the target.
Place = DrafterRole | None
#: Fields that config.json does not have.
_ELSEWHERE = "draft_vocabulary"


def models_of(recipe: Recipe) -> dict[Place, Source]:
    """The sources of a recipe's models."""
    models: dict[Place, Source] = {None: recipe.target}
    models.update(recipe.drafters.sources.items())
    return models


@contextmanager
def described(recipe: Recipe) -> Iterator[dict[Place, Path]]:
    """A folder with a config.json for each model with a geometry; errors name the recipe's key in its place."""
    with TemporaryDirectory(prefix="d2sd-") as root:
        folders: dict[Place, Path] = {}
        for place, source in models_of(recipe).items():
            if source.geometry is not None:
                folders[place] = Path(root) / ("target" if place is None else place.folder)
                folders[place].mkdir()
                write_json(folders[place] / "config.json", source.geometry)
        keys = {str(folder): f"recipe: {geometry_key(place)}" for place, folder in folders.items()}
        try:
            yield folders
        except D2SDError as error:
            if not any(folder in str(error) for folder in keys):
                raise
            raise _named(error, keys) from None


def read_drafter(source: Source, folder: Path) -> Any:
    """The config of a drafter's folder, in the role that its source declares, if any."""
    return KINDS[read_kind(folder)].read_config(folder, source.role if isinstance(source, SecondSource) else None)


def geometry_key(place: Place) -> str:
    """The recipe's key of a model's geometry."""
    return f"{'target' if place is None else f'drafters.{place.key}'}.geometry"


def _named(error: D2SDError, keys: Mapping[str, str]) -> D2SDError:
    def renamed(text: object) -> str | None:
        if text is None:
            return None
        told = str(text)
        for folder, key in keys.items():
            told = told.replace(f"{folder}/config.json", key).replace(folder, key)
        return told

    parts = {part: renamed(getattr(error, part)) for part in ("where", "found", "expected", "fix")}
    return type(error)(renamed(error.what) or "", **parts)


def check_geometry(
    found: DecoderConfig | DraftConfig, told: DecoderConfig | DraftConfig, file: Path, place: Place
) -> None:
    """Raise `CheckpointError` where a model is another one than the recipe says."""
    ours, theirs = (_flat(asdict(cast("Any", config))) for config in (told, found))
    names = [name for name in ours.keys() | theirs.keys() if name.split(".")[0] != _ELSEWHERE]
    differing = sorted(name for name in names if ours.get(name) != theirs.get(name))
    key = geometry_key(place)
    if differing:
        raise CheckpointError(
            "The checkpoint is not the one that the recipe describes.",
            where=f"{file / 'config.json'} and recipe: {key}",
            found=", ".join(f"{name} {theirs.get(name)}" for name in differing),
            expected=", ".join(f"{name} {ours.get(name)}" for name in differing),
            fix=f"download the revision that the recipe names; if this model is meant, --set {key}=null",
        )


def _flat(values: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Nested fields by their path."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return flat

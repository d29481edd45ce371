"""`manifest.json`: what a bundle is, and the hash of everything in it. No dates and no places: equal
inputs give equal bytes, engines apart.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from d2sd.errors import BundleError
from d2sd.recipe import Builder, Recipe

SCHEMA: Literal[1] = 1
NAME = "manifest.json"


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.as_posix() != name or name in ("", "."):
        raise ValueError(f"file name {name!r} leaves the bundle")
    return name


FileName = Annotated[str, AfterValidator(_inside)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetGeometry(_Part):
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    parameters: int


class DrafterGeometry(_Part):
    role: str
    num_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    parameters: int


#: Least, usual and greatest size of each dimension.
Shapes = tuple[list[int], list[int], list[int]]


class Engines(_Part):
    """What lies in engines/<compute>/<model>.engine: without a GPU an engine cannot be asked."""

    builder: Builder
    version: str  # of the builder
    plugin_abi: str
    compute: tuple[str, ...]
    profiles: dict[str, list[dict[str, Shapes]]]  # model -> optimisation profiles, by name of an input
    plugins: dict[str, int]  # model -> attention layers that are our plugins


class Manifest(_Part):
    """Precision, row budget and limits are the recipe's; they are not said twice."""

    d2sd_bundle: Literal[1] = SCHEMA
    recipe: Recipe
    target: TargetGeometry
    first: DrafterGeometry | None
    second: DrafterGeometry | None
    engines: Engines | None = None
    files: dict[FileName, Sha256]  # every file of the bundle but this one
    versions: dict[str, str]  # of the tools that decide the bytes
    checks: dict[str, JsonValue]  # what was proven at build time, with numbers


def load_manifest(bundle: Path) -> Manifest:
    """Read and validate `bundle/manifest.json`; raises `BundleError`."""
    path = bundle / NAME
    try:
        values = json.loads(path.read_text("utf-8"))
        schema = values["d2sd_bundle"]
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError("Not a bundle: it has no manifest.json.", where=bundle, fix="run d2sd build") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError("The manifest is damaged.", where=path, found=repr(error)) from None
    if schema != SCHEMA:
        raise BundleError(
            "The bundle is of another schema version.",
            where=f"{path}: d2sd_bundle", found=schema, expected=SCHEMA, fix="build it again",
        )  # fmt: skip
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BundleError("The manifest is damaged.", where=f"{path}: {key}", found=first["msg"]) from None

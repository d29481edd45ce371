"""`manifest.json`: the contents of a bundle, with the hash of every file. It has no dates and no paths, so equal inputs
give equal bytes, except for engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue

from d2sd.errors import BundleError
from d2sd.licence import NOT_STATED
from d2sd.policies import DrafterName
from d2sd.recipe import SHA256, Builder, Recipe
from d2sd.schema import read_model

SCHEMA: Literal[1] = 1
NAME = "manifest.json"
#: Another reading of a drafter's config fails the check `fit` if it commits this many times more tokens a step.
FIT_RATIO = 1.05
#: How to read the figures of that check.
FIT_EXPLANATION = (
    "tokens a step of each drafter under each reading of its config, on the same few tokens; more is better",
    f"a build fails where another reading commits {FIT_RATIO} times as many as the declared one or more, and a sign",
    "test token by token rules out chance; a smaller difference, either way, says nothing about so few tokens",
)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    strange = path.is_absolute() or ".." in path.parts or set(name) & {"\\", "\0"}
    if strange or path.as_posix() != name or name in ("", "."):
        raise ValueError(f"file name {name!r} leaves the bundle")
    return name


FileName = Annotated[str, AfterValidator(_inside)]


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
    licence: str = NOT_STATED  # of the weights, as their folder or the recipe states it
    #: How the checkpoint was quantized that the target was built from; None where it was not.
    quantization: str | None = None


class DrafterGeometry(BaseModel):
    """A drafter; its further fields are those of its kind (`DrafterKind.geometry`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, JsonValue]

    num_layers: int
    block_size: int
    parameters: int
    licence: str = NOT_STATED


#: Min, opt and max shape.
Shapes = tuple[list[int], list[int], list[int]]


class Engines(_Part):
    """Metadata of engines/<compute>/<model>.engine, which cannot be read from an engine without a GPU."""

    builder: Builder
    version: str  # of the builder
    plugin_abi: str
    compute: tuple[str, ...]
    profiles: dict[str, list[dict[str, Shapes]]]  # model -> optimisation profiles, by name of an input
    plugins: dict[str, int]  # model -> attention layers that are our plugins


class Manifest(_Part):
    """The manifest; precision, node budget and limits are in its recipe."""

    d2sd_bundle: Literal[1] = SCHEMA
    recipe: Recipe
    target: TargetGeometry
    drafters: dict[DrafterName, DrafterGeometry]
    engines: Engines | None = None
    files: dict[FileName, SHA256]  # every file of the bundle but this one
    versions: dict[str, str]  # of the tools that decide the bytes
    checks: dict[str, JsonValue]  # figures of the build's checks

    def figures(self) -> list[str]:
        """The figures of the checks, one line per mapping."""
        return [line for name, result in self.checks.items() for line in _figures(name, result)]


def _figures(name: str, result: JsonValue) -> Iterator[str]:
    if not isinstance(result, dict):
        yield f"{name}: {result}"
        return
    figures = [f"{k}: {v}" if isinstance(v, str) else f"{k} {v}" for k, v in result.items() if not isinstance(v, dict)]
    if figures:
        yield f"{name}: {', '.join(figures)}"
    for key, below in result.items():
        if isinstance(below, dict):
            yield from _figures(f"{name}, {key}", below)


def load_manifest(bundle: Path) -> Manifest:
    """Read and validate `bundle/manifest.json`; raises `BundleError`."""
    path = bundle / NAME
    if not bundle.exists():
        fix = "pass the folder of a bundle, which d2sd build makes: no model is downloaded by its name"
        raise BundleError("There is no bundle: the folder does not exist.", where=bundle, fix=fix)
    if not path.exists():
        raise BundleError("Not a bundle: it has no manifest.json.", where=bundle, fix="run d2sd build")
    return read_model(
        Manifest, path, error=BundleError, what="manifest", version=("d2sd_bundle", SCHEMA), fix="build it again"
    )

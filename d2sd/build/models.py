"""The models of a plan, known by a recipe's `geometry` before a download and compared after it; what is refused of
them, their draft vocabularies, and how a quantized one is served.

A draft vocabulary is cut: the head's rows of fewer ids are all that a draft reads of it. What is proposed decides
nothing about what is accepted: a token that no drafter can propose comes from the target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from d2sd.convert.checkpoint.headers import ITEMSIZES, Shapes, stored_bytes
from d2sd.convert.checkpoint.quantization import Quantization, refuse_unserved
from d2sd.convert.checkpoint.schemes import FP8
from d2sd.convert.kinds import KINDS, read_kind
from d2sd.errors import CheckpointError, D2SDError, RecipeError
from d2sd.io import size_text, write_json
from d2sd.modeling.config import BodyConfig, DecoderConfig, DraftConfig, DrafterConfig
from d2sd.modeling.drafters.flexdraft_config import FlexConfig
from d2sd.modeling.mixers.configs import RECURRENT
from d2sd.policies import DrafterRole
from d2sd.prompts import OWN_PROMPTS, read_turns
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


#: What is done without for a target with these, and why.
REFUSED = {
    "experts": {
        "engines": "Experts are not exported to TensorRT engines.",
        "fp8.target": "d2sd does not quantize experts to FP8.",
        "exact": "Products of experts are not batch-invariant on CUDA. On a CPU with a compiler they always are.",
    },
    **{
        kind.name: {
            "engines": f"{kind.name.capitalize()} are not exported to TensorRT engines.",
            "fp8.target": f"d2sd does not quantize {kind.name} to FP8.",
        }
        for kind in RECURRENT
    },
}
#: What is done without for a target with `BodyConfig.beyond_fused`.
UNFUSED = {
    "engines": "Layers of this family are not exported to TensorRT engines.",
    "exact": "On CUDA the batch-invariant step is fused layers, which this family does not have.",
}


def refuse(recipe: Recipe, body: BodyConfig, found: str, *, target: bool) -> None:
    """Raise `RecipeError` for what a model of this kind cannot have."""
    fp8 = recipe.fp8 is not None and recipe.fp8.target
    asked = {"engines": recipe.engines is not None, "fp8.target": fp8 and target, "exact": recipe.exact and target}
    for feature in body.beyond_llama:
        unknown = UNFUSED if feature in body.beyond_fused else {}
        for key, reason in REFUSED.get(feature, unknown).items():
            if asked[key]:
                fix = f"set {key} to false" if key == "fp8.target" else f"remove {key} from the recipe"
                raise RecipeError(reason, where=f"recipe: {key}", found=found, fix=fix)


C = TypeVar("C", DrafterConfig, FlexConfig)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Token ids, those first that texts have most often, then those that the tokenizer's training merged first.

    `seen` counts the tokens of every second text, of which the order was not made.
    """

    order: tuple[int, ...]
    seen: Counter[int]

    def coverage(self, ids: Iterable[int]) -> float:
        """Share of the tokens of those texts that are among these ids."""
        return sum(self.seen[token] for token in ids) / max(self.seen.total(), 1)


def rank(recipe: Recipe, tokenizer: Any, vocab_size: int) -> Ranking:
    """The order in which a recipe with `drafters.vocabulary` keeps ids.

    A byte-pair tokenizer numbers its tokens in the order of its merges, which is that of their frequency in what it was
    trained on. Raises D2SDError for a file of texts that cannot be read.
    """
    cut = recipe.drafters.vocabulary
    assert cut is not None
    texts = read_turns(recipe.path(cut.texts) if cut.texts else OWN_PROMPTS)
    tokens = [[token for turn in turns for token in tokenizer(turn)["input_ids"]] for _, turns in texts]
    counts, seen = (Counter(token for text in tokens[start::2] for token in text) for start in (0, 1))
    frequent = dict.fromkeys(token for token, _ in counts.most_common() if token < vocab_size)
    return Ranking(tuple(frequent | dict.fromkeys(range(vocab_size))), seen)


def narrowed(config: C, order: Iterable[int], size: int) -> C:
    """The config of a drafter that drafts the first `size` ids of this order that it can draft.

    Of a drafter that can draft no more, it is its own. Raises RecipeError for one whose tensors are made for its ids.
    """
    own = config.draft_vocabulary
    if size >= (config.vocab_size if own is None else len(own)):
        return config
    if isinstance(config, FlexConfig) and config.calibration_size:
        raise RecipeError(
            "This head's calibration network was trained for its draft vocabulary.",
            where="recipe: drafters.vocabulary",
            fix="remove drafters.vocabulary",
        )
    able = set(range(config.vocab_size) if own is None else own)
    if isinstance(config, DrafterConfig):
        able.discard(config.mask_token_id)
    return replace(config, draft_vocabulary=tuple(sorted(islice((token for token in order if token in able), size))))


@dataclass(frozen=True, slots=True)
class Choice:
    """The two ways to serve a quantized checkpoint."""

    quantization: Quantization
    precision: str
    dequantize: bool
    stored: int  # bytes of its tensors
    plain: int  # bytes of weights in `precision`

    @property
    def text(self) -> str:
        """In a manifest."""
        return self.quantization.text + (f", dequantized to {self.precision}" if self.dequantize else "")

    def lines(self) -> Iterator[tuple[str, str]]:
        """In a plan: both sizes, and the products."""
        stored, plain = f"{size_text(self.stored)} as stored", f"{size_text(self.plain)} in {self.precision}"
        if self.dequantize:
            yield "quantization", f"{self.quantization.text}, {stored}; dequantized (target.dequantize): {plain}"
            return
        yield "quantization", f"{self.quantization.text}, {stored}; target.dequantize would make it {plain}"
        for product in self.quantization.products:
            yield "product", product


def choose(
    recipe: Recipe, quantization: Quantization | None, shapes: Shapes, plain: Shapes, where: Path
) -> Choice | None:
    """How a target of tensors `shapes`, dequantized `plain`, is served.

    Raises `CheckpointError` where it has no product and is not dequantized, `RecipeError` where engines cannot hold it.
    """
    if quantization is None:
        return None
    itemsize = ITEMSIZES[recipe.precision]
    choice = Choice(
        quantization, recipe.precision, recipe.target.dequantize, bytes_of(shapes, itemsize), bytes_of(plain, itemsize)
    )
    if choice.dequantize:
        return choice
    refuse_unserved(
        quantization, shapes, where, f"{recipe.precision} ({size_text(choice.plain)})", size_text(choice.stored)
    )
    if recipe.engines is not None and any(scheme != FP8 for scheme, _ in quantization.groups):
        raise RecipeError(
            "Graphs hold FP8 with one calibrated scale a tensor alone.",
            where="recipe: engines",
            found=quantization.text,
            fix="set target.dequantize to true, or remove engines",
        )
    return choice


def bytes_of(shapes: Shapes, itemsize: int) -> int:
    """Bytes in memory of a model of these tensors, whose plain numbers have `itemsize` bytes."""
    return sum(stored_bytes(name, shapes, itemsize) for name in shapes)


def numbers_of(shapes: Shapes) -> int:
    """Numbers in these tensors."""
    return sum(math.prod(shape) for shape in shapes.values())

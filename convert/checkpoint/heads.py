"""The kinds of heads that score candidates behind their parents, as checkpoints have them: a row each.

A config names a drafter's head by the size of one (`HeadLayout.mark`), and by its architecture or its projector. A
config in which these disagree, or that has keys of a head that the drafter does not have, is refused. Every other
difference between two drafters of the DFlash layout is one of keys, which `dflash.py` reads. The body is DFlash's.

DSpark's Markov head. Written: SpecForge's spelling.

    SpecForge     projector_type: dspark and the keys in dflash_config; tensors markov_head.*, confidence_head.*
    LiquidAI      the head's keys at the top level; heads that RoPE turns by pairs of neighbours (`formats/read.py`)
    ModelOpt      the same keys; tensors without the head's name: markov_w1.weight, confidence_proj.weight, …
    DeepSpec      the keys at the top level (`formats/read.py`)
    speculators   the keys at the top level; markov_w2 over the draft vocabulary

    markov_head.markov_w1.weight [V, R] · markov_head.markov_w2.weight [V, R]
    markov_head.gate_proj.{weight [R, E + R], bias [R]}, of a gated head
    confidence_head.proj.{weight [1, E or E + R], bias [1]}, kept and not run

DFlash 2: a candidate selector, and convolutions in the layers. Codebooks have no `.weight` behind their names.

    z-lab, incoai, SpecForge   the keys in dflash_config
    speculators                the keys at the top level

    candidate_selector.predecessor_codebook [V, R] · candidate_selector.successor_codebook [V, R]
    candidate_selector.hidden_projection.weight [R, E]
    layers.{i}.{attention_conv, mlp_conv}.base_kernel [2, τ, E] · .kernel_projection.weight [2·τ·E / group, E]

A pair head, d2sd's own. The body was trained without it: without these keys and tensors the checkpoint is plain DFlash.

    projector_type: d2sd_pair · pair_rank · pair_top_k, candidates of a slot

    pair_head.predecessor_projection [R, E] · pair_head.successor_projection [R, E]
    pair_head.hidden_projection.weight [R, E]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from d2sd.convert.checkpoint.hf_config import HFConfig
from d2sd.errors import CheckpointError
from d2sd.modeling.config import DrafterConfig
from d2sd.modeling.drafters.head_configs import HeadConfig, MarkovConfig, PairConfig, SelectorConfig

if TYPE_CHECKING:
    from torch import Tensor


class Places:
    """The parts of a config.json in which a drafter's key may be: refused where two have it, and differ."""

    def __init__(self, *parts: HFConfig) -> None:
        self._parts = parts

    def home(self, key: str) -> HFConfig:
        """The part that has a value of `key`; the first if none has."""
        having = [part for part in self._parts if part.values.get(key) is not None]
        for other in having[1:]:
            if other.values[key] != having[0].values[key]:
                raise other.refuse(f"{key} is given twice, with different values.", key, having[0].values[key])
        return having[0] if having else self._parts[0]

    def value(self, key: str) -> Any:
        """The value of `key`, None where it is missing."""
        return self.home(key).values.get(key)


def read_sizes(keys: Mapping[str, str], places: Places) -> dict[str, int]:
    """Fields of a head's config from keys that are sizes and required; raises `CheckpointError` naming file and key."""
    return {ours: places.home(key).size(key) for key, ours in keys.items()}


def sizes(keys: Mapping[str, str], config: HeadConfig) -> dict[str, object]:
    """The keys of a head whose keys are fields of its config under other names."""
    return {key: getattr(config, ours) for key, ours in keys.items()}


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A kind of head: its fields are what differs from kind to kind."""

    name: str
    config: type[HeadConfig]
    #: The name of the architecture that is written, then others that are read; none: they have a plain drafter's.
    architectures: tuple[str, ...]
    #: `speculators_model_type` of checkpoints in the format of speculators; None: it has no such drafters.
    speculators_type: str | None
    #: The key whose value is a size of such a head; drafters without one have None or 0.
    mark: str
    #: All its keys: in `dflash_config`, at the top level, or in both if they agree. Some concern training alone.
    keys: frozenset[str]
    #: Reads the keys; raises `CheckpointError` naming file and key.
    read: Callable[[Places], HeadConfig]
    #: Its keys in `dflash_config` as they are written, and in the format of speculators.
    fields: Callable[[Any], dict[str, object]]
    #: Patterns of its modules, which checkpoints hold in 16 bits.
    unquantized: tuple[str, ...]
    #: `projector_type` of such drafters; None: they have no such key.
    projector: str | None = None
    #: Whether the anchor's row proposes, where a config does not say.
    sample_from_anchor: bool = False
    #: Whether layers with a window see what is behind a row in its block, where a config of speculators does not say.
    windows_ahead: bool = False
    #: Beginnings of tensors' names as others write them -> as ours.
    renamed: Mapping[str, str] = field(default_factory=dict)
    #: Tensors with a row for each token: of our module over all of the target's, in speculators' over those it drafts.
    token_rows: tuple[str, ...] = ()


_SELECTOR_KEYS = {
    "selector_rank": "rank",
    "selector_top_k": "candidates",
    "conv_kernel_size": "taps",
    "conv_group_size": "group",
}


def read_selector(places: Places) -> SelectorConfig:
    """Read the keys, all of which are required; raises `CheckpointError` naming file and key."""
    config = SelectorConfig(**read_sizes(_SELECTOR_KEYS, places))
    home = places.home("conv_group_size")
    hidden = places.home("hidden_size").size("hidden_size")
    if hidden % config.group:
        raise home.refuse("The groups of channels do not divide the hidden size.", "conv_group_size", f"of {hidden}")
    return config


DFLASH2 = HeadLayout(
    name="DFlash 2",
    config=SelectorConfig,
    architectures=("DFlash2DraftModel", "DFlash2Speculator"),
    speculators_type="dflash2",
    mark="selector_rank",
    keys=frozenset(_SELECTOR_KEYS),
    windows_ahead=True,
    read=read_selector,
    fields=partial(sizes, _SELECTOR_KEYS),
    unquantized=("candidate_selector*", "*_conv*"),
)


#: The architecture of DeepSpec's drafters, with a head and without.
DEEPSPEC = "Qwen3DSparkModel"
_CONFIDENCE = ("enable_confidence_head", "use_confidence_head")  # the second is ModelOpt's


def read_markov(places: Places) -> MarkovConfig:
    """Read the keys; raises `CheckpointError` naming file and key."""
    home = places.home("markov_head_type")
    kind = home.get("markov_head_type", str, "vanilla")
    if kind not in ("vanilla", "gated"):
        fix = None
        if kind == "rnn":
            fix = "such a head carries a state from token to token, which trees here do not: use a vanilla or gated one"
        raise home.refuse("This kind of Markov head is not supported.", "markov_head_type", "vanilla or gated", fix)
    confidence = any(places.home(key).get(key, bool, False) for key in _CONFIDENCE)
    key = "confidence_head_with_markov"
    return MarkovConfig(
        rank=places.home("markov_rank").size("markov_rank"),
        gated=kind == "gated",
        confidence=confidence,
        confidence_with_markov=confidence and places.home(key).get(key, bool, True),
    )


def markov_fields(config: MarkovConfig) -> dict[str, object]:
    """The keys of a head."""
    return {
        "confidence_head_with_markov": config.confidence_with_markov,
        "enable_confidence_head": config.confidence,
        "markov_head_type": "gated" if config.gated else "vanilla",
        "markov_rank": config.rank,
    }


DSPARK = HeadLayout(
    name="DSpark",
    config=MarkovConfig,
    architectures=("DSparkDraftModel", "DSparkSpeculator", "Lfm2DSparkDraftModel"),
    speculators_type="dspark",
    mark="markov_rank",
    keys=frozenset({
        "markov_rank", "markov_head_type", *_CONFIDENCE, "confidence_head_with_markov", "confidence_head_alpha",
    }),
    projector="dspark",
    sample_from_anchor=True,
    read=read_markov,
    fields=markov_fields,
    unquantized=("markov_head*", "confidence_head*"),
    renamed={
        "markov_w1.": "markov_head.markov_w1.",
        "markov_w2.": "markov_head.markov_w2.",
        "gate_proj.": "markov_head.gate_proj.",
        "confidence_proj.": "confidence_head.proj.",
    },
    token_rows=("markov_head.markov_w2.weight",),
)  # fmt: skip


_PAIR_KEYS = {"pair_rank": "rank", "pair_top_k": "candidates"}


PAIR = HeadLayout(
    name="pair",
    config=PairConfig,
    architectures=(),
    speculators_type=None,
    mark="pair_rank",
    keys=frozenset(_PAIR_KEYS),
    projector="d2sd_pair",
    read=lambda places: PairConfig(**read_sizes(_PAIR_KEYS, places)),
    fields=partial(sizes, _PAIR_KEYS),
    unquantized=("pair_head*",),
)


HEADS = (DSPARK, DFLASH2, PAIR)
#: The architecture of a drafter without a head.
PLAIN = "DFlashDraftModel"
#: Keys of config.json that `find_head` checks, wherever they are; and those of the rows that propose.
_SLOTS = ("sample_from_anchor", "shift_label")  # the second is ModelOpt's
KEYS = frozenset(_SLOTS).union(*(layout.keys for layout in HEADS))
#: Architectures of drafters, with a head or without.
ARCHITECTURES = frozenset({PLAIN}).union(*(layout.architectures for layout in HEADS))
#: Patterns of a head's modules, which checkpoints hold in 16 bits.
UNQUANTIZED = tuple(pattern for layout in HEADS for pattern in layout.unquantized)
_OFF = (None, 0, False, "none")
_RENAMED = {theirs: ours for layout in HEADS for theirs, ours in layout.renamed.items()}


def find_head(places: Places) -> HeadLayout | None:
    """The kind of a drafter's head, from the parts of its config; raises `CheckpointError` naming file and key."""
    marked = [layout for layout in HEADS if places.value(layout.mark) not in _OFF]
    if len(marked) > 1:
        raise places.home(marked[1].mark).refuse("The drafter has two heads.", marked[1].mark, "no such key")
    found = marked[0] if marked else None
    for layout in HEADS:
        if layout is found:
            continue
        if places.value(layout.mark) is None and _names(layout, places):
            raise CheckpointError(
                f"The size of the {layout.name} head is missing.",
                where=f"{places.home(layout.mark).where}: {layout.mark}",
                expected="that of its tensors",
            )
        for key in sorted(layout.keys - (found.keys if found else set())):
            if places.value(key) not in _OFF:
                what = f"This key belongs to a {layout.name} head, which the drafter does not have."
                raise places.home(key).refuse(what, key, f"{layout.mark}, or no such key")
    projector = found.projector if found else None
    if places.value("projector_type") not in (*_OFF, projector):
        expected = f"{projector}, or no such key" if projector else "no such key"
        raise places.home("projector_type").refuse("This head is not supported.", "projector_type", expected)
    return found


def _names(layout: HeadLayout, places: Places) -> bool:
    """Whether a config names a head of this kind in other ways than by its keys."""
    architectures = places.value("architectures")
    named = isinstance(architectures, list) and any(name in layout.architectures for name in architectures)
    return named or (layout.projector is not None and places.value("projector_type") == layout.projector)


def read_slots(places: Places, layout: HeadLayout | None) -> bool:
    """Whether the anchor's row proposes, of a drafter with a head of this kind or none."""
    said = [key for key in _SLOTS if places.value(key) is not None]
    values = [places.home(key).get(key, bool) for key in said]
    if len(set(values)) > 1:
        raise places.home(said[1]).refuse(f"{said[1]} contradicts {said[0]}.", said[1], values[0])
    return values[0] if values else layout is not None and layout.sample_from_anchor


def layout_of(head: HeadConfig) -> HeadLayout:
    """The row of a head's kind."""
    return next(layout for layout in HEADS if isinstance(head, layout.config))


def token_rows(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors of a head with a row for each token: of the target's here, in speculators of those that it drafts."""
    return layout_of(config.head).token_rows if config.head else ()


def all_rows(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors over the draft vocabulary, with rows of zeros for the other tokens, which are not drafted."""
    ids = config.draft_vocabulary
    found: dict[str, Tensor] = {}
    for name in token_rows(config) if ids else ():
        found[name] = tensors[name].new_zeros(config.vocab_size, *tensors[name].shape[1:])
        found[name][list(ids or ())] = tensors[name]
    return found


def drafted_rows(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's tensors over the draft vocabulary alone, as speculators has them."""
    ids = config.draft_vocabulary
    return {name: tensors[name][list(ids or ())] for name in (token_rows(config) if ids else ())}


def our_name(name: str) -> str:
    """Our module's name of a drafter's tensor."""
    pairs = ((theirs, ours) for theirs, ours in _RENAMED.items() if name.startswith(theirs))
    return next((ours + name.removeprefix(theirs) for theirs, ours in pairs), name)

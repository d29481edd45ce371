"""The layouts of DSpark's Markov head, of which the bodies are DFlash's.

    SpecForge     projector_type: dspark and the keys in dflash_config; tensors markov_head.*, confidence_head.*
    LiquidAI      the head's keys at the top level; heads that RoPE turns by pairs of neighbours (`formats/read.py`)
    ModelOpt      the same keys; tensors without the head's name: markov_w1.weight, confidence_proj.weight, …
    DeepSpec      the keys at the top level (`formats/read.py`)
    speculators   the keys at the top level; markov_w2 over the draft vocabulary

    markov_head.markov_w1.weight [V, R] · markov_head.markov_w2.weight [V, R]
    markov_head.gate_proj.{weight [R, E + R], bias [R]}, of a gated head
    confidence_head.proj.{weight [1, E or E + R], bias [1]}, kept and not run

Written: SpecForge's spelling.
"""

from __future__ import annotations

from d2sd.convert.checkpoint.head_layout import HeadLayout, Places
from d2sd.modeling.drafters.head_configs import MarkovConfig

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

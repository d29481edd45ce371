"""Geometry of the three kinds of model, free of any file format (`d2sd.convert` fills these from config.json)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Family = Literal["llama", "qwen2", "qwen3"]
Role = Literal["first", "variable_prefix"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is Hugging Face's rope_type; each other field names the kinds that use it."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None means 0.1·ln(factor) + 1

    def __post_init__(self) -> None:
        assert self.kind in ("default", "linear") or self.original_max_positions > 0, "llama3 and yarn need it"


@dataclass(frozen=True, slots=True)
class BodyConfig:
    """What one transformer layer needs, the same for target and drafter."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    qk_norm: bool  # RMSNorm over each head's q and k (Qwen3, DFlash drafters)
    qkv_bias: bool  # Qwen2
    o_bias: bool  # Llama with attention_bias


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A target: Llama, Qwen2 or Qwen3."""

    family: Family
    body: BodyConfig
    vocab_size: int
    tie_word_embeddings: bool


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash-shaped drafter; it borrows the target's embedding and head, so `body.hidden_size` is the target's.

    target_layer_ids: ascending; id i means the *output of target layer i*, Hugging Face's `hidden_states[i + 1]`
    (the z-lab convention; of the last layer, before the final norm). Slot 0 of a block holds the anchor; slot k
    predicts the token at its own position.

    draft_vocabulary: ascending; the ids that may be drafted, None for all. It saves the rest of the head and changes no
    tensor of the checkpoint: other runtimes run the same drafter with the whole head. It never contains the mask.
    """

    body: BodyConfig
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    role: Role
    prefix_weight_base: float | None = None  # variable_prefix: Pr(n visible tokens) ∝ base^n in training
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)  # thousands of numbers

    def __post_init__(self) -> None:
        ids = self.draft_vocabulary
        if ids is not None:
            _check_draft_vocabulary(ids, self.vocab_size)
            assert self.mask_token_id not in ids, "the mask cannot be drafted"


@dataclass(frozen=True, slots=True)
class FlexConfig:
    """FlexDraft: what the target's last layers need to draft behind mask rows (`d2sd.modeling.flex`).

    `body` is the target's with `num_layers` counting the layers that draft, the last ones. Slot 0 of a block stands at
    the anchor's position; slot k predicts the token at its own position.
    """

    family: Family
    body: BodyConfig
    vocab_size: int
    block_size: int
    num_target_layers: int
    calibration_size: int  # hidden size of the calibration network
    anchored: bool = False  # slot 0 holds the anchor, as in `DrafterConfig`: sequential mode only
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)  # as in `DrafterConfig`

    def __post_init__(self) -> None:
        assert 1 <= self.split_layer < self.num_target_layers, "the first layer is the target's alone"
        if self.draft_vocabulary is not None:
            _check_draft_vocabulary(self.draft_vocabulary, self.vocab_size)

    @property
    def split_layer(self) -> int:
        """The first layer with mask rows."""
        return self.num_target_layers - self.body.num_layers


def _check_draft_vocabulary(ids: tuple[int, ...], vocab_size: int) -> None:
    assert len(ids) >= 2, "the second draft rejects one token, so two are needed"
    assert list(ids) == sorted(set(ids)), "ids are ascending and unique"
    assert ids[0] >= 0, "ids are not negative"
    assert ids[-1] < vocab_size, "ids are the target's"


def described(config: DecoderConfig | DrafterConfig | FlexConfig) -> str:
    """The geometry in one line of text."""
    body = config.body
    heads = f"{body.num_heads}/{body.num_kv_heads} heads of {body.head_dim}"
    shape = f"{body.num_layers} layers, hidden {body.hidden_size}, {heads}, vocabulary {config.vocab_size}"
    if isinstance(config, FlexConfig):
        where = f"drafts in target layers {config.split_layer} to {config.num_target_layers - 1}"
        return f"{shape}, {where}{', anchored' if config.anchored else ''}"
    ids = getattr(config, "target_layer_ids", None)
    return shape if ids is None else f"{shape}, reads target layers {', '.join(map(str, ids))}"

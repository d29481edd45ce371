"""An EAGLE-3 head without PyTorch: its geometry, the policies that it cannot run, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from d2sd.modeling.config import BodyConfig, DecoderConfig, check_draft_vocabulary, described
from d2sd.modeling.shapes import LinearShape, Parts, target_parts
from d2sd.policies import FACTS, DrafterRole, FirstPass, PolicyName


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Geometry of one layer that drafts token after token, with a head of its own; `body.hidden_size` is the target's.

    A row pairs a token with the fused features of the token before it. It has the token's place here, one behind that
    of its features, by which its positions rotate.
    """

    kind: ClassVar[str] = "eagle3"
    borrows_mlps: ClassVar[bool] = False
    graph_refusal: ClassVar[str | None] = (
        "EAGLE-3 heads are not exported: each of their passes is behind the one before."
    )

    layer: BodyConfig  # of one layer
    vocab_size: int
    block_size: int  # rows of a block, as in `DrafterConfig`: one more than it drafts
    target_layer_ids: tuple[int, ...]  # as in `DrafterConfig`
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)  # the rows of its head; None: all ids

    def __post_init__(self) -> None:
        if self.draft_vocabulary is not None:
            check_draft_vocabulary(self.draft_vocabulary, self.vocab_size)

    @property
    def body(self) -> BodyConfig:
        """The layer, and as many behind it as hold a token's fused features in place of keys and values."""
        token = 2 * self.layer.num_kv_heads * self.layer.head_dim
        return replace(self.layer, num_layers=1 - -self.layer.hidden_size // token)

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes: a row does, but the last one, behind the token before."""
        return self.block_size - 1

    def refusal(self, policy: PolicyName) -> str | None:
        """No second drafter drafts behind it, and it does not draft in the pass that verifies."""
        facts = FACTS[policy]
        if facts.second_pass is DrafterRole.SECOND and facts.fallback is None:
            return "No second drafter drafts behind an EAGLE-3 head."
        return f"An EAGLE-3 head has no {policy}." if facts.first_pass is FirstPass.CARRIED else None

    def precision_refusal(self, precision: str) -> str | None:
        """None: it runs in all."""
        return None

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.target_layer_ids))
        return f"{described(self.layer, self.vocab_size)}, reads target layers {layers}, drafts token after token"


def eagle_parts(config: Eagle3Config) -> Parts:
    """Parts of `Eagle3`: those of a target of one layer, which has no embedding, and reads two vectors at a time."""
    hidden, ids = config.layer.hidden_size, config.draft_vocabulary
    parts = target_parts(DecoderConfig("llama", config.layer, config.vocab_size if ids is None else len(ids), False))
    del parts["embed_tokens.weight"]
    parts["draft_head"] = parts.pop("lm_head")
    for name, part in parts.items():
        if isinstance(part, LinearShape) and name.endswith(("q_proj", "k_proj", "v_proj")):
            parts[name] = replace(part, inputs=2 * hidden)
    parts["fc"] = LinearShape(len(config.target_layer_ids) * hidden, hidden)
    parts["layers.0.hidden_norm.weight"] = (hidden,)
    return parts

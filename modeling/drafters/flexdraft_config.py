"""A FlexDraft head without PyTorch: its geometry, the policies that it cannot run, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from d2sd.modeling.config import BodyConfig, Family, check_draft_vocabulary, described
from d2sd.modeling.shapes import LinearShape, Parts, attending, below
from d2sd.policies import FACTS, FirstPass, PolicyName


@dataclass(frozen=True, slots=True)
class FlexConfig:
    """Geometry of the target's last layers as they draft behind mask rows.

    `body` is the target's with `num_layers` counting the layers that draft, the last ones. Slot 0 of a block stands at
    the anchor's position; slot k predicts the token at its own position.
    """

    kind: ClassVar[str] = "flexdraft"
    borrows_mlps: ClassVar[bool] = True
    target_layer_ids: ClassVar[tuple[int, ...]] = ()  # it reads the target's pages
    graph_refusal: ClassVar[str | None] = None

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
            check_draft_vocabulary(self.draft_vocabulary, self.vocab_size)

    @property
    def split_layer(self) -> int:
        """The first layer with mask rows."""
        return self.num_target_layers - self.body.num_layers

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - 1

    def refusal(self, policy: PolicyName) -> str | None:
        """No drafter drafts behind its drafts. An anchored head has no parallel mode: mask rows behind a node do not
        know what follows it.
        """
        facts = FACTS[policy]
        if facts.second_pass is not None:
            return "A FlexDraft head makes one pass a step, and no drafter drafts behind it."
        anchored = self.anchored and facts.first_pass is FirstPass.CARRIED
        return "An anchored FlexDraft head has no parallel mode." if anchored else None

    def precision_refusal(self, precision: str) -> str | None:
        """None: it runs in all."""
        return None

    def __str__(self) -> str:
        where = f"drafts in target layers {self.split_layer} to {self.num_target_layers - 1}"
        return f"{described(self.body, self.vocab_size)}, {where}{', anchored' if self.anchored else ''}"


def flex_parts(config: FlexConfig) -> Parts:
    """Parts of `FlexHead`."""
    hidden, ids = config.body.hidden_size, config.draft_vocabulary
    parts: Parts = {"mask_embedding": (hidden,)}
    for index in range(config.body.num_layers):
        parts |= below(f"layers.{index}", attending(config.body))
    parts["calibration.inner"] = LinearShape(2 * hidden, config.calibration_size, bias=True)
    outputs = config.vocab_size if ids is None else len(ids)
    parts["calibration.outer"] = LinearShape(config.calibration_size, outputs, bias=True)
    if config.anchored:
        parts["anchor_projection"] = LinearShape(hidden, hidden)
    return parts

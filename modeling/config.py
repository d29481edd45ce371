"""Geometry of targets and of drafters, free of any file format (`d2sd.convert` fills these from config.json)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from d2sd.policies import FACTS, FirstPass, PolicyName

if TYPE_CHECKING:
    from d2sd.modeling.drafters.head_configs import HeadConfig
    from d2sd.modeling.mixers.configs import RecurrentConfig

Family = Literal[
    "llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "gemma4_text", "gemma4_unified_text",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe",
]  # fmt: skip
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
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    turning: float = 1.0  # the share of the angles, the first ones, that are not 0 (Gemma 4's "proportional")

    def __post_init__(self) -> None:
        assert self.kind in ("default", "linear") or self.original_max_positions > 0, "llama3 and yarn need it"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Experts in place of a layer's MLP, of which a router chooses some for each row (`d2sd.modeling.experts`)."""

    count: int
    chosen: int  # for a row
    intermediate_size: int  # of each
    normalized: bool  # the weights of the chosen ones sum to 1
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP
    bias: bool = False  # of router and experts (gpt-oss)
    limit: float | None = None  # of what enters the SwiGLU, whose second factor is then up + 1 (gpt-oss)
    #: Width of an MLP that every row enters as well, and whose output has a gate of its own; None: there is none.
    shared_size: int | None = None
    #: Each expert is weighted by its own sigmoid, and chosen by that and a bias that is not weighed (LFM2).
    sigmoid: bool = False


@dataclass(frozen=True, slots=True)
class BodyConfig:
    """Geometry of a transformer layer, the same for target and drafter."""

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
    #: Of each layer, most tokens that a row sees, itself included; None: all. (): no layer has a window.
    windows: tuple[int | None, ...] = ()
    #: Of each layer, whether a row sees none behind its own position, whatever the mask among rows says; (): the mask
    #: alone says it.
    causal: tuple[bool, ...] = ()
    sinks: bool = False  # a learned logit a query head, which takes part in each softmax and has no value
    experts: ExpertsConfig | None = None
    # Gemma
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate
    norm_offset: bool = False  # norms scale by 1 + weight, and round once
    branch_norms: bool = False  # what attention and MLP add is normalized too
    query_scale: float = 1.0  # of queries, besides 1/√D
    local_rope: RopeConfig | None = None  # of layers with a window
    # Gemma 4
    wide_norms: bool = False  # norms scale in fp32, and round once
    #: K/V heads of layers without a window, and their size, which queries have, too: their values are made of the keys'
    #: product. None: all layers are alike.
    global_heads: tuple[int, int] | None = None
    keys_are_values: bool = False  # of a layer `at` its place
    value_norm: bool = False  # values are normalized, without a weight
    layer_scale: bool = False  # the output of a layer is multiplied by a number that it stores
    recurrent: RecurrentConfig | None = None  # mixers that replace the attention of some layers
    # Qwen3-Next, Qwen3.5
    rotary_dim: int | None = None  # of a head, its first numbers, which rotate; None: all
    output_gate: bool = False  # `q_proj` makes a gate of each head's output, too

    def __post_init__(self) -> None:
        assert len(self.windows) in (0, self.num_layers), "a window for each layer"
        assert len(self.causal) in (0, self.num_layers), "causality for each layer"
        assert self.recurrent is None or not (self.windows or self.causal), "hybrids attend to all that is before a row"

    def at(self, index: int) -> BodyConfig:
        """The geometry of layer `index` by itself: with its own heads."""
        if self.global_heads is None or self.windows[index] is not None:
            return self
        heads, size = self.global_heads
        scale = self.query_scale * (size / self.head_dim) ** 0.5
        return replace(self, num_kv_heads=heads, head_dim=size, query_scale=scale, keys_are_values=True)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that attend, and have keys and values."""
        others = () if self.recurrent is None else self.recurrent.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in others)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a request's recurrent states, of a model whose numbers have `itemsize` bytes."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes(itemsize)

    @property
    def views(self) -> tuple[tuple[int | None, bool], ...]:
        """Window and causality of each layer that attends: what its rows see."""
        count = len(self.attention_layers)
        return tuple(zip(self.windows or (None,) * count, self.causal or (False,) * count, strict=True))

    def dense(self, num_layers: int) -> BodyConfig:
        """Llama's layers of these widths, heads and positions."""
        return BodyConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope=self.rope,
            max_positions=self.max_positions,
            qk_norm=False,
            qkv_bias=False,
            o_bias=False,
        )

    @property
    def beyond_llama(self) -> tuple[str, ...]:
        """Parts that Llama's and dense Qwen's layers lack, for code that runs only those to refuse by name."""
        names = {
            "experts": self.experts is not None,
            "sliding windows": any(window is not None for window in self.windows),
            "attention sinks": self.sinks,
            "layers of which some are causal": len(set(self.causal)) > 1,
            "norms of 1 + weight": self.norm_offset,
        }
        found = (*(name for name, there in names.items() if there), *self.beyond_fused, *self.beyond_compiled)
        return tuple(dict.fromkeys(found))

    @property
    def _beyond_both(self) -> dict[str, bool]:
        """Parts of `beyond_llama` that neither fused nor compiled layers have, and whether they are there."""
        return {
            "heads of two sizes": self.global_heads is not None,
            "normalized values": self.value_norm,
            "scaled layers": self.layer_scale,
        }

    @property
    def beyond_fused(self) -> tuple[str, ...]:
        """Parts of `beyond_llama` that fused layers lack."""
        names = {
            "GeGLU": self.activation != "silu",
            "norms of branches": self.branch_norms,
            "scaled queries": self.query_scale != 1,
            "a second RoPE": self.local_rope is not None,
        } | self._beyond_both
        return tuple(name for name, there in names.items() if there)

    @property
    def beyond_compiled(self) -> tuple[str, ...]:
        """Parts of `beyond_llama` that compiled layers on a CPU lack."""
        names = {
            "gated attention": self.output_gate,
            "partial rotation": self.rotary_dim is not None,
            "shared experts": self.experts is not None and self.experts.shared_size is not None,
        } | self._beyond_both
        recurrent = () if self.recurrent is None else (self.recurrent.name,)
        return (*recurrent, *(name for name, there in names.items() if there))

    @property
    def expert_weights(self) -> int:
        """Weights of the experts in all layers, without biases."""
        experts = self.experts
        if experts is None:
            return 0
        layers = self.num_layers - len(experts.dense_layers)
        return layers * experts.count * 3 * self.hidden_size * experts.intermediate_size


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A target of any family."""

    family: Family
    body: BodyConfig
    vocab_size: int
    tie_word_embeddings: bool
    embedding_scale: float = 1.0  # of embeddings, not of a head that is tied to them (Gemma)
    logit_cap: float | None = None  # logits x become cap · tanh(x / cap) (Gemma 4)

    def __str__(self) -> str:
        return described(self.body, self.vocab_size)


class DraftConfig(Protocol):
    """The fields that every kind of drafter has."""

    kind: ClassVar[str]  # of `d2sd.convert.kinds.KINDS`
    borrows_mlps: ClassVar[bool]  # its layers have the target's MLPs

    @property
    def graph_refusal(self) -> str | None:
        """The reason why it is not exported to a graph; None if it is."""

    @property
    def body(self) -> BodyConfig:
        """Geometry of its layers."""

    @property
    def vocab_size(self) -> int:
        """The target's."""

    @property
    def block_size(self) -> int:
        """Rows of the blocks that it was trained with, the anchor's included."""

    @property
    def drafts(self) -> int:
        """Tokens that such a block proposes."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads, as in `DrafterConfig`; none for kinds without pages of their own."""

    @property
    def draft_vocabulary(self) -> tuple[int, ...] | None:
        """The ids that it drafts; None for all."""

    def refusal(self, policy: PolicyName) -> str | None:
        """The reason why it cannot run a policy of its role; None if it can."""

    def precision_refusal(self, precision: str) -> str | None:
        """The reason why it cannot run in a recipe's `precision`; None if it can."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash-shaped drafter; it borrows the target's embedding and head, so `body.hidden_size` is the target's.

    target_layer_ids: ascending; id i means the *output of target layer i*, Hugging Face's `hidden_states[i + 1]`
    (the z-lab convention; of the last layer, before the final norm).

    Rows of a block see each other, those behind them too, except in layers that are causal (`body.causal`). Row 0 of a
    block holds the anchor. Row k predicts the token at its own position, so the anchor's row proposes
    nothing; with `sample_from_anchor` (DeepSpec's and speculators' term) it predicts the token behind its own.

    draft_vocabulary: ascending; the ids that may be drafted, None for all. It saves the rest of the head and changes no
    tensor of the checkpoint: other runtimes run the same drafter with the whole head. It never contains the mask.
    """

    kind: ClassVar[str] = "dflash"
    borrows_mlps: ClassVar[bool] = False

    body: BodyConfig
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    role: Role
    prefix_weight_base: float | None = None  # variable_prefix: Pr(n visible tokens) ∝ base^n in training
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)  # thousands of numbers
    head: HeadConfig | None = None  # what scores candidates behind their parents; None: they are scored alone
    sample_from_anchor: bool = False
    logit_cap: float | None = None  # of the target's head, if the drafter's config says it
    mask_embedding: bool = False  # masks are embedded by a vector of the drafter's own, not by the target's table

    def __post_init__(self) -> None:
        ids = self.draft_vocabulary
        if ids is not None:
            check_draft_vocabulary(ids, self.vocab_size)
            assert self.mask_token_id not in ids, "the mask cannot be drafted"

    @property
    def drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def graph_refusal(self) -> str | None:
        """The refusal of its head."""
        return None if self.head is None else self.head.graph_refusal

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.target_layer_ids))
        head = "" if self.head is None else f", {self.head.name} head"
        return f"{described(self.body, self.vocab_size)}, reads target layers {layers}{head}"

    def refusal(self, policy: PolicyName) -> str | None:
        """Reason that this kind has no such policy: it does not draft behind the nodes that a step verifies."""
        return f"A DFlash drafter has no {policy}." if FACTS[policy].first_pass is FirstPass.CARRIED else None

    def precision_refusal(self, precision: str) -> str | None:
        """The refusal of its head."""
        return None if self.head is None else self.head.precision_refusal(precision)


def check_draft_vocabulary(ids: tuple[int, ...], vocab_size: int) -> None:
    """Assert that ids are ascending and the target's."""
    assert len(ids) >= 2, "the second draft rejects one token, so two are needed"
    assert list(ids) == sorted(set(ids)), "ids are ascending and unique"
    assert ids[0] >= 0, "ids are not negative"
    assert ids[-1] < vocab_size, "ids are the target's"


def described(body: BodyConfig, vocab_size: int) -> str:
    """The geometry of layers in one line of text."""
    heads = f"{body.num_heads}/{body.num_kv_heads} heads of {body.head_dim}"
    if body.global_heads is not None:
        heads += " ({} of {} without a window)".format(*body.global_heads)
    experts = "" if body.experts is None else f", {body.experts.chosen} of {body.experts.count} experts"
    if body.recurrent is not None:
        heads = f"{len(body.recurrent.layers)} of them {body.recurrent.name}, {heads}"
    return f"{body.num_layers} layers, hidden {body.hidden_size}, {heads}{experts}, vocabulary {vocab_size}"


def block_rows(config: DraftConfig, block_size: int) -> int:
    """Rows of a drafter's block where a step commits at most `block_size` tokens: a larger block is cut."""
    return config.block_size - max(0, config.drafts - (block_size - 1))

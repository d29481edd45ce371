"""The parts that target and drafter share. Parameter names are Hugging Face's, so checkpoints load without a map.

Rotary position embedding: formulas are Hugging Face's (`transformers.modeling_rope_utils`); tests compare with it. The
half-split layout is used: the first and second half of a head are the two coordinates that rotate together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from d2sd.modeling.config import BodyConfig, RopeConfig
from d2sd.modeling.experts import Experts
from d2sd.modeling.feed_forward import MLP, FeedForward, PackProduct, sigmoid
from d2sd.plugins.cascade_attention.arguments import move_broken
from d2sd.plugins.layer_ops import rope_tables

CosSin = tuple[Tensor, Tensor]


class TokenRows(NamedTuple):
    """The input of layers that look their embeddings up themselves."""

    tokens: Tensor  # [B, T] int64
    table: Tensor  # [V, E]

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T, E of the embeddings."""
        batch, rows = self.tokens.shape
        return batch, rows, self.table.shape[1]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return `([D/2] fp32 inverse frequencies, scale of cos and sin)`."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain[int(rope.turning * head_dim // 2) :] = 0
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        # Wavelengths longer than the original context are stretched, short ones kept, those between interpolated.
        wavelength = 2 * math.pi / plain
        smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * plain / rope.factor + smooth * plain, 1.0
    assert rope.kind == "yarn", rope.kind
    return _yarn(rope, plain, head_dim)


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    def dimension(rotations: float) -> float:
        """Index of the frequency that turns `rotations` times within the original context."""
        period = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequencies = plain / rope.factor * ramp + plain * (1 - ramp)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return frequencies, scale


class Rotary(torch.nn.Module):
    """Turns positions into the cos/sin pair that `rotate` applies. It has no parameters, and moves with its model."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        # Not a buffer: model.to(bf16) would round it. Computed on the CPU even under torch.device("meta").
        with torch.device("cpu"):
            self._frequencies, self._scale = inverse_frequencies(rope, head_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`Module.to` and the like: the frequencies follow the model's device and stay fp32.

        Moving them at the first call instead would be a host-to-device copy, which a CUDA graph cannot capture.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._frequencies = self._frequencies.to(fn(self._frequencies).device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> CosSin:
        """Positions [...], absolute -> cos, sin [..., 1, D] (broadcast over heads) in `dtype`.

        Angles are computed in fp32 whatever the model's dtype: positions above 256 are not exact in bf16.
        """
        angles = positions[..., None, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat([cos, cos], -1).to(dtype), torch.cat([sin, sin], -1).to(dtype)

    @property
    def factors(self) -> tuple[Tensor, float]:
        """Frequencies [D/2] fp32, and what cosines and sines are multiplied by, as `embed_norm_rope` takes them."""
        return self._frequencies, self._scale

    def tables(self, positions: Tensor, dtype: torch.dtype, front: Tensor | None = None) -> CosSin:
        """The same numbers, each once, in one kernel: positions [...] of R rows, behind those in `front`, if there are
        any -> cos, sin [R, D/2].
        """
        return rope_tables(positions, self._frequencies, self._scale, dtype, front)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate `x [..., heads, D]` by the angles of `Rotary`; of fewer than D numbers, the first of each head."""
    cos, sin = cos_sin
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([rotate(x[..., :size], cos_sin), x[..., size:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attend(Protocol):
    """Attention of rows in a layer. It holds the context: pages at inference (`KVPool.attend`), a whole packed sequence
    in training.
    """

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """q [B, T, Hq, D], k, v [B, T, Hkv, D] and the layer's sinks [Hq] -> [B, T, Hq, D]."""


def normalized(x: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last axis, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, offset: bool = False, wide: bool = False) -> None:
        """`offset`: scale by 1 + weight in fp32, Gemma's way; `wide`: by weight in fp32, Gemma 4's."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._offset, self._wide = offset, wide

    @property
    def scale(self) -> Tensor:
        """The factors of the normalized axis."""
        return 1 + self.weight.float() if self._offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in fp32 and scale in x's dtype, in Hugging Face's order of rounding."""
        normed = normalized(x, self.eps)
        if self._offset or self._wide:
            return (normed * self.scale).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def norm_of(config: BodyConfig, size: int | None = None) -> RMSNorm:
    """A norm of hidden states, or of heads of `size`, as the layers of this geometry have it."""
    size = config.hidden_size if size is None else size
    return RMSNorm(size, config.rms_norm_eps, offset=config.norm_offset, wide=config.wide_norms)


def feed_forward(config: BodyConfig, index: int) -> FeedForward:
    """The feed-forward network of layer `index`."""
    experts = config.experts
    if experts is None or index in experts.dense_layers:
        return MLP(config.hidden_size, config.intermediate_size, gelu=config.activation == "gelu_tanh")
    return Experts(config.hidden_size, experts)


class Mixer(nn.Module):
    """The part of a layer that mixes the tokens of rows: attention over keys and values, or a recurrence."""

    #: Whether its memory is states (`StatePass`), not pages (`Attend`).
    recurrent: ClassVar[bool] = False

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, memory: Any) -> tuple[Tensor, Any]:
        """[B, T, E] -> (what it adds [B, T, E], what its rows commit: `KeysValues` or `StateRows`).

        `memory` is of all layers of its kind, of which it is layer `index`.
        """
        raise NotImplementedError

    def groups(self, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
        """Linear layers, those of one input together: fused layers make one product of them. The last makes what the
        mixer adds.
        """
        raise NotImplementedError


class KeysValues(NamedTuple):
    """Keys and values of rows that may be committed, of one layer, or of all [L, ...]."""

    k: Tensor  # [B, T, Hkv, D]; of all layers, where their heads differ, [L, B, T, W]: see `stack`
    v: Tensor

    @classmethod
    def stack(cls, layers: Sequence[KeysValues]) -> KeysValues:
        """Join the rows of each layer into those of all; where their heads differ, flat, and as wide as the widest."""
        if len({layer.k.shape for layer in layers}) > 1:
            flat = [[part.flatten(-2) for part in layer] for layer in layers]
            widest = max(k.shape[-1] for k, _ in flat)
            layers = [cls(*(nn.functional.pad(part, (0, widest - part.shape[-1])) for part in layer)) for layer in flat]
        return cls(torch.stack([layer.k for layer in layers]), torch.stack([layer.v for layer in layers]))


class Attention(Mixer):
    """The projections around an attention op that the caller supplies."""

    sinks: nn.Parameter | None  # [Hq], see `BodyConfig`

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, config.num_heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * size, hidden, bias=config.o_bias)
        self.q_norm = norm_of(config, size) if config.qk_norm else nn.Identity()
        self.k_norm = norm_of(config, size) if config.qk_norm else nn.Identity()
        self.query_scale = config.query_scale
        self.register_parameter("sinks", nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None)
        self.k_cache: nn.Module = nn.Identity()  # see d2sd.modeling.fp8
        self.v_cache: nn.Module = nn.Identity()

    def queries(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """[..., E] -> rotated queries [..., Hq, D]."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos_sin)
        return q if self.query_scale == 1 else q * self.query_scale

    def keys_values(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """[..., E] -> rotated keys and plain values, each [..., Hkv, D]."""
        projected = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        k, v = self.k_cache(rotate(self.k_norm(projected), cos_sin)), self.v_cache(self.values(x, projected))
        if k.is_cuda and not torch.is_grad_enabled():  # in front of kernels, as `qk_norm_rope` does
            move_broken(k, v)
        return k, v

    def values(self, x: Tensor, _keys: Tensor) -> Tensor:
        """x [..., E], and the keys' product of it [..., Hkv, D] -> values [..., Hkv, D]."""
        values: Tensor = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return values

    def output(self, heads: Tensor) -> Tensor:
        """[..., Hq, D] -> [..., E]."""
        out: Tensor = self.o_proj(heads.flatten(-2))
        return out

    def groups(self, *, exact: bool) -> tuple[tuple[nn.Module, ...], ...]:
        return (self.q_proj, self.k_proj, self.v_proj), (self.o_proj,)

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, memory: Attend) -> tuple[Tensor, KeysValues]:
        k, v = self.keys_values(x, cos_sin)
        heads = memory(index, self.queries(x, cos_sin), k, v, sinks=self.sinks)
        return self.output(heads), KeysValues(k, v)


class GatedAttention(Attention):
    """Attention whose `q_proj` makes of each head a query and, behind it, a gate of the head's output (Qwen3-Next)."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__(config)
        size = 2 * config.num_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=config.qkv_bias)

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, memory: Attend) -> tuple[Tensor, KeysValues]:
        projected, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = self.keys_values(x, cos_sin)
        heads = memory(index, rotate(self.q_norm(projected), cos_sin), k, v, sinks=self.sinks)
        return self.output(heads * sigmoid(gate)), KeysValues(k, v)


class ValueNormAttention(Attention):
    """Attention whose values are normalized, and in some layers made of the keys' product (Gemma 4)."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__(config)
        self._eps = config.rms_norm_eps
        if config.keys_are_values:
            self.register_module("v_proj", None)

    def values(self, x: Tensor, keys: Tensor) -> Tensor:
        values = keys if self.v_proj is None else super().values(x, keys)
        return normalized(values, self._eps).to(values.dtype)


class Layer(nn.Module):
    """Pre-norm transformer layer around a mixer whose memory the caller supplies."""

    #: Compiled layers can replace it.
    compiles: ClassVar[bool] = True
    #: The mixer's, as in checkpoints.
    mixer_name = "self_attn"
    self_attn: Attention  # of layers that attend

    #: Sums the outputs of both branches over ranks that have parts of the layer (`d2sd.modeling.tensor_parallel`).
    reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: BodyConfig, index: int = 0) -> None:
        super().__init__()
        if config.recurrent is not None and index in config.recurrent.layers:
            self.mixer_name = config.recurrent.module
            self.add_module(self.mixer_name, config.recurrent.code.mixer(config.recurrent, config))
        else:
            kind = ValueNormAttention if config.value_norm else GatedAttention if config.output_gate else Attention
            self.self_attn = kind(config.at(index))
        self.mlp = feed_forward(config, index)
        self.input_layernorm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    @property
    def mixer(self) -> Mixer:
        """The part that mixes tokens."""
        return cast("Mixer", getattr(self, self.mixer_name))

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin,
        index: int,
        memory: Any,
        mixer: Callable[..., tuple[Tensor, Any]] | None = None,
    ) -> tuple[Tensor, Any]:
        """x [B, T, E] -> (x of the next layer, what the rows commit); see `Mixer.forward`. `mixer`: not its own."""
        branch, rows = (mixer or self.mixer)(self.input_layernorm(x), cos_sin, index, memory)
        return self.behind_attention(x, self._whole(branch)), rows

    def _whole(self, branch: Tensor) -> Tensor:
        return branch if self.reduce is None else self.reduce(branch)

    @property
    def feed_forward_norm(self) -> RMSNorm:
        """The norm of what the feed-forward network reads."""
        return self.post_attention_layernorm

    @property
    def branch_norm(self) -> RMSNorm | None:
        """The norm of what attention adds."""
        return None

    def packed_feed_forward(self, product: PackProduct) -> nn.Module:
        """Return the module that makes what the feed-forward network adds on a CPU at inference."""
        return self.mlp.packed(product)

    def behind_attention(self, x: Tensor, branch: Tensor) -> Tensor:
        """x and what attention adds to it -> x of the next layer."""
        x = x + branch
        return x + self._whole(self.mlp(self.post_attention_layernorm(x)))


class BranchNormLayer(Layer):
    """A layer that normalizes what attention and feed-forward network add, too (Gemma).

    `post_attention_layernorm` is the norm of what attention adds; elsewhere that name is of the norm behind the sum.
    """

    def __init__(self, config: BodyConfig, index: int = 0) -> None:
        super().__init__(config, index)
        self.pre_feedforward_layernorm = norm_of(config)
        self.post_feedforward_layernorm = norm_of(config)

    @property
    def feed_forward_norm(self) -> RMSNorm:
        return self.pre_feedforward_layernorm

    @property
    def branch_norm(self) -> RMSNorm:
        return self.post_attention_layernorm

    def packed_feed_forward(self, product: PackProduct) -> nn.Module:
        return nn.Sequential(self.mlp.packed(product), self.post_feedforward_layernorm)

    def behind_attention(self, x: Tensor, branch: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(branch)
        added: Tensor = self.post_feedforward_layernorm(self._whole(self.mlp(self.pre_feedforward_layernorm(x))))
        return x + added


class ScaledLayer(BranchNormLayer):
    """One whose output is multiplied by a number that it stores (Gemma 4)."""

    def __init__(self, config: BodyConfig, index: int = 0) -> None:
        super().__init__(config, index)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def behind_attention(self, x: Tensor, branch: Tensor) -> Tensor:
        return super().behind_attention(x, branch) * self.layer_scalar


def layer_of(config: BodyConfig, index: int) -> Layer:
    """Layer `index` of a target of this geometry."""
    kind = ScaledLayer if config.layer_scale else BranchNormLayer if config.branch_norms else Layer
    return kind(config, index)

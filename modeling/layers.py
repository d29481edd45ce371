"""The parts that target and drafter share. Parameter names are Hugging Face's, so checkpoints load without a map."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.rope import CosSin, rotate

#: attend(layer index, q [B, T, Hq, D], k, v [B, T, Hkv, D]) -> [B, T, Hq, D]. The closure holds the context: pages at
#: inference (`KVPool.attend`), a whole packed sequence in training.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis in fp32 and scale in x's dtype, in Hugging Face's order of rounding."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """The projections around an attention op that the caller supplies."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, config.num_heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * size, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_cache: nn.Module = nn.Identity()  # see d2sd.modeling.fp8
        self.v_cache: nn.Module = nn.Identity()

    def queries(self, x: Tensor, cos_sin: CosSin) -> Tensor:
        """[..., E] -> rotated queries [..., Hq, D]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos_sin)

    def keys_values(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """[..., E] -> rotated keys and plain values, each [..., Hkv, D]."""
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos_sin)
        return self.k_cache(k), self.v_cache(self.v_proj(x).unflatten(-1, (-1, self.head_dim)))

    def output(self, heads: Tensor) -> Tensor:
        """[..., Hq, D] -> [..., E]."""
        out: Tensor = self.o_proj(heads.flatten(-2))
        return out


class Layer(nn.Module):
    """Pre-norm transformer layer around an attention that the caller supplies."""

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos_sin: CosSin, index: int, attend: Attend) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, E] -> (x of the next layer, this layer's k and v of the rows [B, T, Hkv, D])."""
        attention = self.self_attn
        normed = self.input_layernorm(x)
        k, v = attention.keys_values(normed, cos_sin)
        x = x + attention.output(attend(index, attention.queries(normed, cos_sin), k, v))
        return x + self.mlp(self.post_attention_layernorm(x)), k, v

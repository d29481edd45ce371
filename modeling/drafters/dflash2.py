"""The parts that DFlash 2 (z-lab) adds to DFlash: a selector of candidates, and convolutions in each layer.

    selector       δ(p, c) = ⟨A[p] ⊙ (W h), B[c]⟩        h: the slot's hidden state; A, B: codebooks over the vocabulary
    convolution    out[t] = Σ_τ (base[τ] + dynamic[t, τ]) ⊙ x[t - τ]        τ = 0, 1, … inside t's block only

Dynamic coefficients are a product of the layer's normed input, one for each group of channels. There are two sets, of
the part's input and of its output; both come from the input before it is convolved.

    normed ─┬─ convolution 0 ─ attention or MLP ─ convolution 1 ─ + residual
            └─ coefficients of both

The context, which has no rows of its own, passes none. Convolutions are computed in fp32; their results exceed the
range of fp16, which plans refuse.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.drafters.head_configs import SelectorConfig
from d2sd.modeling.drafters.heads import Head
from d2sd.modeling.layers import Attend, CosSin, KeysValues, Layer
from d2sd.plugins.pair_scores import Factors, factored
from d2sd.plugins.trees.types import Draft

# Shape letters: B requests, T rows, E hidden, R rank, V vocabulary, M candidates a slot, P parents of a slot, τ taps.


class CandidateSelector(Head):
    """Rows of its codebooks are the target's ids."""

    def __init__(self, config: SelectorConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.pool = config.candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    @property
    def successors(self) -> Tensor:
        return self.successor_codebook

    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        return factored(self.predecessor_codebook, self.hidden_projection(hidden), parents)

    def factors(self, hidden: Tensor, draft: Draft, blocks: Tensor) -> Factors:
        return Factors(self.predecessor_codebook, self.successors, self.hidden_projection(hidden))


def joined_rows(positions: Tensor, size: int | None, taps: int) -> Tensor:
    """Rows at `positions [B, T]` -> [B, τ - 1, T], whether the row 1, 2, … before is one of the same block.

    `size`: see `Drafter.forward`.
    """
    # Behind one context each block begins again where the one before it did: rows of two are never `tap` apart.
    if size is not None:
        positions = (torch.arange(positions.shape[1], device=positions.device) % size).expand_as(positions)
    steps = [positions[:, tap:] - positions[:, :-tap] == tap for tap in range(1, taps)]
    joined = [pad(step, (tap, 0)) for tap, step in enumerate(steps, 1)]
    return torch.stack(joined, 1) if joined else torch.empty_like(positions, dtype=torch.bool)[:, None][:, :0]


class Convolution(nn.Module):
    """Short convolutions along the rows of a block, before and behind a part of a layer."""

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        super().__init__()
        self._taps, self._group = taps, group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * hidden_size // group, bias=False)

    def coefficients(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients before and behind the part, for its input [B, T, E] ahead of it: [B, T, τ, E] each, fp32."""
        dynamic = self.kernel_projection(normed).float().unflatten(-1, (2, self._taps, -1))
        both = dynamic.repeat_interleave(self._group, -1) + self.base_kernel.float()
        return both[..., 0, :, :], both[..., 1, :, :]

    @staticmethod
    def convolve(x: Tensor, coefficients: Tensor, joined: Tensor) -> Tensor:
        """x [B, T, E]; `joined [B, τ - 1, T]`: whether the row 1, 2, … before is one of the same block."""
        wide = x.float()
        out = wide * coefficients[..., 0, :]
        for tap in range(1, coefficients.shape[-2]):
            earlier = pad(wide, (0, 0, tap, 0))[:, : x.shape[1]].masked_fill(~joined[:, tap - 1, :, None], 0.0)
            out = out + earlier * coefficients[..., tap, :]
        return out.to(x.dtype)


class ConvolvedLayer(Layer):
    """A layer with convolutions before and behind attention and MLP."""

    compiles = False  # compiled layers have no convolutions

    def __init__(self, config: BodyConfig, taps: int, group: int) -> None:
        super().__init__(config)
        self.attention_conv = Convolution(config.hidden_size, taps, group)
        self.mlp_conv = Convolution(config.hidden_size, taps, group)

    def forward(  # type: ignore[override]
        self, x: Tensor, cos_sin: CosSin, index: int, attend: Attend, joined: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """See `Layer.forward`; `joined` as in `Convolution.convolve`."""
        attention, convolution = self.self_attn, self.attention_conv
        normed = self.input_layernorm(x)
        before, behind = convolution.coefficients(normed)
        normed = convolution.convolve(normed, before, joined)
        k, v = attention.keys_values(normed, cos_sin)
        heads = attend(index, attention.queries(normed, cos_sin), k, v, sinks=attention.sinks)
        x = x + convolution.convolve(attention.output(heads), behind, joined)

        convolution, normed = self.mlp_conv, self.post_attention_layernorm(x)
        before, behind = convolution.coefficients(normed)
        normed = convolution.convolve(normed, before, joined)
        return x + convolution.convolve(self.mlp(normed), behind, joined), KeysValues(k, v)

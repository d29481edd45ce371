"""The parts that DSpine ("Adjacent Causal Injection for Speculative Decoding", arXiv 2609.36173) adds to DFlash, by the
formulas of SpecForge's code: behind each layer a slot is given what the slot before it predicts.

    prediction    f_l(x) = √R · (W_l x) / ‖W_l x‖                          behind layer l, in the space of tokens' codes
    injection     g_l(x, c) = x + ‖x‖ / √E · V_l (σ(A f_l(x) + P c + b) ⊙ M c)          M: the message of what is before
    a layer       x'[t] = g_l(x[t], c[t - 1])       c[t]: √R times the code of the row's token; of a mask f_l(x[t])
    score         ⟨norm(g_L(x[t], √R · code of p)), H[c]⟩                   of c behind p, x before the last injection

W, V are a layer's, A, P, M, b all layers'; codes are fixed, H is the target's head. The first row of a block is
given nothing. A slot's candidates are the likeliest by x' behind the last layer; the token before enters that injection
alone, so that scores are of first order: δ(p, c) is the score less what x' gives to c.

    a row between layers       x | the code of its token, zeros for a mask
    behind the last one        norm(x') | x before the last injection
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize, pad

from d2sd.modeling.config import BodyConfig
from d2sd.modeling.decoder import TargetModel
from d2sd.modeling.drafters.dflash2 import joined_rows
from d2sd.modeling.drafters.head_configs import InjectionConfig
from d2sd.modeling.drafters.heads import Head
from d2sd.modeling.layers import Attend, CosSin, KeysValues, Layer

# Shape letters: B requests, T rows, E hidden, R rank, V vocabulary, P parents of a slot.


class Injection(Head):
    """Rows of its codes are the target's ids."""

    def __init__(self, config: InjectionConfig, body: BodyConfig, vocab_size: int) -> None:
        super().__init__()
        self.pool, hidden, rank, message = config.candidates, body.hidden_size, config.rank, config.message
        self.transfer_codes = nn.Parameter(torch.empty(vocab_size, rank))
        self.readouts, self.writes = nn.ModuleList(), nn.ModuleList()
        for _ in range(body.num_layers):
            self.readouts.append(nn.Linear(hidden, rank, bias=False))
            self.writes.append(nn.Linear(message, hidden, bias=False))
        self.message, self.receiver_gate, self.predecessor_gate = (
            nn.Linear(rank, message, bias=False) for _ in range(3)
        )
        self.bias = nn.Parameter(torch.empty(message))
        self._scale = math.sqrt(rank)
        self._shared: tuple[TargetModel, nn.Module]  # the target and the last norm, which are not its own
        self._whole: Tensor | None = None

    def attach(self, target: TargetModel, norm: nn.Module) -> None:
        self._shared = target, norm

    def predicted(self, x: Tensor, layer: int) -> Tensor:
        """x [..., E] -> f of it behind a layer [..., R]."""
        return (self._scale * normalize(self.readouts[layer](x).float(), dim=-1)).to(x.dtype)

    def injected(self, x: Tensor, layer: int, before: Tensor) -> Tensor:
        """x [..., E] behind a layer, with c of what is before it [..., R] -> g of both [..., E]."""
        gate = self.receiver_gate(self.predicted(x, layer)) + self.predecessor_gate(before) + self.bias
        written = self.writes[layer](torch.sigmoid(gate) * self.message(before))
        rms = (torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) / math.sqrt(x.shape[-1])).to(x.dtype)
        out: Tensor = x + rms * written
        return out

    def widened(self, x: Tensor, tokens: Tensor, mask_token_id: int) -> Tensor:
        codes = embedding(tokens, self.transfer_codes).to(x.dtype)
        return torch.cat([x, codes.masked_fill((tokens == mask_token_id)[..., None], 0.0)], -1)

    def of_rows(self, positions: Tensor, size: int | None) -> tuple[Tensor, Injection]:
        """Arguments of its layers, for rows at `positions [B, T]`; see `Drafter.forward`."""
        return joined_rows(positions, size, 2)[:, 0, :, None], self

    def passed_on(self, x: Tensor, layer: int, codes: Tensor, joined: Tensor) -> Tensor:
        """x [B, T, E] behind a layer, of tokens with `codes [B, T, R]` -> the next layer's; `joined [B, T, 1]`: whether
        the row before is one of the same block.
        """
        own = torch.where((codes != 0).any(-1, keepdim=True), self._scale * codes, self.predicted(x, layer))
        return torch.where(joined, self.injected(x, layer, pad(own, (0, 0, 1, 0))[:, :-1]), x)

    @property
    def successors(self) -> Tensor:
        target = self._shared[0]
        if target.shared_head is None:
            return target.head.detach()
        if self._whole is None:  # ranks have parts of it
            self._whole = target.head_rows(torch.arange(len(self.transfer_codes), device=self.bias.device))
        return self._whole

    def predecessors(self, hidden: Tensor, parents: Tensor) -> Tensor:
        """hidden [..., 2·E], as the drafter gives it, and parents [..., P] -> [..., P, E]."""
        (normed, x), last = hidden[..., None, :].chunk(2, -1), len(self.readouts) - 1
        behind = self.injected(x, last, self._scale * embedding(parents, self.transfer_codes))
        out: Tensor = self._shared[1](behind) - normed
        return out


class InjectedLayer(Layer):
    """A layer, and what it passes on."""

    compiles = False  # compiled layers pass nothing on

    def forward(  # type: ignore[override]
        self, x: Tensor, cos_sin: CosSin, index: int, attend: Attend, joined: Tensor, injection: Injection
    ) -> tuple[Tensor, KeysValues]:
        """See `Layer.forward`; x [B, T, E + R] and what comes out as above, `joined` as in `Injection.passed_on`."""
        hidden = self.input_layernorm.weight.shape[0]
        codes = x[..., hidden:]
        x, rows = super().forward(x[..., :hidden], cos_sin, index, attend)
        behind = codes if index + 1 < len(injection.readouts) else x
        return torch.cat([injection.passed_on(x, index, codes, joined), behind], -1), rows

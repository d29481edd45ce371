"""A feed-forward network of experts, a few of which a router chooses for each row.

    rows [R, E] ──router──> chosen [R, k], weights [R, k]
    an expert's rows ──gate_up──> SwiGLU ──down──> [rows, E]        of the experts that some row chose, and no others
    sum over k of weight · output, in fp32 and in the order of the weights
    + sigmoid(gate · row) · MLP(row)                             where every row has a shared expert, too

A row's choice, products and sum are its own: logits that are equal choose the expert of the lower number, and the
order of a sum does not depend on the other rows. On a CPU the experts that were chosen are read one after the other; on
CUDA their products are one grouped product of static shapes, which a graph can capture, or are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d2sd.modeling.config import ExpertsConfig
from d2sd.modeling.feed_forward import MLP, FeedForward, PackProduct, sigmoid
from d2sd.plugins.dispatch import use_grouped_products

# Shape letters: R rows, k experts of a row, P = R·k pairs of a row and an expert, X experts, E hidden, I intermediate.

#: Bytes of weights that a gather copies at once, where there are no grouped products.
GATHERED = 1 << 28
#: gpt-oss: the sigmoid's factor in its SwiGLU.
ALPHA = 1.702
#: LFM2: added to the sum by which the weights of the chosen experts are divided.
_LEAST_SUM = 1e-6


class Router(nn.Module):
    """Chooses experts. No `nn.Linear`: it is never quantized."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self._config = config
        self.weight = nn.Parameter(torch.empty(config.count, hidden))
        self.bias = nn.Parameter(torch.empty(config.count)) if config.bias else None
        self.choice_bias = nn.Parameter(torch.empty(config.count)) if config.sigmoid else None

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [R, E] -> chosen experts [R, k], best first, and their weights [R, k] in fp32."""
        return choose(F.linear(rows, self.weight, self.bias), self._config, self.choice_bias)


def choose(logits: Tensor, config: ExpertsConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [R, X] -> the `config.chosen` best experts [R, k] and their weights [R, k] in fp32.

    `bias` [X] counts in the choice alone. `topk` may order equal logits by how many rows there are; a stable sort does
    not.
    """
    logits = logits.float()
    if bias is not None:
        scores = sigmoid(logits)
        experts = (scores + bias.float()).sort(dim=-1, descending=True, stable=True)[1][:, : config.chosen]
        weights = scores.gather(-1, experts)
        return experts, weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM) if config.normalized else weights
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    best = ordered[:, : config.chosen]
    if config.normalized:  # the softmax over all, divided by the sum of the chosen ones
        return experts[:, : config.chosen], best.softmax(-1)
    return experts[:, : config.chosen], (best - logits.logsumexp(-1, keepdim=True)).exp()


class Experts(FeedForward):
    """The experts' weights are stacked; the reader of a checkpoint brings them into this form."""

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        count, inner = config.count, config.intermediate_size
        self.router = Router(hidden, config)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden))  # all gates, then all ups
        self.down = nn.Parameter(torch.empty(count, hidden, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * inner)) if config.bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if config.bias else None
        self.shared_expert: nn.Module | None = None
        if config.shared_size is not None:
            self.shared_expert = MLP(hidden, config.shared_size)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen, weights = self.router(rows)
        outputs = self._on_cuda(rows, chosen) if rows.is_cuda else self._one_by_one(rows, chosen)
        routed = weighted_sum(outputs, weights).view_as(x)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x)
        return routed + sigmoid(self.shared_expert_gate(x)) * shared

    def packed(self, product: PackProduct) -> nn.Module:
        """Takes the weights out of this module, so that no more than a layer's are held twice."""
        made = PackedExperts(self, product)
        for name in ("gate_up", "down"):
            setattr(self, name, nn.Parameter(getattr(self, name).new_empty(0), requires_grad=False))
        return made

    def _one_by_one(self, rows: Tensor, chosen: Tensor) -> Tensor:
        def expert(number: int, own: Tensor) -> Tensor:
            inner = gated(F.linear(own, self.gate_up[number], _of(self.gate_up_bias, number)), self.config)
            return F.linear(inner, self.down[number], _of(self.down_bias, number))

        return each_used(expert, rows, chosen)

    def _on_cuda(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """[R, k, E], without reading a number on the host."""
        pairs = chosen.flatten()
        if not use_grouped_products(rows, self.gate_up.shape, self.down.shape):
            return self._gathered(rows, pairs).view(*chosen.shape, -1)
        order = pairs.argsort(stable=True)
        numbers = pairs[order]
        every = torch.arange(len(self.gate_up), device=rows.device)
        ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
        out = rows[order // chosen.shape[1]]
        out = F.grouped_mm(out, self.gate_up.mT, offs=ends)
        out = gated(_biased(out, self.gate_up_bias, numbers), self.config)
        out = _biased(F.grouped_mm(out, self.down.mT, offs=ends), self.down_bias, numbers)
        return torch.empty_like(out).index_copy_(0, order, out).view(*chosen.shape, -1)

    def _gathered(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """[P, E]: a copy of the weights for each pair, some pairs at a time."""
        at_once = max(1, GATHERED // self.gate_up[0].nbytes)
        own = rows.repeat_interleave(len(pairs) // len(rows), 0)
        parts = []
        for numbers, part in zip(torch.split(pairs, at_once), torch.split(own, at_once), strict=True):
            out = torch.bmm(self.gate_up[numbers], part[:, :, None])[..., 0]
            out = gated(_biased(out, self.gate_up_bias, numbers), self.config)
            parts.append(_biased(torch.bmm(self.down[numbers], out[:, :, None])[..., 0], self.down_bias, numbers))
        return torch.cat(parts)


def _of(stacked: Tensor | None, number: int) -> Tensor | None:
    """The bias of one expert."""
    return None if stacked is None else stacked[number]


def _biased(x: Tensor, bias: Tensor | None, numbers: Tensor) -> Tensor:
    """x [P, N] and the biases [X, N] of the experts `numbers [P]`."""
    return x if bias is None else x + bias[numbers]


def each_used(expert: Callable[[int, Tensor], Tensor], rows: Tensor, chosen: Tensor) -> Tensor:
    """[R, k, E]: `expert(number, its rows)` of every expert in `chosen [R, k]`, and of no other."""
    outputs = rows.new_empty(*chosen.shape, rows.shape[-1])
    for number in torch.unique(chosen).tolist():
        row, slot = (chosen == number).nonzero(as_tuple=True)
        outputs[row, slot] = expert(number, rows[row])
    return outputs


def gated(gate_up: Tensor, config: ExpertsConfig) -> Tensor:
    """[..., 2I], gates before ups -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if config.limit is None:
        return (F.silu(gate) if gate.is_cuda else gate * sigmoid(gate)) * up
    gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return (up + 1) * (gate * sigmoid(ALPHA * gate))


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [R, k, E], weights [R, k] fp32 -> [R, E]."""
    wide = outputs.float() * weights[..., None]
    # PyTorch's sums on a CPU may run in an order that depends on the shape; additions of two tensors cannot.
    return (wide.sum(1) if wide.is_cuda else reduce(torch.add, wide.unbind(1))).to(outputs.dtype)


class PackedExperts(nn.Module):
    """Experts on a CPU, each with packed products; holds no parameters, so it cannot be trained or saved."""

    @torch.no_grad()
    def __init__(self, experts: Experts, product: PackProduct) -> None:
        super().__init__()
        self.config = experts.config

        router = experts.router
        self._router, self._choice_bias = product(router.weight, router.bias), router.choice_bias
        stacked = (experts.gate_up, experts.gate_up_bias), (experts.down, experts.down_bias)
        self._experts = [
            [product(weight[number], _of(bias, number)) for weight, bias in stacked]
            for number in range(self.config.count)
        ]
        shared = experts.shared_expert
        self._shared = None
        if shared is not None:
            assert isinstance(shared, MLP)
            gate = experts.shared_expert_gate  # a quantized one is its own product
            self._shared = shared.packed(product), product(gate.weight, None) if type(gate) is nn.Linear else gate

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen, weights = choose(self._router(rows), self.config, self._choice_bias)

        def expert(number: int, own: Tensor) -> Tensor:
            gate_up, down = self._experts[number]
            return down(gated(gate_up(own).to(x.dtype), self.config)).to(x.dtype)

        routed = weighted_sum(each_used(expert, rows, chosen), weights).view_as(x)
        if self._shared is None:
            return routed
        mlp, gate = self._shared
        shared: Tensor = mlp(x)
        return routed + sigmoid(gate(x).to(x.dtype)) * shared

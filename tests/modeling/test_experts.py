"""Experts against their equations, in every way that they run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from d2sd.modeling import experts as module
from d2sd.modeling.config import ExpertsConfig
from d2sd.modeling.experts import Experts, choose
from d2sd.modeling.native import packed_product

CONFIGS = {
    "Qwen3-MoE": ExpertsConfig(5, 2, 12, normalized=True),
    "not normalized": ExpertsConfig(5, 2, 12, normalized=False),
    "gpt-oss": ExpertsConfig(5, 3, 12, normalized=True, bias=True, limit=0.5),
}
HIDDEN = 8


def made(config: ExpertsConfig) -> Experts:
    draw = torch.Generator().manual_seed(3)
    network = Experts(HIDDEN, config)
    for parameter in network.parameters():
        parameter.data = 0.7 * torch.randn(parameter.shape, generator=draw)
    return network.requires_grad_(False)


def by_the_equations(network: Experts, row: list[float]) -> list[float]:
    """A row's result in plain numbers."""
    config = network.config

    def product(weight: Tensor, bias: Tensor | None, x: list[float]) -> list[float]:
        sums = [sum(w * value for w, value in zip(line, x, strict=True)) for line in weight.tolist()]
        return sums if bias is None else [a + b for a, b in zip(sums, bias.tolist(), strict=True)]

    def bias(of: Tensor | None, number: int) -> Tensor | None:
        return None if of is None else of[number]

    logits = product(network.router.weight, network.router.bias, row)
    chosen = sorted(range(config.count), key=lambda number: -logits[number])[: config.chosen]
    shares = {number: math.exp(logits[number]) for number in (chosen if config.normalized else range(config.count))}
    total = [0.0] * HIDDEN
    for number in chosen:
        both = product(network.gate_up[number], bias(network.gate_up_bias, number), row)
        inner = []
        for gate, up in zip(both[: config.intermediate_size], both[config.intermediate_size :], strict=True):
            if config.limit is None:
                inner.append(gate / (1 + math.exp(-gate)) * up)
            else:
                small, bounded = min(gate, config.limit), max(-config.limit, min(up, config.limit))
                inner.append((bounded + 1) * small / (1 + math.exp(-1.702 * small)))
        out = product(network.down[number], bias(network.down_bias, number), inner)
        weight = shares[number] / sum(shares.values())
        total = [a + weight * b for a, b in zip(total, out, strict=True)]
    return total


def on_cuda(network: Experts, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    monkeypatch.setattr(module, "use_grouped_products", lambda *_: grouped)
    monkeypatch.setattr(module, "GATHERED", 3 * network.gate_up[0].nbytes)  # three pairs at once
    monkeypatch.setattr(network, "_one_by_one", network._on_cuda)
    return network


WAYS: dict[str, Callable[[Experts, pytest.MonkeyPatch], Callable[[Tensor], Tensor]]] = {
    "one by one": lambda network, _: network,
    "packed": lambda network, _: network.packed(packed_product),
    "grouped": lambda network, patch: on_cuda(network, True, patch),
    "gathered": lambda network, patch: on_cuda(network, False, patch),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_way_is_by_the_equations(config: ExpertsConfig, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(config)
    rows = torch.randn(1, 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor([by_the_equations(network, row) for row in rows[0].tolist()])[None]
    run = WAYS[way](network, monkeypatch)
    torch.testing.assert_close(run(rows), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(rows[:, 2:3]), expected[:, 2:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["one by one", "packed", "gathered"])
def test_experts_that_no_row_chose_are_not_read(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(CONFIGS["Qwen3-MoE"])
    row = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, (chosen, _) = network(row), network.router(row[0])
    for number in {0, 1, 2, 3, 4} - set(chosen[0].tolist()):
        network.gate_up[number], network.down[number] = math.nan, math.nan
    torch.testing.assert_close(WAYS[way](network, monkeypatch)(row), expected)


def test_equal_logits_choose_the_lower_number_beside_any_rows() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]])
    for count in (1, 2, 300):
        experts, weights = choose(logits.expand(count, -1), ExpertsConfig(6, 4, 1, normalized=True), None)
        assert experts.tolist() == [[1, 2, 4, 0]] * count
        assert weights.sum(-1).tolist() == pytest.approx([1.0] * count)

"""Paths of a GPU run on a CPU against what they replace: one attention a layer, and Muon of several matrices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.train.data.features import TrainingSequence, device_features, online_features
from d2sd.train.data.packing import pack_blocks
from d2sd.train.dense_attention import takes
from d2sd.train.muon import BatchedMuon
from d2sd.train.state import Optimizer
from tests.tiny import tiny_decoder, tiny_drafter
from tests.train.data.test_packing import Way, by_blocks, by_one_kernel
from tests.train.helpers import TAPS, greedy_responses, new_drafter, settings, target
from tests.train.test_loop import stepped

#: By device, and whether it is in bf16.
TOLERANCE = {("cpu", False): 1e-4, ("cpu", True): 0.1, ("cuda", False): 1e-3, ("cuda", True): 3e-2}


@pytest.mark.parametrize("attention", [{}, {"windows": (7, None), "causal": (False, True)}], ids=["plain", "windows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(40, 23), (57, 57)], ids=str)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_dense_attention_gives_the_packed_states_and_gradients(
    device: str, lengths: tuple[int, int], dtype: torch.dtype, attention: dict[str, Any]
) -> None:
    """Two sequences are packed, one with fewer blocks."""
    decoder, narrow = tiny_decoder("qwen3", layers=4, head_dim=16), dtype is torch.bfloat16
    drafter = tiny_drafter(decoder.config, block_size=8, attention=attention).requires_grad_(True).to(device)
    assert takes(drafter)
    body, draw = drafter.config.body, torch.Generator().manual_seed(0)
    width, tolerance = body.hidden_size, TOLERANCE[device, narrow]
    sequences = [
        TrainingSequence(
            torch.randint(60, (length,), generator=draw),
            4,
            torch.randn(length, width * len(drafter.config.target_layer_ids), generator=draw),
            torch.randn(length, width, generator=draw),
        )
        for length in lengths
    ]
    anchors = [torch.tensor([3, 9, 20, 37]), torch.tensor([3, 21])]
    packed = pack_blocks(sequences, anchors, 8).to(torch.device(device))
    embedded = torch.randn(2, 32, width, generator=draw).to(device)
    rows = torch.tensor([32, 16])  # the rest is padding

    def out(way: Way) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(device, dtype, enabled=narrow):
            hidden = drafter(embedded, packed.positions.flatten(1), way(drafter, packed))
        kept = torch.cat([part[:count] for part, count in zip(hidden.float(), rows.tolist(), strict=True)])
        return kept.detach(), list(torch.autograd.grad(kept.square().sum(), list(drafter.parameters())))

    (expected, slopes), (found, others) = out(by_blocks), out(by_one_kernel)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for slope, other in zip(slopes, others, strict=True):
        assert float((slope - other).norm()) <= tolerance * float(slope.norm())


def test_muon_of_several_matrices_is_muon() -> None:
    """In bf16's accuracy, three steps long; the state has the same names."""
    drafters = [new_drafter(), new_drafter()]
    optimizers = [Optimizer(drafter, settings(optimizer="muon", weight_decay=0.1)) for drafter in drafters]
    muon = optimizers[1]._parts[1]
    optimizers[1]._parts[1] = BatchedMuon(muon.param_groups[0]["params"], 0.1)
    before = copy.deepcopy(drafters[0])
    for seed in range(3):
        for drafter, optimizer in zip(drafters, optimizers, strict=True):
            stepped(optimizer, drafter, seed)
    assert optimizers[0].tensors().keys() == optimizers[1].tensors().keys()
    for (name, old), one, other in zip(before.named_parameters(), *(d.parameters() for d in drafters), strict=True):
        way = float((one.detach() - old.detach()).norm())
        assert float((one.detach() - other.detach()).norm()) <= 0.02 * way, name


def test_features_in_memory_are_those_of_single_passes() -> None:
    answers = greedy_responses() + greedy_responses(3, 7, 9)
    counted: list[int] = []
    together, alone = device_features(target(), TAPS, answers, counted.append), online_features(target(), TAPS, answers)
    assert sum(counted) == len(answers) == len(together)
    for index in range(len(answers)):
        one, other = together[index], alone[index]
        assert torch.equal(one.tokens, other.tokens)
        torch.testing.assert_close(one.features, other.features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-5, atol=1e-5)

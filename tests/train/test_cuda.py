"""Training on a GPU: the numbers of a CPU, and its attention those of the plain path. Skipped without one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.layers import Attend
from d2sd.train.data.features import TrainingSequence, device_features
from d2sd.train.data.packing import attend_packed, pack_blocks
from d2sd.train.dense_attention import attend_dense, token_context
from d2sd.train.loop import Trainer
from tests.tiny import tiny_decoder, tiny_drafter
from tests.train.helpers import TAPS, greedy_responses, new_drafter, settings, target
from tests.train.objectives.kernels_of_head import test_kernels_are_what_pytorch_computes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("length", [40, 57])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("attention", [{}, {"windows": (7, None), "causal": (False, True)}], ids=["plain", "windows"])
def test_fused_attention_gives_the_plain_states_and_gradients(
    attention: dict[str, Any], length: int, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = tiny_decoder("qwen3", layers=4, head_dim=16)
    drafter = tiny_drafter(decoder.config, block_size=8, attention=attention).requires_grad_(True).cuda()
    generator = torch.Generator().manual_seed(length)
    width = len(drafter.config.target_layer_ids) * drafter.config.body.hidden_size
    features = torch.randn(2, length, width, generator=generator)
    anchors = torch.tensor([[0, 5, 17, 30], [2, 3, 9, 0]])
    hidden_size = drafter.config.body.hidden_size
    sequences = [TrainingSequence(torch.zeros(length).long(), 1, rows, rows[:, :hidden_size]) for rows in features]
    packed = pack_blocks(sequences, list(anchors), 8).to(torch.device("cuda"))
    features, positions = packed.features, packed.positions
    embedded = torch.randn(2, 32, drafter.config.body.hidden_size, generator=generator).cuda()

    def out(attend: object) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            hidden = drafter(embedded, positions.flatten(1), attend(drafter, features, positions))  # type: ignore[operator]
        gradients = torch.autograd.grad(hidden.float().square().sum(), list(drafter.parameters()))
        return hidden.float().detach(), [gradient.float() for gradient in gradients]

    def dense(drafter: Drafter, _features: Tensor, _positions: Tensor) -> Attend:
        return attend_dense(drafter, packed, *token_context(drafter, packed))

    plain, slopes = out(attend_packed)
    fused, others = out(dense)
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    for slope, other in zip(slopes, others, strict=True):
        assert float((slope - other).norm()) <= tolerance * float(slope.norm())


@pytest.mark.parametrize("kind", ["first", "second"])
def test_a_step_on_a_gpu_is_a_step_on_a_cpu(kind: str) -> None:
    """By Muon, with features in memory; the second step was drawn while the GPU worked on the first."""
    answers = greedy_responses()
    said = []
    for device in ("cpu", "cuda"):
        decoder = deepcopy(target()).to(device)
        data = device_features(decoder, TAPS, answers, lambda count: None)
        first = new_drafter().to(device) if kind == "second" else None
        drafter = new_drafter(None if first is None else 0.9).to(device)
        chosen = settings(optimizer="muon", on_correction=0.25, objective={"slots": "dpace", "ce": 0.3, "kl": 0.7})
        made = Trainer(decoder, drafter, data, chosen, first)
        said.append(made._update()())
        made.step += 1
        said.append(made._update()())
    assert said[2] == pytest.approx(said[0], rel=1e-3)
    assert said[3] == pytest.approx(said[1], rel=1e-2), "Muon rounds to bf16"


test_the_heads_kernels = test_kernels_are_what_pytorch_computes

"""Training on a GPU: the numbers of a CPU, and FlexAttention those of the plain path. Skipped without one."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from d2sd.train.data.features import online_features
from d2sd.train.data.packing import attend_packed
from d2sd.train.loop import Trainer
from d2sd.train.sparse_attention import attend_sparse
from tests.tiny import tiny_decoder, tiny_drafter
from tests.train.helpers import TAPS, greedy_responses, new_drafter, settings, target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("length", [40, 57])  # the second one must not need another compilation to be right
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_sparse_attention_gives_the_plain_states_and_gradients(
    length: int, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = tiny_decoder("qwen3", layers=4, head_dim=16)  # the least that FlexAttention takes
    drafter = tiny_drafter(decoder.config, block_size=8).requires_grad_(True).cuda()
    generator = torch.Generator().manual_seed(length)
    width = len(drafter.config.target_layer_ids) * drafter.config.body.hidden_size
    features = torch.randn(2, length, width, generator=generator).cuda()
    anchors = torch.tensor([[0, 5, 17, 30], [2, 3, 9, 0]])
    positions = (anchors[..., None] + torch.arange(8)).cuda()
    embedded = torch.randn(2, 32, drafter.config.body.hidden_size, generator=generator).cuda()

    def out(attend: object) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            hidden = drafter(embedded, positions.flatten(1), attend(drafter, features, positions))  # type: ignore[operator]
        gradients = torch.autograd.grad(hidden.float().square().sum(), list(drafter.parameters()))
        return hidden.float().detach(), [gradient.float() for gradient in gradients]

    (plain, slopes), (fused, others) = out(attend_packed), out(attend_sparse)
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    for slope, other in zip(slopes, others, strict=True):
        assert float((slope - other).norm()) <= tolerance * float(slope.norm())


def test_a_step_on_a_gpu_is_a_step_on_a_cpu() -> None:
    answers = greedy_responses()
    said = []
    for device in ("cpu", "cuda"):
        decoder = deepcopy(target()).to(device)
        data = online_features(decoder, TAPS, answers)
        made = Trainer(decoder, new_drafter().to(device), data, settings())
        said.append(made._update())
    assert said[1] == pytest.approx(said[0], rel=1e-3)

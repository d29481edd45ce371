"""Training on a GPU: the numbers of a CPU, and its kernels those of PyTorch. Skipped without one."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from d2sd.train.data.features import device_features
from d2sd.train.loop import Trainer
from tests.train.helpers import TAPS, greedy_responses, new_drafter, settings, target
from tests.train.objectives.kernels_of_head import test_kernels_are_what_pytorch_computes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


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

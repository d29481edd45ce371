"""The compiled choice is the specification's."""

from __future__ import annotations

import pytest
import torch

from d2sd.plugins.choice.cpu import argmax
from d2sd.plugins.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason=f"no CPU kernels: {library.load()}")


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1003])
def test_argmax_takes_the_first_of_equals_and_nan_first(size: int) -> None:
    logits = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(size)).round(decimals=1)
    logits[0, 0] = float("-inf")
    logits[1, 1, size // 2 :] = float("nan")
    logits[2, 2, :] = -0.0
    logits[2, 2, size // 2] = 0.0
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert torch.equal(argmax(logits.transpose(0, 1)), logits.transpose(0, 1).argmax(-1))

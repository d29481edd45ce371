"""Trainings multiply in bf16 where the device does: elsewhere in fp32, which costs a fraction."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

import pytest
import torch

from d2sd.train.data import features
from d2sd.train.data.features import online_features
from d2sd.train.products import multiplies_bf16, product_dtype
from tests.train.helpers import TAPS, greedy_responses, target

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("native", [False, True])
def test_bf16_is_used_where_it_is_multiplied(
    precision: Literal["bf16", "fp32"], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: native)
    assert product_dtype(precision, CPU) is (torch.bfloat16 if precision == "bf16" and native else torch.float32)
    assert product_dtype(precision, GPU) is (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_this_processor_is_known() -> None:
    assert multiplies_bf16(CPU) in (False, True)


def test_features_of_bf16_weights_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once at the end, where a pass in bf16 rounds behind each product; the target stays as it is."""
    monkeypatch.setattr(features, "multiplies_bf16", lambda device: False)
    answers, half = greedy_responses(1), deepcopy(target()).bfloat16()
    found = online_features(half, TAPS, answers)[0]
    exact = (
        deepcopy(half)
        .float()
        .full_pass(torch.tensor([answers[0].prompt_ids + answers[0].response_ids]), aux_layer_ids=TAPS)
    )
    torch.testing.assert_close(found.features, exact.features[0])
    torch.testing.assert_close(found.hidden, exact.hidden[0])
    assert half.embed_tokens.weight.dtype == torch.bfloat16

"""A pass without pages on a GPU, by which near ties and perplexities are found. The H200 of 2026-11-27 ended it with an
illegal memory access: its page tables had no column and thus no address, and kernels read the first id ahead.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch

from d2sd.modeling.decoder import Decoder
from tests.tiny import runner_of, tiny_decoder


@pytest.mark.parametrize("exact", [False, True])
def test_launches_of_attention_have_page_tables(exact: bool) -> None:
    pytest.importorskip("triton", reason="the extra triton is not installed")
    from tests.runtime.meta_gpu import meta_gpu
    from tests.runtime.specialisations import Specialisations

    asked = Specialisations()
    with meta_gpu(asked), torch.inference_mode():
        made = tiny_decoder("qwen3", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16).to("meta")
        target = cast("Decoder", runner_of(made, exact=exact).target)
        found = target.full_pass(torch.zeros(2, 5, dtype=torch.long, device="meta"))
    assert found.hidden.shape == (2, 5, 64)
    assert any("attention_kernel" in one for one in asked.found["warm"])

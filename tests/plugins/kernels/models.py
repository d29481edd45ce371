"""A model over kernels: prefill, commit and decoding as `KVPool` runs them on a GPU. Under the interpreter only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from d2sd.plugins import dispatch
from tests.plugins.kernels import calls
from tests.tiny import feed, pool_for, random_tokens, tiny_decoder


def hidden(chunks: list[int]) -> Tensor:
    model = tiny_decoder(layers=2, head_dim=16)
    tokens = random_tokens(model, 2, sum(chunks))
    pool, table = pool_for(model.config.body, 2, sum(chunks))
    done, out = 0, []
    for size in chunks:
        step = tokens[:, done : done + size]
        out.append(feed(model, step, pool, table, torch.full((2,), done, dtype=torch.long)).hidden)
        done += size
    return torch.cat(out, dim=1)


def test_a_model_over_kernels_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.DEVICE == "cpu"
    with torch.inference_mode():
        expected = hidden([10])
        monkeypatch.setattr(dispatch, "use_triton", lambda pages: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        torch.testing.assert_close(hidden([6, 1, 3]), expected, rtol=1e-4, atol=1e-5)

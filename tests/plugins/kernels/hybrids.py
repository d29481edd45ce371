"""Hybrids over kernels: prompts in chunks, trees, and commits of their paths. Under the interpreter only."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.mixers import delta_net
from d2sd.modeling.mixers.configs import DeltaConfig
from d2sd.plugins import delta_rule
from tests.conftest import fuse_anywhere
from tests.modeling.test_fused_hybrids import TREE
from tests.modeling.test_hybrids import Requests
from tests.plugins.kernels import calls
from tests.plugins.on_kernels import run_kernels
from tests.tiny import random_tokens, tiny_decoder

pytestmark = pytest.mark.interpreter


def over_kernels(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A copy with fused layers, whose kernels run in the interpreter from now on."""
    run_kernels(monkeypatch, "cascade_attention", "layer_ops.silu_mul", "delta_rule")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    fuse_anywhere(monkeypatch)
    model = deepcopy(model)
    fuse(model)
    assert isinstance(model.compiled, FusedLayers)
    return model


@pytest.mark.sampled(2)
@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_hybrid_over_kernels_is_the_model(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.DEVICE == "cpu"
    plain = tiny_decoder(family, head_dim=16)
    delta = plain.config.body.recurrent
    assert isinstance(delta, DeltaConfig)
    model = tiny_decoder(family, head_dim=16, recurrent=replace(delta, key_size=16, value_size=16))
    tokens = random_tokens(model, 2, 24)

    def outputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        requests = Requests(model, 2, 24)
        found = [requests.prompt(tokens[:, :9]), requests.prompt(tokens[:, 9:10])]
        out = requests.tree(tokens[:, 10:18], TREE)
        requests.commit(out, torch.tensor([[0, 2, 3, 5], [0, 1, 4, 0]]), torch.tensor([4, 3]))
        return [*found, out.hidden, out.k, out.v, requests.decode(tokens[:, 18]), requests.states.tensors[0][:, 1:3]]

    expected = [x.nan_to_num() for x in outputs()]
    model = over_kernels(model, monkeypatch)
    for exact in (False, True):
        for name in ("tree_delta_rule", "chunk_delta_rule"):
            op = getattr(delta_rule, name)
            monkeypatch.setattr(delta_net, name, lambda *a, op=op, exact_=exact, exact: op(*a, exact=exact_))
        for found, wanted in zip(outputs(), expected, strict=True):
            torch.testing.assert_close(found.nan_to_num(), wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@torch.inference_mode()
def test_texts_without_pages_of_more_rows_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """States go on from tile to tile, in slots that the pass has for itself."""
    model = tiny_decoder("qwen3_5_text", head_dim=16)
    delta = model.config.body.recurrent
    assert isinstance(delta, DeltaConfig)
    model = tiny_decoder("qwen3_5_text", head_dim=16, recurrent=replace(delta, key_size=16, value_size=16))
    tokens = random_tokens(model, 2, 40)
    expected = model.full_pass(tokens, (0, 1))
    for name in ("tree_delta_rule", "chunk_delta_rule"):
        op = getattr(delta_rule, name)
        monkeypatch.setattr(delta_net, name, lambda *a, op=op, exact: op(*a, exact=False))
    found = over_kernels(model, monkeypatch).full_pass(tokens, (0, 1))
    for name in ("hidden", "features", "k", "v"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=5e-5)

"""Models that serve are made of whole ones, which stay as they are and hold no weight of theirs alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fused import fuse
from d2sd.modeling.inference import ServedModel
from d2sd.modeling.prepare import prepare_for_inference
from tests.conftest import fuse_anywhere
from tests.tiny import full_logits, in_fp8, random_tokens, tiny_decoder, tiny_drafter, tiny_flex

#: In place of packing: with PyTorch's operators, and as on CUDA, whose ops are their specifications here.
WAYS = ("compiled", "operators", "fused")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "compiled":
        monkeypatch.setattr("d2sd.plugins.cpu.library.available", lambda: False)
    if request.param == "fused":
        fuse_anywhere(monkeypatch)
        monkeypatch.setattr("d2sd.modeling.prepare.pack", fuse)
    return str(request.param)


def models(kind: str) -> tuple[Decoder, dict[str, DraftModel]]:
    """A target and drafters, of which one borrows its MLPs where it can."""
    family: Any = {"hybrid": "qwen3_5_text", "experts": "qwen3_moe"}.get(kind, "qwen3")
    target = tiny_decoder(family, head_dim=16)
    drafters: dict[str, DraftModel] = {"first": tiny_drafter(target.config)}
    if kind == "dense":
        drafters["flex"] = tiny_flex(target, block_size=4, layers=1)
    return (in_fp8(target) if kind == "fp8" else target), drafters


def contents(model: ServedModel) -> dict[str, int]:
    """The model's modules by name and identity."""
    return {name: id(module) for name, module in model.named_modules()}


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["dense", "hybrid", "experts", "fp8"])
def test_a_whole_model_stays_whole(kind: str, way: str) -> None:
    target, drafters = models(kind)
    every: dict[str, Any] = {"target": target, **drafters}
    before = {of: {name: x.clone() for name, x in model.state_dict().items()} for of, model in every.items()}
    modules = {of: contents(model) for of, model in every.items()}
    tokens = random_tokens(target, 2, 9)
    expected = full_logits(target, tokens)

    served, others = prepare_for_inference(target, drafters)
    assert full_logits(target, tokens).equal(expected)
    torch.testing.assert_close(full_logits(served, tokens), expected, rtol=1e-4, atol=1e-4)
    for of, model in every.items():
        now = model.state_dict()
        assert list(now) == list(before[of])
        assert all(now[name].equal(tensor) for name, tensor in before[of].items())
        assert contents(model) == modules[of]
        assert not model.served
    assert served.served
    assert (served.compiled is None) == (way == "operators" or (way == "compiled" and kind in ("hybrid", "fp8")))

    again, same = prepare_for_inference(served, others)
    assert again is served
    assert all(same[key] is model for key, model in others.items())


def test_what_serves_keeps_no_whole_layer_alive(way: str) -> None:
    target, drafters = models("plain")
    kept = [weakref.ref(part) for model in (target, *drafters.values()) for part in model.own_layers]
    served, others = prepare_for_inference(target, drafters)
    del target, drafters
    gc.collect()
    assert served.served
    assert all(model.served for model in others.values())
    assert not any(part() for part in kept)


def test_a_drafter_borrows_of_the_target_that_serves() -> None:
    target, drafters = models("dense")
    served, others = prepare_for_inference(target, drafters)
    assert others["flex"].norm is served.norm is not target.norm
    assert drafters["flex"].norm is target.norm


def test_models_that_are_not_kept_serve_themselves() -> None:
    target, drafters = models("dense")
    served, others = prepare_for_inference(target, drafters, keep=False)
    assert served is target
    assert all(others[key] is drafter for key, drafter in drafters.items())
    assert not len(target.own_layers) or target.compiled is None

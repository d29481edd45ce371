"""The suite's checks of fused layers notice what is wrong: on a CPU, where the ops are their specifications."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")
from benchmarks.gpu import layers
from benchmarks.gpu.call import Wrong
from d2sd.plugins import dispatch
from d2sd.plugins.layer_ops import reference

#: E, I, L, Hq, Hkv, D.
TINY = (32, 48, 2, 4, 2, 16)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_fused_layers", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_models_pass(kind: str) -> None:
    assert set(layers.check_model(kind, nothing, "cpu", TINY)) >= {"hidden", "features", "k", "v", "draft", "context k"}


@pytest.mark.parametrize("op", ["add_rms_norm", "silu_mul", "qk_norm_rope"])
def test_a_wrong_op_does_not(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(reference, op)
    monkeypatch.setattr(reference, op, lambda *a, **k: right(*a, **k) * 1.001)
    with pytest.raises(Wrong):
        layers.check_model("fp32", nothing, "cpu", TINY)


def test_ops_are_compared_with_their_specifications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "launch", reference)
    found = layers.check_ops("bf16", nothing, "cpu")
    assert not any(found.values())
    names = [name for name in dir(reference) if not name.startswith("_")]
    skewed = SimpleNamespace(**{name: getattr(reference, name) for name in names})
    skewed.rope_tables = lambda *a: tuple(table * 1.01 for table in reference.rope_tables(*a))
    monkeypatch.setattr(layers, "launch", skewed)
    with pytest.raises(Wrong, match="tables"):
        layers.check_ops("bf16", nothing, "cpu")


@pytest.mark.slow
def test_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layers.check_tokens(nothing, "cpu") == layers.check_tokens(nothing, "cpu", hybrid=True) == {"tokens": 320}
    right = reference.silu_mul
    monkeypatch.setattr(reference, "silu_mul", lambda *a, **k: right(*a, **k) * 1.5)
    with pytest.raises(Wrong):
        layers.check_tokens(nothing, "cpu")

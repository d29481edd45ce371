"""The suite's products: every form is compared with PyTorch's before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the extra triton is not installed")

from benchmarks.gpu import products, timing
from d2sd.modeling import product_forms
from d2sd.modeling.product_forms import PLAIN, Form
from tests.product_forms import cuda_products  # noqa: F401

SHAPE = (32, 64)


@pytest.fixture(autouse=True)
def no_clock(cuda_products: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def once(run: Callable[[], Any]) -> tuple[float, bool]:
        run()
        return 0.5, True

    monkeypatch.setattr(timing, "once", once)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def nothing(**_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("kind", "rows", "names"),
    [
        ("bf16", 1, ["plain", "padded", "split 2", "split 4", "kernel"]),
        ("fp8", 16, ["plain", "padded", "kernel"]),
        ("bf16", 512, ["plain"]),
    ],
)
def test_forms_agree(kind: str, rows: int, names: list[str]) -> None:
    row = products.time_product(kind, SHAPE, rows, nothing, "cpu")
    assert (list(row["times"]), row["reasons"]) == (names, {})
    assert row["bytes"] == 32 * 64 * (1 if kind == "fp8" else 2)


def test_a_wrong_form_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Form("wrong", lambda *_: True, lambda x, weights: PLAIN.call(x, weights) * 1.1)
    monkeypatch.setattr(product_forms, "FORMS", (PLAIN, wrong))
    row = products.time_product("bf16", SHAPE, 2, nothing, "cpu")
    assert list(row["times"]) == ["plain"]
    assert row["reasons"]["wrong"].startswith("Wrong: differs from plain by 0.1")

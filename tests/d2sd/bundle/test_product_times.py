"""Times of products are measured once a kind of GPU; a damaged file is not taken."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2sd.bundle import product_times
from d2sd.bundle.product_times import choose_products, kept_times
from d2sd.modeling.product import Product
from d2sd.modeling.shard import Shard
from d2sd.modeling.tensor_parallel import Group
from d2sd.runtime.product_times import Bench, products_of
from tests.conftest import fuse_anywhere
from tests.product_forms import cuda_products
from tests.runtime.test_product_times import Clock, Wire, runner

__all__ = ["cuda_products"]

pytestmark = pytest.mark.usefixtures("anywhere", "cuda_products")

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture(scope="module")
def products() -> list[Product]:
    with pytest.MonkeyPatch.context() as patch:
        fuse_anywhere(patch)
        return products_of(runner())


def asked(path: Path, products: list[Product]) -> int:
    """Forms that were timed."""
    clock = Clock(padded=0.1 / 3)
    times = kept_times(path, Bench((9, 0), clock), products)
    assert {round(seconds["padded"], 9) for seconds in times.values() if "padded" in seconds} == {round(0.1 / 3, 9)}
    return clock.calls.total()


def test_a_second_start_reads_what_the_first_timed(products: list[Product], tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "times.json"
    few, rest = products[:3], products[3:]
    assert asked(path, few) > 0
    assert asked(path, few) == 0
    assert asked(path, rest) > 0, "another bundle's shapes are added"
    assert asked(path, products) == 0


def changed(**values: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | values)


def first_row(**values: Any) -> Callable[[str], str]:
    def damage(text: str) -> str:
        file = json.loads(text)
        file["products"][0] |= values
        return json.dumps(file)

    return damage


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1]",
        changed(d2sd_product_times=1),
        changed(more=1),
        first_row(seconds={"plain": 0.0}),
        first_row(seconds={"padded": 1.0}),
        first_row(rows=0),
        first_row(shape=[1, 2, "bfloat16"]),
    ],
)
def test_a_damaged_file_is_made_anew(products: list[Product], damage: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    every = asked(path, products)
    path.write_text(damage(path.read_text()))
    assert asked(path, products) == every
    assert asked(path, products) == 0


def test_what_cannot_be_kept_is_timed_each_time(
    products: list[Product], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "d2sd")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "times.json", None):
        bench = Bench((9, 0), Clock())
        assert kept_times(path, bench, products[:1])
        assert "cannot keep" in caplog.text
        caplog.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU of this name, whose clock says that padding is fastest; runners are told to be on it."""
    made = SimpleNamespace(name=H100, clock=Clock(padded=0.5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: made.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(product_times, "graph_timer", lambda _: made.clock)
    monkeypatch.setenv("D2SD_CACHE", str(tmp_path))
    return made


def test_a_runner_on_cuda_takes_the_fastest_forms(gpu: SimpleNamespace, tmp_path: Path) -> None:
    on_cpu, served, again = runner(), runner(), runner()
    choose_products(on_cpu, None)
    assert not any(product.forms for product in products_of(on_cpu))
    for one in (served, again):
        one.device = "cuda:0"
        choose_products(one, None)
        assert {product.forms[4].name for product in products_of(one)} == {"padded"}
        assert {product.forms[128].name for product in products_of(one)} == {"plain"}
    assert len(list(tmp_path.iterdir())) == 1
    calls, gpu.name, another = gpu.clock.calls.total(), H200, runner()
    choose_products(again, None)
    assert gpu.clock.calls.total() == calls, "an engine that is made again takes what it had"
    another.device = "cuda:0"
    choose_products(another, None)
    assert gpu.clock.calls.total() == 2 * calls, "another GPU has a file of its own"
    assert len(list(tmp_path.iterdir())) == 2


def test_rank_0_chooses_for_all(gpu: SimpleNamespace, tmp_path: Path) -> None:
    wire: Any = Wire()
    for rank in range(2):
        one = runner()
        one.device = f"cuda:{rank}"
        choose_products(one, Group(Shard(rank, 2), wire))
        assert {product.forms[4].name for product in products_of(one)} == {"padded"}
        gpu.clock = None  # of rank 0 alone

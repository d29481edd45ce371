"""The choice among forms of products, by a clock that the test sets."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from d2sd.modeling import product_forms
from d2sd.modeling.fused import fuse
from d2sd.modeling.product_forms import FORMS, MOST_ROWS, PLAIN, Form, Weights
from d2sd.modeling.shard import Shard
from d2sd.modeling.tensor_parallel import Group
from d2sd.policies import DrafterRole
from d2sd.runtime import product_times
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.product_times import Bench, agreed, by_shape, chosen, fastest, graph_timer, products_of, use
from d2sd.runtime.request import powers_of_two
from tests.product_forms import cuda_products
from tests.tiny import tiny_decoder, tiny_drafter

__all__ = ["cuda_products"]

pytestmark = pytest.mark.usefixtures("anywhere", "cuda_products")


class Clock:
    """A timer by the names of forms; counts what it times."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.calls = seconds, Counter[str]()
        self.weights: list[int] = []

    def __call__(self, run: Callable[[], object]) -> float:
        form, _, group = cast("Any", run).args
        assert isinstance(form, Form)
        run()
        self.calls[form.name] += 1
        self.weights.append(len(group))
        return self.seconds.get(form.name, 1.0) * len(group)


def runner(*, exact: bool = False, vocab: int = 64) -> ModelRunner:
    """Fused models as a GPU has them, on the CPU, in bf16."""
    target = tiny_decoder("qwen3", layers=2, vocab=vocab).to(torch.bfloat16)
    drafter = tiny_drafter(target.config).to(torch.bfloat16)
    fuse(target, exact=exact)
    fuse(drafter)
    return ModelRunner(target, {DrafterRole.FIRST: drafter})


def bench(clock: Clock) -> Bench:
    return Bench((9, 0), clock)


def test_plain_unless_another_is_faster_by_the_margin() -> None:
    assert fastest({"plain": 1.0}) == "plain"
    assert fastest({"plain": 1.0, "padded": 0.96, "kernel": 2.0}) == "plain"
    assert fastest({"plain": 1.0, "padded": 0.95, "kernel": 0.9}) == "kernel"


def test_products_of_a_runner_are_found_once_and_exact_ones_left_alone() -> None:
    one, exact = runner(), runner(exact=True)
    found = products_of(one)
    # four of each layer, two and two; fc; the head, which drafts share
    assert len(found) == len({id(product) for product in found}) == 4 * 4 + 1 + 1
    assert one.target.packed_head in found
    assert len(products_of(exact)) == 4 * 2 + 1, "the drafter's"


def test_each_shape_and_bucket_is_timed_once() -> None:
    clock, products = Clock(padded=0.5, **{"split 2": 0.7}), products_of(runner())
    times = bench(clock).times(products, {})
    shapes = by_shape(products)
    assert times.keys() == {(shape, rows) for shape in shapes for rows in powers_of_two(MOST_ROWS)}
    assert clock.calls["plain"] == len(times)
    assert clock.calls["padded"] == len(shapes) * 4  # 1, 2, 4 and 8 rows
    assert set(clock.weights) == {len(group) for group in shapes.values()}
    choices = chosen(products, times)
    assert len(choices) == len(products)
    for choice in choices:
        assert {rows: form.name for rows, form in choice.items()} == {
            rows: "padded" if rows < 16 else "split 2" if rows <= 64 else "plain" for rows in powers_of_two(MOST_ROWS)
        }
    before = clock.calls.total()
    assert bench(clock).times(products, times) == times
    assert clock.calls.total() == before
    more = products_of(runner(vocab=96))
    grown = bench(clock).times(more, times)
    assert times.items() <= grown.items()
    assert {shape.outputs for shape, _ in grown.keys() - times.keys()} == {96}, "the head alone is new"


def test_a_product_takes_the_form_of_its_rows() -> None:
    """And the choice is what it computes with: rows of the bucket, and no others."""
    one, calls = runner(), Counter[str]()
    products = products_of(one)

    def noted(x: Tensor, weights: Weights) -> Tensor:
        calls[f"{len(x)} rows"] += 1
        return PLAIN.call(x, weights)

    noting = Form("noting", PLAIN.applies, noted)
    use(products, [{4: noting}] * len(products))
    assert calls == {"4 rows": len(by_shape(products))}, "what it compiles is compiled before it serves"
    calls.clear()
    for rows in (1, 2, 3, 4, 5):
        for product in products:
            product(torch.zeros(rows, product.weight.shape[1], dtype=torch.bfloat16))
    assert calls == {"3 rows": len(products), "4 rows": len(products)}
    use(products, [{}] * len(products))
    assert not any(product.forms for product in products)


def test_a_form_that_is_wrong_or_fails_here_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(x: Tensor, weights: Weights) -> Tensor:
        return PLAIN.call(x, weights) * 1.1

    def fails(x: Tensor, weights: Weights) -> Tensor:
        raise RuntimeError("no such product")

    table = PLAIN, Form("wrong", PLAIN.applies, wrong), Form("fails", PLAIN.applies, fails)
    monkeypatch.setattr(product_forms, "FORMS", table)
    clock = Clock(wrong=0.1, fails=0.1)
    times = bench(clock).times(products_of(runner()), {})
    assert all(seconds.keys() == {"plain"} for seconds in times.values())
    assert "wrong is wrong here" in caplog.text


def test_products_of_fp32_are_never_timed() -> None:
    target = tiny_decoder("qwen3", layers=2)
    fuse(target)
    clock = Clock()
    assert bench(clock).times(products_of(ModelRunner(target)), {}) == {}
    assert not clock.calls


class Wire:
    """Carries rank 0's message to the other rank, each in a thread of its own."""

    def __init__(self) -> None:
        self._sent, self._there = torch.empty(0), threading.Event()

    def broadcast(self, message: Tensor, root: int) -> Any:
        if root == 0 and not self._there.is_set():
            self._sent = message.clone()
            self._there.set()
        assert message.shape == self._sent.shape, "ranks send as much as they expect"
        message.copy_(self._sent)
        return self

    def wait(self) -> None:
        """See torch.distributed.Work."""


def test_all_ranks_take_the_choice_of_rank_0() -> None:
    """The other has fewer rows of the head, and has timed nothing."""
    leading, following = products_of(runner(vocab=64)), products_of(runner(vocab=56))
    choices = chosen(leading, bench(Clock(padded=0.5, kernel=0.6)).times(leading, {}))
    wire: Any = Wire()
    groups = [Group(Shard(rank, 2), wire) for rank in range(2)]
    mine, theirs = agreed(choices, groups[0]), agreed([{} for _ in following], groups[1])
    assert mine == theirs == choices
    assert {form for choice in theirs for form in choice.values()} == {PLAIN, FORMS[1], FORMS[4]}
    use(following, theirs)
    assert [product.forms for product in following] == choices


def test_the_timer_replays_a_graph_and_takes_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events around each replay; the first one warms up."""
    said: list[str] = []
    elapsed = iter([99.0, 4.0, 3.0, 5.0, 6.0, 7.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("wait")

        def elapsed_time(self, end: object) -> float:
            return next(elapsed)

    def graphs(device: str) -> Callable[[Callable[[], object]], tuple[object, Callable[[], None]]]:
        return lambda run: (run(), lambda: said.append("replay"))

    monkeypatch.setattr(product_times, "CudaGraphs", graphs)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert graph_timer("cuda:0")(lambda: said.append("captured")) == pytest.approx(0.003)
    assert said == ["captured", *["record", "replay", "record", "wait"] * 6]

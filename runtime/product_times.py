"""The form of each product of a runner: timed on its GPU before anything is captured, with plain as the rule.

A form other than plain is taken where it is faster by MARGIN. Weights of several layers are multiplied in turn, as in
a pass, so that they come from memory and not from the L2 cache; launches are in a CUDA graph, as those of a step. A
form that fails on this GPU, or gives other numbers than plain, is left out.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from d2sd.modeling.product import Product
from d2sd.modeling.product_forms import FORMS, MOST_ROWS, PLAIN, Form, ProductShape, Weights, forms
from d2sd.modeling.tensor_parallel import Group
from d2sd.runtime.cuda_graphs.capture import CudaGraphs
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import powers_of_two

logger = logging.getLogger(__name__)

#: A form must take at most this share of plain's seconds: smaller gains may be noise.
MARGIN = 0.95
_REPEATS = 5
#: Bytes of weights that are multiplied in turn, several times an L2 cache; and most products.
_COLD, _MOST = 256 << 20, 8
#: Differences of results, in the largest of them: products of 16 bits round once, in FP8 before a tensor of scales.
_TOLERANCE = 0.02

#: Seconds of a function's work on the device.
Timer = Callable[[Callable[[], object]], float]
#: Shape and bucket of rows -> form -> seconds of one product.
Times = dict[tuple[ProductShape, int], dict[str, float]]


def products_of(runner: ModelRunner) -> list[Product]:
    """The products of a runner's models and heads for which a form can be chosen, each once, in one order."""
    found: list[object] = [tables.head for tables in runner.drafts.tables.values()]
    for model in (runner.target, *runner.drafters.values()):
        found += [*(() if model.compiled is None else model.compiled.products), *model.modules()]
    unique = {id(product): product for product in found if isinstance(product, Product)}
    return [product for product in unique.values() if product.weights is not None]


def by_shape(products: Iterable[Product]) -> dict[ProductShape, list[Product]]:
    """The products of each shape."""
    groups: dict[ProductShape, list[Product]] = {}
    for product in products:
        assert product.weights is not None
        groups.setdefault(product.weights.shape, []).append(product)
    return groups


def graph_timer(device: str) -> Timer:
    """Seconds of one replay of a function as a CUDA graph: the least, because other work only ever adds to them."""
    capture = CudaGraphs(device)

    def seconds(run: Callable[[], object]) -> float:
        _, replay = capture(run)
        found: list[float] = []
        with torch.cuda.device(device):
            for _ in range(1 + _REPEATS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                replay()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) / 1000)
        return min(found[1:])

    return seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """A device on which forms are timed."""

    capability: tuple[int, int]
    timer: Timer

    @torch.inference_mode()
    def times(self, products: Iterable[Product], known: Times) -> Times:
        """`known`, and the seconds of all forms of shapes and buckets that it lacks."""
        found, told = dict(known), False
        for shape, group in by_shape(products).items():
            if forms(1, _weights(group[0]), self.capability) == [PLAIN]:
                continue
            for rows in powers_of_two(MOST_ROWS):
                if (shape, rows) not in known:
                    if not told:
                        logger.info("timing products that were not timed on such a GPU before; their times are kept")
                        told = True
                    found[shape, rows] = self._times([_weights(product) for product in _cold(group)], rows)
        return found

    def _times(self, group: list[Weights], rows: int) -> dict[str, float]:
        x = _input(group[0], rows)
        expected = PLAIN.call(x, group[0]).float()
        seconds = {}
        for form in forms(rows, group[0], self.capability):
            try:
                found = form.call(x, group[0]).float()
                if not torch.allclose(found, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max())):
                    logger.warning("products %s of %d rows: %s is wrong here", group[0].shape, rows, form.name)
                    continue
                seconds[form.name] = self.timer(partial(_turn, form, x, group)) / len(group)
            except Exception as error:  # of PyTorch or Triton
                if form is PLAIN:
                    raise
                logger.info("products %s of %d rows: no %s here: %s", group[0].shape, rows, form.name, error)
        return seconds


def _turn(form: Form, x: Tensor, group: list[Weights]) -> list[Tensor]:
    return [form.call(x, weights) for weights in group]


def _weights(product: Product) -> Weights:
    assert product.weights is not None
    return product.weights


def _cold(group: list[Product]) -> list[Product]:
    """Take as many of the products as have `_COLD` bytes of weights together."""
    return group[: min(_MOST, -(-_COLD // group[0].weight.nbytes))]


def _input(weights: Weights, rows: int) -> Tensor:
    """Numbers [rows, K] between -1 and 1 in no order, so that a GPU draws as much power as in a pass."""
    width = weights.values.shape[1]
    count = (rows + MOST_ROWS * weights.room) * width
    x = torch.arange(count, dtype=torch.float32, device=weights.values.device).mul_(12.9898).sin_()
    return x.view(-1, width).to(weights.values.dtype)[:rows]


def fastest(seconds: Mapping[str, float]) -> str:
    """The form to use, by the seconds of each."""
    least = min(seconds, key=lambda name: seconds[name])
    return least if seconds[least] <= MARGIN * seconds[PLAIN.name] else PLAIN.name


#: The form of each bucket of rows; those that are not in it are plain.
Choice = dict[int, Form]


def chosen(products: Iterable[Product], times: Times) -> list[Choice]:
    """The choice of each product."""
    named = {form.name: form for form in FORMS}
    by_shape = defaultdict[ProductShape, Choice](Choice)
    for (shape, rows), seconds in times.items():
        by_shape[shape][rows] = named[fastest(seconds)]
    return [by_shape[_weights(product).shape] for product in products]


def use(products: Sequence[Product], choices: Sequence[Choice]) -> None:
    """Let the products take these forms, and run each once: what it compiles is compiled now."""
    run: set[tuple[ProductShape, int, str]] = set()
    for product, choice in zip(products, choices, strict=True):
        product.forms = choice
        weights = _weights(product)
        for rows, form in choice.items():
            if form is not PLAIN and (one := (weights.shape, rows, form.name)) not in run:
                run.add(one)
                with torch.inference_mode():
                    form.call(_input(weights, rows), weights)


def agreed(choices: Sequence[Choice], group: Group) -> list[Choice]:
    """Rank 0's choices, on every rank: drafts, which each rank computes by itself, are the same bits on all of them.

    By the order of products and not by their shapes: the last rank may have fewer rows of the head than the others.
    """
    sizes, places = powers_of_two(MOST_ROWS), {form: place for place, form in enumerate(FORMS)}
    message = [[places[choice.get(rows, PLAIN)] for rows in sizes] for choice in choices]
    received = group.broadcast(torch.tensor(message, dtype=torch.uint8)).tolist()
    return [{rows: FORMS[place] for rows, place in zip(sizes, row, strict=True)} for row in received]

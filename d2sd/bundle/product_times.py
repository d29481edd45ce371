"""Keep the times of products in a file next to that of step times: the next start on the same kind of GPU reads them.

They depend on shapes and not on a bundle, so bundles share the file; shapes that it lacks are timed and added. Its name
is a hash of what else they depend on: the GPU's name, the versions of PyTorch, CUDA and Triton, and d2sd's code.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator

from d2sd.bundle.step_times import code, keep, kept_file, package_version
from d2sd.errors import D2SDError
from d2sd.modeling.product import Product
from d2sd.modeling.product_forms import PLAIN, ProductShape
from d2sd.modeling.tensor_parallel import Group
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.product_times import Bench, Choice, Times, agreed, chosen, graph_timer, products_of, use
from d2sd.schema import Closed, read_model

logger = logging.getLogger(__name__)


class Row(Closed):
    """The forms of one product."""

    shape: ProductShape
    rows: Annotated[int, Field(ge=1)]
    seconds: dict[str, Annotated[float, Field(gt=0)]]

    @field_validator("seconds")
    @classmethod
    def _has_plain(cls, seconds: dict[str, float]) -> dict[str, float]:
        if PLAIN.name not in seconds:
            raise ValueError("there is no time of the plain form")
        return seconds


class File(Closed):
    """The times of all products."""

    d2sd_product_times: Literal[2] = 2
    products: list[Row]


def choose_products(runner: ModelRunner, group: Group | None) -> None:
    """Choose the forms of a runner's products on CUDA, before anything is captured; elsewhere they stay plain.

    Products of an earlier engine keep theirs. Of ranks that share a target, rank 0 chooses for all.
    """
    on_gpu = runner.device.startswith("cuda")
    products = [product for product in products_of(runner) if not product.forms] if on_gpu else []
    if not products:
        return
    choices: list[Choice] = [{} for _ in products]
    if group is None or group.shard.rank == 0:
        bench = Bench(torch.cuda.get_device_capability(runner.device), graph_timer(runner.device))
        times = kept_times(_path(runner.device), bench, products)
        choices = chosen(products, times)
    use(products, choices if group is None else agreed(choices, group))


def _path(device: str) -> Path | None:
    depends = {
        "gpu": torch.cuda.get_device_name(device),
        "packages": [package_version(package) for package in ("torch", "triton")],
        "cuda": torch.version.cuda,
        "code": code(),
    }
    return kept_file("product-times", depends)


def kept_times(path: Path | None, bench: Bench, products: list[Product]) -> Times:
    """The times of these products and of all others in the file, to which those that it lacks are added.

    A file that cannot be read is made anew, and one that cannot be written is not kept; neither is an error.
    """
    known: Times = {}
    if path is not None and path.exists():
        try:
            known = read(path)
        except (D2SDError, OSError) as error:
            logger.info("timing products again: %s", error)
    start = time.monotonic()
    times = bench.times(products, known)
    if times.keys() == known.keys():
        return times
    seconds = time.monotonic() - start
    rows = [Row(shape=shape, rows=rows, seconds=forms) for (shape, rows), forms in times.items()]
    keep(path, File(products=rows), f"timed products in {seconds:.1f} s")
    return times


def read(path: Path) -> Times:
    """The times in a file, by shape and rows. Raises D2SDError if it is malformed."""
    file = read_model(File, path, error=D2SDError, what="file of product times")
    return {(row.shape, row.rows): dict(row.seconds) for row in file.products}

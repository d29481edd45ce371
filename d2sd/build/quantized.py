"""A target whose checkpoint is quantized, in a plan: its size as it is stored and dequantized, and what computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from d2sd.convert.checkpoint.headers import ITEMSIZES, Shapes, stored_bytes
from d2sd.convert.checkpoint.quantization import Quantization, refuse_unserved
from d2sd.convert.checkpoint.schemes import FP8
from d2sd.errors import RecipeError
from d2sd.io import size_text
from d2sd.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Choice:
    """The two ways to serve a quantized checkpoint."""

    quantization: Quantization
    precision: str
    dequantize: bool
    stored: int  # bytes of its tensors
    plain: int  # bytes of weights in `precision`

    @property
    def text(self) -> str:
        """In a manifest."""
        return self.quantization.text + (f", dequantized to {self.precision}" if self.dequantize else "")

    def lines(self) -> Iterator[tuple[str, str]]:
        """In a plan: both sizes, and the products."""
        stored, plain = f"{size_text(self.stored)} as stored", f"{size_text(self.plain)} in {self.precision}"
        if self.dequantize:
            yield "quantization", f"{self.quantization.text}, {stored}; dequantized (target.dequantize): {plain}"
            return
        yield "quantization", f"{self.quantization.text}, {stored}; target.dequantize would make it {plain}"
        for product in self.quantization.products:
            yield "product", product


def choose(
    recipe: Recipe, quantization: Quantization | None, shapes: Shapes, plain: Shapes, where: Path
) -> Choice | None:
    """How a target of tensors `shapes`, dequantized `plain`, is served.

    Raises `CheckpointError` where it has no product and is not dequantized, `RecipeError` where engines cannot hold it.
    """
    if quantization is None:
        return None
    itemsize = ITEMSIZES[recipe.precision]
    choice = Choice(
        quantization, recipe.precision, recipe.target.dequantize, bytes_of(shapes, itemsize), bytes_of(plain, itemsize)
    )
    if choice.dequantize:
        return choice
    refuse_unserved(
        quantization, shapes, where, f"{recipe.precision} ({size_text(choice.plain)})", size_text(choice.stored)
    )
    if recipe.engines is not None and any(scheme != FP8 for scheme, _ in quantization.groups):
        raise RecipeError(
            "Graphs hold FP8 with one calibrated scale a tensor alone.",
            where="recipe: engines",
            found=quantization.text,
            fix="set target.dequantize to true, or remove engines",
        )
    return choice


def bytes_of(shapes: Shapes, itemsize: int) -> int:
    """Bytes in memory of a model of these tensors, whose plain numbers have `itemsize` bytes."""
    return sum(stored_bytes(name, shapes, itemsize) for name in shapes)


def numbers_of(shapes: Shapes) -> int:
    """Numbers in these tensors."""
    return sum(math.prod(shape) for shape in shapes.values())

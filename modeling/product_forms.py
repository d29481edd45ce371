"""The ways to compute one matrix product of few rows on CUDA: a row each of the table `FORMS`.

    form          what is multiplied                                           kernels
    plain         the rows as they are: PyTorch's product, cuBLASLt            1
    padded        more rows, of any values, whose results are left out         1; 2 where the input has no room for them
    split 2, 4    the inputs in so many parts at a time, summed in fp32        2, 3
    kernel        our batch-invariant product (`layer_ops.linear`)             1
    split kernel  in parts like split; W asked for early: `split_linear`       1

All give the same numbers but for the order of the sums, which are fp32 in each. Which is fastest depends on the GPU,
the shape and the number of rows: `d2sd.runtime.product_times` measures it, and a product then keeps one for each bucket
of rows. Whether a form `applies` is asked without running it; a new form is a row here.

Padding: PyTorch's FP8 product is slower at up to 16 rows than above (vLLM pads to 17, `w8a8_utils.py`), and rows of
tensor cores come in eights. PyTorch has no batched FP8 product, so FP8 is split by our kernel alone.

A step's small kernels leave memory idle. `split kernel` is a dependent launch, which starts while the kernel before
still runs, and brings its weights into the L2 cache then. So no small kernel has to know which product follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from d2sd.plugins.layer_ops import SPLIT_STEP, linear, split_linear

# Shape letters: R rows, N outputs, K inputs.

#: Most rows for which a form is chosen: beyond, products are large and cuBLASLt's choice is theirs.
MOST_ROWS = 256
#: Most rows of forms that help by using more multiprocessors than a tile of few rows would.
_FEW_ROWS = 64
#: Padded rows are a multiple of this: a tile of tensor cores has no fewer rows to spare.
_STEP = 16
_NARROW = torch.float8_e4m3fn
_HALVES = (torch.bfloat16, torch.float16)
#: Inputs of a part of a split product are a multiple of this, 16 bytes: so vector loads stay aligned.
_ALIGNED = 8


class ProductShape(NamedTuple):
    """The part of a product, besides its rows, on which the fastest form depends."""

    outputs: int
    inputs: int
    dtype: str  # of both factors, by PyTorch's name
    result: str
    bias: bool
    room: bool  # whether the input has room for padding rows (`with_rows`)


@dataclass(frozen=True, slots=True)
class Weights:
    """The right factor of a product, and what turns its sums into results."""

    values: Tensor  # [N, K]
    dtype: torch.dtype  # of results
    bias: Tensor | None = None  # [N], not of FP8
    scales: tuple[Tensor, Tensor] | None = None  # 0-dim fp32, of x and of `values`: FP8
    scaled: bool = True  # whether they are other than 1
    room: bool = True  # of the input, see `ProductShape`
    arrived: Tensor | None = None  # counters of `split_linear`

    @property
    def shape(self) -> ProductShape:
        dtype, result = (str(one).removeprefix("torch.") for one in (self.values.dtype, self.dtype))
        outputs, inputs = self.values.shape
        return ProductShape(outputs, inputs, dtype, result, self.bias is not None, self.room)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute x Wᵀ, scaled and biased."""

    name: str
    #: Rows, weights, compute capability -> whether the form takes them and may be faster than `PLAIN`.
    applies: Callable[[int, Weights, tuple[int, int]], bool]
    #: x [R, K] of the weights' type -> [R, N].
    call: Callable[[Tensor, Weights], Tensor]
    #: R, and the type of x -> rows of the input that are read.
    reads: Callable[[int, torch.dtype], int] = lambda rows, _: rows


def bucket(rows: int) -> int:
    """The next power of two, for which forms are timed."""
    return 1 << (rows - 1).bit_length()


def padded_rows(rows: int, dtype: torch.dtype) -> int:
    """A multiple of 16; in FP8 above 16, where PyTorch's product is another."""
    least = _STEP + 1 if dtype == _NARROW else 1
    return -(-max(rows, least) // _STEP) * _STEP


def with_rows(x: Tensor, rows: int) -> Tensor:
    """x [R, K] with more rows of any values: of the memory behind it, where it has room; else it is copied."""
    width = x.shape[1]
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() and room >= rows * width:
        return x.as_strided((rows, width), (width, 1))
    wider = x.new_empty(rows, width)
    wider[: len(x)] = x
    return wider


def _plain(x: Tensor, weights: Weights) -> Tensor:
    if weights.scales is None:
        return F.linear(x, weights.values, weights.bias)
    out: Tensor = torch._scaled_mm(
        x, weights.values.t(), scale_a=weights.scales[0], scale_b=weights.scales[1], out_dtype=weights.dtype
    )
    return out


def _padded(x: Tensor, weights: Weights) -> Tensor:
    return _plain(with_rows(x, padded_rows(len(x), x.dtype)), weights)[: len(x)]


def _split(x: Tensor, weights: Weights, parts: int) -> Tensor:
    size = x.shape[1] // parts
    by_part = x.view(-1, parts, size).transpose(0, 1)  # [parts, R, K / parts]
    of_part = weights.values.view(-1, parts, size).permute(1, 2, 0)  # [parts, K / parts, N]
    sums = torch.bmm(by_part, of_part, out_dtype=torch.float32)
    while len(sums) > 2:
        sums = sums[::2] + sums[1::2]
    out = x.new_empty(len(x), len(weights.values), dtype=weights.dtype)
    return torch.add(sums[0], sums[1], out=out)  # rounded once


def _kernel(x: Tensor, weights: Weights) -> Tensor:
    scales = weights.scales if weights.scaled else None
    return linear(x, weights.values, weights.bias, scales=scales, dtype=weights.dtype)


def _split_kernel(x: Tensor, weights: Weights) -> Tensor:
    return split_linear(x, weights.values, weights.scales if weights.scaled else None, weights.dtype, weights.arrived)


def _is_padded(rows: int, weights: Weights, capability: tuple[int, int]) -> bool:
    return padded_rows(rows, weights.values.dtype) > rows


def _splits(rows: int, weights: Weights, capability: tuple[int, int], *, parts: int) -> bool:
    divides = weights.values.shape[1] % (parts * _ALIGNED) == 0
    return rows <= _FEW_ROWS and divides and weights.values.dtype in _HALVES and weights.bias is None


def _is_few(rows: int, weights: Weights, capability: tuple[int, int]) -> bool:
    return rows <= _FEW_ROWS and capability >= (8, 0)


def _is_few_in_whole_tiles(rows: int, weights: Weights, capability: tuple[int, int]) -> bool:
    whole = all(size % SPLIT_STEP == 0 for size in weights.values.shape)
    return _is_few(rows, weights, capability) and whole and weights.bias is None


def _split_form(parts: int) -> Form:
    return Form(f"split {parts}", partial(_splits, parts=parts), partial(_split, parts=parts))


PLAIN = Form("plain", lambda *_: True, _plain)
FORMS = (
    PLAIN,
    Form("padded", _is_padded, _padded, padded_rows),
    _split_form(2),
    _split_form(4),
    Form("kernel", _is_few, _kernel),
    Form("split kernel", _is_few_in_whole_tiles, _split_kernel),
)


def forms(rows: int, weights: Weights, capability: tuple[int, int]) -> list[Form]:
    """The forms among which a product of so many rows is chosen, `PLAIN` first; it alone for other types and sizes."""
    if rows > MOST_ROWS or weights.values.dtype not in (*_HALVES, _NARROW):
        return [PLAIN]
    return [form for form in FORMS if form.applies(rows, weights, capability)]

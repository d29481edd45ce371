"""Products of Qwen3-8B's layers at few rows, in every form that a choice at load may take (`product_forms`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.call import Wrong
from benchmarks.gpu.cases import Case, Note, said
from benchmarks.gpu.evidence import HOPPER
from benchmarks.gpu.timing import Times
from d2sd.modeling.prepare import sum_in_fp32
from d2sd.modeling.product_forms import MOST_ROWS, PLAIN, Weights, forms

#: Outputs and inputs.
SHAPES = {
    "gate_up": (24576, 4096),
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
ROWS = (1, 16, 64, 512)
#: Largest ‖form - plain‖ / ‖plain‖: sums in another order, rounded to bf16.
RELATIVE = 1e-2


def cases() -> Iterator[Case]:
    for name in SHAPES:
        for kind in ("bf16", "fp8"):
            if (kind, name) != ("fp8", "head"):  # `d2sd build` leaves it in bf16
                for rows in ROWS:
                    yield f"products/{kind} {name} r{rows}", partial(time_product, kind, SHAPES[name], rows)


@torch.inference_mode()
def time_product(kind: str, shape: tuple[int, int], rows: int, _: Note, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of each form, which must agree with PyTorch's product; one that fails has its reason instead."""
    sum_in_fp32()
    x, weights = factors(kind, shape, rows, device)
    capability = torch.cuda.get_device_capability() if x.is_cuda else HOPPER
    times, reasons, expected = Times(), dict[str, str](), PLAIN.call(x, weights).float()
    for form in forms(rows, weights, capability):
        try:
            error = float((form.call(x, weights).float() - expected).norm() / expected.norm())
            if not error <= RELATIVE:
                raise Wrong(f"differs from plain by {error}")
            times.add(form.name, partial(form.call, x, weights))
        except Exception as failed:
            if form is PLAIN:
                raise
            reasons[form.name] = said(failed)
            torch.cuda.synchronize()  # raises where the device's context is lost
    times.again()
    return {"bytes": weights.values.nbytes, "rows": rows, "times": times.figures(), "reasons": reasons}


def factors(kind: str, shape: tuple[int, int], rows: int, device: str) -> tuple[Tensor, Weights]:
    """x [rows, in] with room behind it, as passes have it, and weights [out, in]."""
    draw = torch.Generator(device).manual_seed(1)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw, device=device, dtype=torch.bfloat16)

    x, values = numbers(rows + MOST_ROWS, shape[1])[:rows], numbers(*shape)
    if kind == "bf16":
        return x, Weights(values, torch.bfloat16)
    one = torch.ones((), device=device)
    wide, narrow = (part.to(torch.float8_e4m3fn) for part in (numbers(rows + MOST_ROWS, shape[1]), values))
    return wide[:rows], Weights(narrow, torch.bfloat16, scales=(one, one), scaled=False)

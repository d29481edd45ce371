"""A quantization scheme of linear layers: its tensors by arithmetic, and the module that has them.

The functions of inputs and outputs below give names and shapes of what a checkpoint stores in place of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from d2sd.modeling.shapes import LinearShape, Shape

if TYPE_CHECKING:
    from d2sd.modeling.quantized import QuantizedLinear


@dataclass(frozen=True, slots=True)
class Scheme:
    """A row of the table of schemes in `d2sd.convert.checkpoint.schemes`."""

    name: str  # what a plan and a manifest call it
    layer: str  # module and class of `d2sd.modeling`, imported where a layer is made
    #: One of the functions below.
    stored: Callable[..., dict[str, Shape]]
    options: tuple[tuple[str, Any], ...] = ()
    #: The product that serves it; None: it is dequantized, or refused.
    product: str | None = None

    def tensors(self, layer: LinearShape, *count: int) -> dict[str, Shape]:
        """Names and shapes of a layer's tensors; `count` of the experts that are one tensor."""
        bias: dict[str, Shape] = {"bias": (layer.outputs,)} if layer.bias else {}
        return self.stored(layer.inputs, layer.outputs, *count, **dict(self.options)) | bias

    def empty(self, in_features: int, out_features: int, bias: bool, *count: int) -> QuantizedLinear:
        """A layer of this scheme without values; `count` of the experts that are one tensor."""
        module, _, name = self.layer.rpartition(".")
        made: QuantizedLinear = getattr(import_module(f"d2sd.modeling.{module}"), name)(
            in_features, out_features, bias, *count, **dict(self.options)
        )
        return made


#: Rows and columns of FP8 weights that share a scale, and inputs that do.
BLOCK = 128
#: Inputs that share a scale, of NVFP4 and of MXFP4; two a byte.
NVFP4_GROUP, MXFP4_GROUP = 16, 32


def fp8(inputs: int, outputs: int) -> dict[str, Shape]:
    """`Fp8Linear`."""
    return {"weight": (outputs, inputs), "weight_scale": (), "input_scale": ()}


def scaled_fp8(inputs: int, outputs: int, *, channels: bool, calibrated: bool) -> dict[str, Shape]:
    """`ScaledFp8Linear`."""
    scales: dict[str, Shape] = {"weight_scale": (outputs, 1) if channels else ()}
    return {"weight": (outputs, inputs)} | scales | ({"input_scale": ()} if calibrated else {})


def block_fp8(inputs: int, outputs: int, *, scale_name: str) -> dict[str, Shape]:
    """`BlockFp8Linear`."""
    return {"weight": (outputs, inputs), scale_name: (-(-outputs // BLOCK), -(-inputs // BLOCK))}


def nvfp4_weights(inputs: int, outputs: int, *, divisors: bool) -> dict[str, Shape]:
    """`Nvfp4Weights`."""
    packed, whole = ("weight_packed", "weight_global_scale") if divisors else ("weight", "weight_scale_2")
    return {packed: (outputs, inputs // 2), "weight_scale": (outputs, inputs // NVFP4_GROUP), whole: ()}


def nvfp4(inputs: int, outputs: int, *, divisors: bool) -> dict[str, Shape]:
    """`Nvfp4Linear`."""
    of_inputs = "input_global_scale" if divisors else "input_scale"
    return nvfp4_weights(inputs, outputs, divisors=divisors) | {of_inputs: ()}


def mxfp4(inputs: int, outputs: int, count: int) -> dict[str, Shape]:
    """`Mxfp4Experts`, `count` of them in one layer."""
    groups = -(-inputs // MXFP4_GROUP)
    return {"blocks": (count, outputs, groups, MXFP4_GROUP // 2), "scales": (count, outputs, groups)}

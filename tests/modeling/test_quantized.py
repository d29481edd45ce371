"""Layers of published schemes: their products on CUDA, by stand-ins for PyTorch's and on fake tensors; fused layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from itertools import product as pairs
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from d2sd.convert.checkpoint import schemes
from d2sd.errors import D2SDError
from d2sd.modeling import scaled_fp8
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import linear_names
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.nvfp4 import Nvfp4Linear, blocked, codes_of
from d2sd.modeling.product import Product
from d2sd.modeling.quantized import ComputedLinear, make_quantized
from d2sd.modeling.scaled_fp8 import BlockFp8Linear, ScaledFp8Linear
from d2sd.modeling.scheme import Scheme
from d2sd.plugins import dispatch
from tests.convert.checkpoint.published import E2M1, e4m3, nearest_e2m1
from tests.tiny import full_logits, random_tokens, tiny_decoder
from tools.cuda.fake import Watch, fake_gpu

DRAW = torch.Generator().manual_seed(11)


L = TypeVar("L", bound=ComputedLinear)


def filled(layer: L) -> L:
    """A layer with numbers in all tensors."""
    for name, tensor in layer.state_dict().items():
        value = (torch.rand(tensor.shape, generator=DRAW) + 0.5) * 1e-3
        value = 1 / value if "global" in name else value
        if tensor.dtype == torch.float8_e4m3fn and not name.endswith("scale"):
            value = torch.randn(tensor.shape, generator=DRAW) * 100
        if tensor.dtype == torch.float8_e4m3fn and name.endswith("scale"):
            value = value * 1e3
        if tensor.dtype == torch.uint8:
            tensor.copy_(torch.randint(256, tensor.shape, generator=DRAW))
        elif name == "bias":
            tensor.copy_(torch.randn(tensor.shape, generator=DRAW))
        else:
            tensor.copy_(value.clamp(-448, 448).to(tensor.dtype) if tensor.itemsize == 1 else value)
    return layer


def rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(count, inputs, generator=DRAW) * torch.logspace(-2, 1, inputs)
    x[0] = 0
    return x.to(dtype)


def by_tensor_or_row(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`torch._scaled_mm` by its documentation: scales of one number, or of each row of a and column of b."""
    rowwise = scale_a.numel() > 1
    assert out_dtype == torch.bfloat16 or not rowwise
    assert (scale_a.shape, scale_b.shape) == (((len(a), 1), (1, b.shape[1])) if rowwise else ((), ()))
    assert a.is_contiguous()
    assert b.stride(0) == 1
    wide: Tensor = (a.double() @ b.double()) * scale_a * scale_b
    return wide.to(out_dtype)


def by_blocks(a: Tensor, b: Tensor, *arguments: Any, output_dtype: torch.dtype) -> Tensor:
    """`scaled_mm` with 1 × 128 and 128 × 128 scales."""
    scale_a, recipe_a, scale_b, recipe_b = arguments
    assert (recipe_a, recipe_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    assert len(a) % 4 == 0
    assert scale_a.stride(0) == 1
    assert scale_b.stride(0) == 1
    assert len(scale_b) % 4 == 0
    of_a = scale_a.double().repeat_interleave(128, 1)
    of_b = scale_b.double().repeat_interleave(128, 0)[: len(b)].repeat_interleave(128, 1)
    out: Tensor = a.double() * of_a @ (b.double() * of_b)
    return out.to(output_dtype)


def unblocked(flat: Tensor, count: int, groups: int) -> Tensor:
    """cuBLAS's layout of scales: tiles of 128 rows and 4 groups, in a tile 32 rows of 4 quarters of 4 groups."""
    across = -(-groups // 4)
    out = torch.empty(count, groups, dtype=torch.float64)
    for row, group in pairs(range(count), range(groups)):
        tile = row // 128 * across + group // 4
        out[row, group] = flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4].double()
    return out


def by_nvfp4(
    a: Tensor,
    b: Tensor,
    scales_a: Sequence[Tensor],
    recipe_a: object,
    scales_b: Sequence[Tensor],
    recipe_b: object,
    *swizzles: object,
    output_dtype: torch.dtype,
) -> Tensor:
    assert recipe_a == recipe_b == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    assert swizzles == ([SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],) * 2
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2

    def wide(packed: Tensor, scales: Sequence[Tensor]) -> Tensor:
        codes = packed.view(torch.uint8).tolist()
        numbers = [[E2M1[half] for byte in line for half in (byte & 15, byte >> 4)] for line in codes]
        values = torch.tensor(numbers, dtype=torch.float64)
        of_groups = unblocked(scales[0], len(values), values.shape[1] // 16)
        return values * of_groups.repeat_interleave(16, 1) * scales[1].double()

    return (wide(a, scales_a) @ wide(b.t(), scales_b).t()).to(output_dtype)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the products of CUDA, by their documentation."""
    monkeypatch.setattr(scaled_fp8, "use_fp8_gemm", lambda _: True)
    monkeypatch.setattr(scaled_fp8, "use_block_gemm", lambda *_: True)
    monkeypatch.setattr(torch, "_scaled_mm", by_tensor_or_row)

    def scaled_mm(a: Tensor, b: Tensor, *arguments: Any, output_dtype: torch.dtype) -> Tensor:
        made = by_nvfp4 if isinstance(arguments[0], list) else by_blocks
        return made(a, b, *arguments, output_dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)


COMPUTED: dict[str, Callable[[], ComputedLinear]] = {
    "channels": lambda: ScaledFp8Linear(256, 48, True),
    "tensor": lambda: ScaledFp8Linear(256, 48, False, channels=False),
    "calibrated": lambda: ScaledFp8Linear(256, 48, False, calibrated=True),
    "blocks": lambda: BlockFp8Linear(384, 256, True),
    "nvfp4": lambda: Nvfp4Linear(96, 160, False, divisors=False),
    "nvfp4-divisors": lambda: Nvfp4Linear(64, 130, True, divisors=True),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", COMPUTED)
def test_the_product_of_a_gpu_is_the_carried_one(kind: str, dtype: torch.dtype) -> None:
    layer = filled(COMPUTED[kind]())
    layer.bias = None
    x = rows(5, layer.in_features, dtype)
    found, expected = layer.gemm(x), layer(x)
    assert found is not None
    for _ in range(2):  # once is enough
        layer.prepare()
    again = layer.gemm(x)
    assert again is not None
    assert again.equal(found)
    assert found.dtype == dtype
    bits = {torch.float32: 21, torch.bfloat16: 6, torch.float16: 9}[dtype]
    torch.testing.assert_close(found, expected, rtol=2.0**-bits, atol=2.0**-bits * expected.abs().max().item())
    assert expected[1:].abs().min() > 0


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("calibrated", [False, True])
def test_layers_of_one_input_are_one_product(calibrated: bool, exact: bool) -> None:
    parts = [filled(ScaledFp8Linear(64, outputs, True, calibrated=calibrated)) for outputs in (32, 16, 16)]
    if calibrated:  # the largest scale rounds the input of all
        for part in parts:
            part.get_buffer("input_scale").fill_(0.02)
    x = rows(3, 64)
    whole = Product(parts, torch.float32, exact=exact)
    assert ScaledFp8Linear.unjoinable(parts, exact=exact) is None
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], 1), rtol=2e-6, atol=2e-6)
    assert whole.weight.shape == (64, 64)
    assert not list(whole.parameters())


@pytest.mark.usefixtures("stand_ins")
def test_blocks_are_joined_where_they_are_whole() -> None:
    parts = [filled(BlockFp8Linear(160, outputs, False, scale_name="weight_scale")) for outputs in (256, 128, 72)]
    assert BlockFp8Linear.unjoinable(parts, exact=False) is None
    x = rows(3, 160)
    whole = BlockFp8Linear.joined(parts)
    torch.testing.assert_close(whole(x), torch.cat([part(x) for part in parts], 1), rtol=1e-6, atol=1e-5)
    reason = BlockFp8Linear.unjoinable(parts[::-1], exact=False)
    assert reason == "a block of 128 outputs would be of two layers"
    assert "batch-invariant" in (BlockFp8Linear.unjoinable(parts, exact=True) or "")


@pytest.mark.parametrize("size", [(1, 1), (130, 5), (256, 8)])
def test_scales_in_the_order_of_the_tensor_cores(size: tuple[int, int]) -> None:
    scales = e4m3(torch.rand(size, generator=DRAW) * 400)
    flat = blocked(scales)
    assert flat.numel() == -(-size[0] // 128) * -(-size[1] // 4) * 512
    assert unblocked(flat, *size).equal(scales.double())


def test_rounding_to_e2m1_is_to_nearest_even_and_saturates() -> None:
    numbers = E2M1[:8]
    halves = [(a + b) / 2 for a, b in pairwise(numbers)]
    values = [*numbers, *halves, *(half * 1.001 for half in halves), *(half * 0.999 for half in halves), 7.0, 1e9]
    found = codes_of(torch.tensor(values)).tolist()
    assert found == [int(nearest_e2m1(value)) for value in values]
    assert codes_of(-torch.tensor(values[1:])).tolist() == [code + 8 for code in found[1:]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["channels", "tensor", "calibrated"])
def test_pytorch_takes_the_arguments(kind: str, dtype: torch.dtype) -> None:
    """Shapes and layouts, as `torch._scaled_mm` checks them; and nothing is copied between host and device."""
    watch = Watch()
    with torch.inference_mode(), fake_gpu(watch):
        with torch.device("cuda"):
            layer = COMPUTED[kind]()
            layer.bias = None if layer.bias is None else nn.Parameter(layer.bias.to(dtype), requires_grad=False)
            x = torch.empty(2, 3, layer.in_features, dtype=dtype)
        with watch:
            found = layer(x)
        assert (found.shape, found.dtype, found.device.type) == ((2, 3, layer.out_features), dtype, "cuda")
        assert not watch.copies


def decoder_of(scheme: Scheme) -> Decoder:
    plain = tiny_decoder("qwen3", hidden=32)
    with torch.device("meta"):
        model = Decoder(plain.config)
        make_quantized(model, dict.fromkeys(linear_names(model), scheme.empty))
    tensors = plain.state_dict()
    for name in linear_names(model):
        layer = model.get_submodule(name)
        assert isinstance(layer, ScaledFp8Linear)
        weight = tensors[f"{name}.weight"]
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors |= {f"{name}.weight": e4m3(weight / scale), f"{name}.weight_scale": scale}
        if "input_scale" in layer.state_dict():
            tensors[f"{name}.input_scale"] = torch.tensor(8 / 448)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.eval().requires_grad_(False)


@pytest.mark.usefixtures("stand_ins", "anywhere")
@pytest.mark.parametrize("scheme", [schemes.FP8_DYNAMIC, schemes.FP8_CHANNELS], ids=["dynamic", "calibrated"])
def test_fused_layers_are_the_layers(scheme: Scheme) -> None:
    model = decoder_of(scheme)
    tokens = random_tokens(model, 2, 7)
    for exact in (False, True):
        together = copy.deepcopy(model)
        fuse(together, exact=exact)
        assert isinstance(together.compiled, FusedLayers)
        torch.testing.assert_close(full_logits(together, tokens), full_logits(model, tokens), rtol=0, atol=2e-4)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_devices_without_a_product(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.delenv(dispatch.NO_FALLBACK, raising=False)
    x = torch.empty(1, 256, device="meta")
    monkeypatch.setattr(type(x), "device", torch.device("cuda"), raising=False)
    assert dispatch.use_fp8_gemm(x) == (capability >= (8, 9))
    assert dispatch.use_block_gemm(x, 256, 256) == (capability == (9, 0))
    assert not dispatch.use_block_gemm(x, 256, 200)
    if capability >= (10, 0):
        dispatch.require_fp4_gemm(x.device)
    else:
        with pytest.raises(D2SDError, match=r"no product for NVFP4(.|\n)*dequantize"):
            dispatch.require_fp4_gemm(x.device)
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match="scales of blocks"):
        dispatch.use_block_gemm(x, 256, 200)

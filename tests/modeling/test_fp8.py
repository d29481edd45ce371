"""FP8 layers against nested loops over the numbers that E4M3 has."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from d2sd.modeling.decoder import Decoder
from d2sd.modeling.fp8 import Fp8Cache, Fp8Linear, linear_names, round_to_fp8
from d2sd.modeling.inference import ServedModel
from d2sd.modeling.native import pack
from d2sd.plugins.shared.fp8 import to_pages
from tests.tiny import feed, in_fp8, pool_for, random_tokens, tiny_decoder, tiny_drafter


def e4m3_numbers() -> list[float]:
    """All that E4M3 has from zero up, by its definition: bias 7, three bits of fraction, no infinity, one NaN."""
    small = [fraction / 8 * 2**-6 for fraction in range(8)]
    return small + [
        (1 + fraction / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    ]


def rounded(x: float) -> float:
    """The nearest E4M3 number; of two, the one whose last bit is 0; what exceeds all is the largest."""
    numbers = e4m3_numbers()
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(x)), i % 2))
    return math.copysign(numbers[best], x)


def test_rounding_is_to_nearest_even_and_saturates() -> None:
    numbers = e4m3_numbers()
    halves = [(a + b) / 2 for a, b in pairwise(numbers)]
    values = [*numbers, *halves, *(h * 1.001 for h in halves), 449.0, 480.0, 1e9]
    scale = 0.25  # a power of two: the division is exact
    found = to_pages(torch.tensor(values + [-v for v in values]) * scale, torch.tensor(scale)).float().tolist()
    expected = [rounded(v) for v in values]
    assert found == expected + [-v for v in expected]


def quantized_linear(bias: bool, gain: float = 1.0) -> tuple[Fp8Linear, Tensor]:
    """A layer [5, 16], and an input that exceeds its scale in places."""
    draw = torch.Generator().manual_seed(3)
    layer = Fp8Linear(16, 5, bias)
    weight = torch.randn(5, 16, generator=draw) * 0.1
    layer.weight_scale = weight.abs().max() / 448
    layer.input_scale = torch.tensor(1.7 * gain / 448)
    layer.weight.data = to_pages(weight, layer.weight_scale)
    if layer.bias is not None:
        layer.bias.data = torch.randn(5, generator=draw)
    return layer, torch.randn(2, 3, 16, generator=draw) * gain


def oracle(layer: Fp8Linear, x: Tensor) -> Tensor:
    """[..., 16] -> [..., 5] in Python's floats."""
    rows = x.flatten(0, -2).tolist()
    weight = layer.weight.float().tolist()
    s_x, s_w = layer.input_scale.item(), layer.weight_scale.item()
    bias = [0.0] * 5 if layer.bias is None else layer.bias.tolist()
    out = [
        [
            sum(rounded(x / s_x) * w for x, w in zip(row, line, strict=True)) * s_x * s_w + b
            for line, b in zip(weight, bias, strict=True)
        ]
        for row in rows
    ]
    return torch.tensor(out).view(*x.shape[:-1], 5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_a_layer_is_the_sum_over_fp8_numbers(dtype: torch.dtype, within: float, bias: bool, packed: bool) -> None:
    layer, x = quantized_linear(bias)
    x = x.to(dtype)
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(dtype)
    expected = oracle(layer, x.float())
    module: nn.Module = layer
    if packed:
        holder = ServedModel()
        holder.add_module("first", nn.Linear(1, 1).to(dtype))
        holder.add_module("second", layer)
        pack(holder)  # type: ignore[arg-type]
        module = holder.get_submodule("second")
        assert not isinstance(module, Fp8Linear)
    found = module(x)
    assert found.dtype == dtype
    assert (found.float() - expected).abs().max() <= within * expected.abs().max() * (2 if bias else 1)


def test_layers_of_one_product_are_rounded_with_one_scale() -> None:
    model, plain = (tiny_drafter(tiny_decoder("llama", attention_bias=True).config, layers=1) for _ in range(2))
    names, tensors = linear_names(plain), plain.state_dict()
    round_to_fp8(model, {name: 0.01 * index for index, name in enumerate(names, start=1)})
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    joined = [f"{attention}.{kind}_proj" for kind in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    groups = [*joined, ["fc"], [f"{attention}.o_proj"], [f"{mlp}.down_proj"]]
    assert sorted(name for group in groups for name in group) == sorted(names)
    for group in groups:
        scale = max(tensors[f"{name}.weight"].abs().max().item() for name in group) / 448
        for name in group:
            made = model.get_submodule(name)
            assert isinstance(made, Fp8Linear)
            assert made.input_scale.item() == pytest.approx(0.01 * (names.index(name) + 1))
            assert made.weight_scale.item() == pytest.approx(scale)
            assert made.weight.float().equal(to_pages(tensors[f"{name}.weight"], made.weight_scale).float())
            assert (made.bias is None) == (f"{name}.bias" not in tensors)
            assert made.bias is None or made.bias.equal(tensors[f"{name}.bias"])


@torch.inference_mode()
def test_a_drafter_in_fp8_alone_is_packed_in_its_own_type() -> None:
    """The drafter's first parameter is fc's, in FP8."""
    drafter = tiny_drafter(tiny_decoder().config).bfloat16()
    drafter = in_fp8(drafter)
    features, places = torch.randn(1, 5, 64).bfloat16(), torch.arange(5)[None]
    expected = drafter.context_keys_values(features, places)
    pack(drafter)
    assert not any(isinstance(layer, Fp8Linear) for layer in drafter.modules())
    for found, wanted in zip(drafter.context_keys_values(features, places), expected, strict=True):
        assert found.equal(wanted)


def test_sums_beyond_half_precision_survive() -> None:
    layer, x = quantized_linear(False, gain=3e4)  # unscaled, a sum of 16 products of 448 each is 3e6
    found = layer(x.to(torch.float16).clamp(-6e4, 6e4))
    assert found.isfinite().all()
    expected = oracle(layer, x.to(torch.float16).clamp(-6e4, 6e4).float())
    assert (found.float() - expected).abs().max() <= 2**-10 * expected.abs().max()


def test_a_cache_gives_back_what_pages_would_hold() -> None:
    cache = Fp8Cache()
    cache.scale = torch.tensor(0.02)
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    expected = [rounded(v / cache.scale.item()) * cache.scale.item() for v in x.flatten().tolist()]
    torch.testing.assert_close(cache(x).flatten(), torch.tensor(expected), rtol=1e-6, atol=0)


def fp8_decoder(*, cache: bool, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> Decoder:
    """The tiny decoder with every linear layer but the head in FP8."""
    plain = tiny_decoder("qwen3", tie=False, head_dim=head_dim).to(dtype)
    return in_fp8(plain, cache=cache)


def test_the_layers_of_models_that_become_fp8() -> None:
    decoder = tiny_decoder("qwen2", layers=1, tie=False)
    per_layer = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert sorted(linear_names(decoder)) == sorted(f"layers.0.{name}" for name in per_layer)
    assert "fc" in linear_names(tiny_drafter(decoder.config))
    model = fp8_decoder(cache=True)
    assert sorted(linear_names(model)) == sorted(linear_names(tiny_decoder("qwen3", tie=False)))


@pytest.mark.parametrize("cache", [False, True])
def test_a_row_reads_the_same_before_and_after_its_commit(cache: bool) -> None:
    """One pass over a text, and one token a pass: FP8 K/V are rounded in both, or a tree would differ from a chain."""
    model = fp8_decoder(cache=cache).double()  # nothing but FP8 rounds: no sum lands on another side of a tie
    for module in model.modules():
        if isinstance(module, Fp8Linear):  # double() has widened what is FP8
            module.weight.data = module.weight.data.to(torch.float8_e4m3fn)
    tokens = random_tokens(model, 2, 9)
    pool, table = pool_for(model.config.body, 2, 9, dtype=torch.float64)
    whole = feed(model, tokens, pool, table, torch.zeros(2, dtype=torch.long)).hidden
    pool, table = pool_for(model.config.body, 2, 9, dtype=torch.float64)
    steps = [
        feed(model, tokens[:, t : t + 1], pool, table, torch.full((2,), t, dtype=torch.long)).hidden for t in range(9)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-9)

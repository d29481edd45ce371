"""Every form of a product gives the numbers of the plain one, and takes no more kernels than it says."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import Tensor

from d2sd.integrations.trtllm.tree_drafters import SharedTables
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.fp8 import Fp8Linear
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.kv_pool import Rows
from d2sd.modeling.prepare import prepare_for_inference
from d2sd.modeling.product import Product
from d2sd.modeling.product_forms import FORMS, MOST_ROWS, PLAIN, Form, Weights, bucket, forms, padded_rows, with_rows
from d2sd.modeling.where import Where
from tests.modeling.test_fused import AUX, counted, outputs, pair
from tests.plugins.cpu.test_linear import by_loops
from tests.product_forms import cuda_products
from tests.tiny import in_fp8, pool_for, random_tokens, tiny_decoder

__all__ = ["cuda_products"]

NARROW = torch.float8_e4m3fn
NAMED = {form.name: form for form in FORMS}
#: Factors, result, whether the result is biased.
KINDS = {
    "bf16": (torch.bfloat16, torch.bfloat16, False),
    "bf16 biased": (torch.bfloat16, torch.bfloat16, True),
    "fp16": (torch.float16, torch.float16, False),
    "fp32": (torch.float32, torch.float32, True),
    "FP8": (NARROW, torch.bfloat16, False),
    "FP8 sums": (NARROW, torch.float32, False),
}


def weights_of(kind: str, outputs: int = 48, inputs: int = 96, *, room: bool = True) -> Weights:
    dtype, result, biased = KINDS[kind]
    draw = torch.Generator().manual_seed(outputs)
    values = torch.randn(outputs, inputs, generator=draw).to(dtype)
    bias = torch.randn(outputs, generator=draw).to(dtype) if biased else None
    one = torch.ones(())
    scales = None if dtype != NARROW else (one, one) if result == torch.float32 else (one / 7, one / 3)
    return Weights(values, result, bias, scales, result != torch.float32, room)


def unrounded(x: Tensor, weights: Weights) -> Tensor:
    """The product of these numbers, scaled and biased."""
    factor = math.prod(scale.item() for scale in weights.scales or ())
    found = by_loops(x.float(), weights.values.float(), None) * factor
    return found if weights.bias is None else found + weights.bias.float()


@pytest.mark.usefixtures("cuda_products")
@pytest.mark.parametrize("rows", [1, 7, 16, 19, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_round_the_same_sums(kind: str, rows: int) -> None:
    weights = weights_of(kind)
    memory = torch.full((64, 96), math.nan).to(weights.values.dtype)  # what padding reads is nobody's number
    x = memory[:rows]
    x.copy_(torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)))
    expected = unrounded(x, weights)
    step = torch.finfo(weights.dtype).eps
    for form in forms(rows, weights, (9, 0)):
        for given in (x, x.clone()):  # with and without room behind it
            found = form.call(given, weights)
            assert (found.shape, found.dtype) == (expected.shape, weights.dtype), form.name
            torch.testing.assert_close(found.float(), expected, rtol=step, atol=1e-4 + step, msg=form.name)


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "expected"),
    [
        ("bf16", 1, 64, "plain, padded, split 2, split 4, kernel"),
        ("bf16", 16, 64, "plain, split 2, split 4, kernel"),
        ("bf16", 64, 48, "plain, split 2, kernel"),
        ("bf16", 64, 40, "plain, kernel"),
        ("bf16 biased", 8, 64, "plain, padded, kernel"),
        ("fp16", 65, 64, "plain, padded"),
        ("bf16", 128, 64, "plain"),
        ("bf16", 257, 64, "plain"),
        ("fp32", 1, 64, "plain"),
        ("FP8", 1, 64, "plain, padded, kernel"),
        ("FP8", 16, 64, "plain, padded, kernel"),
        ("FP8 sums", 32, 64, "plain, kernel"),
    ],
)
def test_forms_that_apply(kind: str, rows: int, inputs: int, expected: str) -> None:
    found = forms(rows, weights_of(kind, inputs=inputs), (9, 0))
    assert ", ".join(form.name for form in found) == expected


@pytest.mark.parametrize("kind", ["FP8", "FP8 sums", "bf16", "fp16"])
def test_few_rows_are_split_in_one_launch(kind: str) -> None:
    """Where whole tiles divide their weights. The kernel's own numbers are in tests/ptx/test_split_products.py."""
    weights = weights_of(kind, 256, 128)
    assert [NAMED["split kernel"] in forms(rows, weights, (9, 0)) for rows in (1, 64, 65)] == [True, True, False]
    for other in (weights_of(kind, 256, 192), weights_of(kind, 192, 128), weights_of("bf16 biased", 256, 128)):
        assert NAMED["split kernel"] not in forms(1, other, (9, 0))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(weights.values.dtype)
    found, step = NAMED["split kernel"].call(x, weights), torch.finfo(weights.dtype).eps
    torch.testing.assert_close(found.float(), unrounded(x, weights), rtol=step, atol=1e-4 + step)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_product_has_a_counter_for_each_tile(kind: str, count: int) -> None:
    layers = [torch.nn.Linear(128, 192, bias=False, dtype=torch.bfloat16) for _ in range(count)]
    narrow = [Fp8Linear.of(layer, 1.0, torch.tensor(scale + 1.0)) for scale, layer in enumerate(layers)]
    product = Product(narrow if kind == "fp8" else layers, torch.bfloat16)
    assert product.weights is not None
    assert product.weights.arrived is not None
    assert len(product.weights.arrived) == -(-len(product.weight) // 128)
    assert not product.weights.arrived.any()


def test_rows_are_padded_beyond_what_is_slow() -> None:
    assert [padded_rows(rows, torch.bfloat16) for rows in (1, 8, 16, 17, 48)] == [16, 16, 16, 32, 48]
    assert [padded_rows(rows, NARROW) for rows in (1, 16, 17, 33)] == [32, 32, 32, 48]
    assert [bucket(rows) for rows in (1, 2, 3, 64, 65, 256)] == [1, 2, 4, 64, 128, 256]
    assert bucket(MOST_ROWS) == MOST_ROWS


def test_padding_copies_only_without_room() -> None:
    memory = torch.zeros(8, 4)
    assert with_rows(memory[:3], 8).data_ptr() == memory.data_ptr()
    assert with_rows(memory[2:5], 6).data_ptr() == memory[2:].data_ptr()
    for given in (memory[2:5], memory[:, :2], memory[:3].t()):
        wider = with_rows(given, 9)
        assert wider.data_ptr() != memory.data_ptr()
        assert wider.shape == (9, given.shape[1])
        assert torch.equal(wider[: len(given)], given)


def choose(form: Form, *models: Decoder | Drafter) -> list[Product]:
    """Let all products of fused models take a form."""
    products: list[Product] = []
    for model in models:
        assert isinstance(model.compiled, FusedLayers)
        products += model.compiled.products
        products += [part for part in model.children() if isinstance(part, Product)]
    for product in products:
        product.forms = {1 << power: form for power in range(10)}
    return products


@pytest.mark.usefixtures("anywhere", "cuda_products")
@pytest.mark.parametrize("fp8", [False, True])
def test_models_serve_with_every_form(fp8: bool) -> None:
    target, drafter = pair(tiny_decoder("qwen3"))
    if fp8:
        target, drafter = in_fp8(target), in_fp8(drafter)
    for model in (target, drafter):
        fuse(model if fp8 else model.to(torch.bfloat16))
    assert len(choose(PLAIN, target, drafter)) == 4 * (len(products_of_layers(target)) + 3) + 2  # and fc, and the head
    expected = outputs(target, drafter)
    for form in FORMS[1:]:
        if fp8 and form.name.startswith("split"):
            continue
        choose(form, target, drafter)
        for name, found in outputs(target, drafter).items():
            # bf16: sums in another order fall on the other side of a rounding, here and there; then layers follow
            within = 1e-4 if fp8 else 0.05 * float(expected[name].float().abs().max())
            torch.testing.assert_close(found, expected[name], atol=within, rtol=0, msg=f"{form.name}: {name}")


def products_of_layers(model: Decoder) -> list[object]:
    return list(cast("FusedLayers", model.compiled)._layers)


@pytest.mark.usefixtures("anywhere", "cuda_products")
@pytest.mark.parametrize(("name", "fp8", "added"), [("padded", True, 0), ("padded", False, 0), ("split 2", False, 4)])
@torch.inference_mode()
def test_forms_add_no_kernel_but_their_own(name: str, fp8: bool, added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding costs none, because our ops leave room behind what they make."""
    target = tiny_decoder("qwen3", layers=2)
    target = in_fp8(target) if fp8 else target.to(torch.bfloat16)
    fuse(target)
    tokens, pool = random_tokens(target, 1, 4), pool_for(target.config.body, 1, 4)[0]
    rows = Rows.chain(4, Where(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)))
    totals = []
    for form in (PLAIN, NAMED[name]):
        choose(form, target)
        with counted(monkeypatch) as launches:
            target(tokens, rows, pool, AUX)
        totals.append(launches.total())
    assert totals[1] - totals[0] == 2 * added


def test_sums_are_fp32_on_cuda() -> None:
    """PyTorch's flags are of the process: a target on a GPU sets them when it is prepared, TensorRT-LLM's does not."""
    matmul = torch.backends.cuda.matmul
    flags = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32"
    before = [getattr(matmul, flag) for flag in flags]
    try:
        ours = tiny_decoder(layers=1).to("meta")
        theirs = SharedTables(ours.config, ours.embed_tokens.weight, ours.head)
        for target, allowed in ((tiny_decoder(layers=1), True), (theirs, True), (ours, False)):
            for flag in flags:
                setattr(matmul, flag, True)
            prepare_for_inference(target)
            assert [getattr(matmul, flag) for flag in flags] == [allowed] * 3
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(matmul, flag, value)

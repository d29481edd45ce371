"""Fused layers: with the ops' specifications they are the layers bit by bit, and few kernels."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d2sd.errors import D2SDError
from d2sd.modeling import kv_pool
from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.fp8 import Fp8Linear, kv_scales, linear_names
from d2sd.modeling.fused import FusedLayers, fuse
from d2sd.modeling.kv_pool import CommittedRows, Rows
from d2sd.modeling.layers import Layer
from d2sd.modeling.product import Product
from d2sd.modeling.where import Where
from d2sd.plugins import dispatch
from tests.tiny import Model, feed, in_fp8, pool_for, random_tokens, tiny_decoder, tiny_drafter, tiny_flex

AUX = (0, 2)
REQUESTS = 6


def fused(model: Model) -> Model:
    made = copy.deepcopy(model)
    fuse(made)
    return made


@torch.inference_mode()
def outputs(target: Decoder, drafter: Drafter) -> dict[str, Tensor]:
    """Two chunks of the target, then the drafter over the first one's context."""
    tokens, weight = random_tokens(target, REQUESTS, 12), target.embed_tokens.weight
    pool, table = pool_for(target.config.body, REQUESTS, 12, dtype=weight.dtype, fp8=kv_scales(target))
    drafts, _ = pool_for(drafter.config.body, REQUESTS, 12, dtype=weight.dtype, fp8=kv_scales(drafter))
    first, second = (Rows.chain(n, Where(table, torch.full((REQUESTS,), done))) for done, n in ((0, 7), (7, 5)))
    out = target(tokens[:, :7], first, pool, AUX)
    every = torch.ones(REQUESTS, 7, dtype=torch.bool)
    pool.write(out.k, out.v, (table,), first.positions, every)
    k, v = drafter.context_keys_values(out.features, first.positions)
    drafts.write(k, v, (table,), first.positions, every)
    later = target(tokens[:, 7:], second, pool, AUX)
    return {
        "hidden": later.hidden,
        "features": later.features,
        "k": later.k,
        "v": later.v,
        "context k": k,
        "context v": v,
        "draft": drafter.draft(target.embed_tokens(tokens[:, 7:]), second, drafts),
    }


@torch.inference_mode()
def drafts(target: Decoder, head: FlexHead) -> Tensor:
    """Mask rows behind a context."""
    tokens, weight = random_tokens(target, REQUESTS, 9), target.embed_tokens.weight
    pool, table = pool_for(target.config.body, REQUESTS, 9, dtype=weight.dtype, fp8=kv_scales(target))
    feed(target, tokens, pool, table, torch.zeros(REQUESTS, dtype=torch.long))
    context = torch.full((REQUESTS,), 9)
    rows = Rows(context[:, None] + torch.arange(4), torch.ones(REQUESTS, 4, 4, dtype=torch.bool), Where(table, context))
    return head.draft(head.blocks(target.embed_tokens(tokens[:, 0])), rows, pool.from_layer(head.config.split_layer))


def assert_agrees(found: Tensor, expected: Tensor, within: float, *, narrow: bool) -> None:
    """All numbers agree or, where products are `narrow`, most requests do."""
    if narrow:
        assert_fp8_agrees(found, expected, within)
    else:
        torch.testing.assert_close(found, expected, atol=within, rtol=within)


def assert_fp8_agrees(found: Tensor, expected: Tensor, within: float) -> None:
    """Rounding to FP8 makes a step of a sum's last bit now and then, which depends on the processor, and its request
    differs; another weight or scale would make all requests differ.
    """
    each = (tensor.unbind(tensor.shape.index(REQUESTS)) for tensor in (found, expected))
    alike = [torch.allclose(one, other, atol=within, rtol=within) for one, other in zip(*each, strict=True)]
    assert sum(alike) > REQUESTS / 2, alike


def pair(target: Decoder) -> tuple[Decoder, Drafter]:
    return target, tiny_drafter(target.config, target_layer_ids=AUX, layers=3)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "bias"), [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_fused_layers_are_the_layers(family: Family, bias: bool, dtype: torch.dtype) -> None:
    models = [model.to(dtype) for model in pair(tiny_decoder(family, attention_bias=bias))]
    expected, found = outputs(*models), outputs(*map(fused, models))  # type: ignore[arg-type]
    for name, tensor in expected.items():
        if dtype == torch.float32:  # a product of another shape may sum in another order
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(found[name], tensor), name


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_parts_are_summed_behind_both_branches(family: Family) -> None:
    """Tensor parallelism sums so; here the sum is a part twice, and fused and plain models sum equally often."""
    target, drafter = pair(tiny_decoder(family, attention_bias=True))
    counts: Counter[str] = Counter()

    def model_with_sums(kind: str) -> Decoder:
        def doubled(branch: Tensor) -> Tensor:
            counts[kind] += 1
            return 2 * branch

        made = copy.deepcopy(target)
        for layer in cast("list[Layer]", made.layers):
            layer.reduce = doubled
        return fused(made) if kind == "fused" else made

    expected, found = (outputs(model_with_sums(kind), drafter) for kind in ("plain", "fused"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
    assert counts["plain"] == counts["fused"] == 2 * 2 * len(target.layers)
    assert (outputs(target, drafter)["hidden"] - expected["hidden"]).abs().max() > 0.01


@pytest.mark.usefixtures("anywhere")
def test_windows_and_sinks() -> None:
    target, drafter = pair(tiny_decoder("qwen3", windows=(3, None, 5), sinks=True))
    together = fused(target)
    expected, found = outputs(target, drafter), outputs(together, drafter)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
    for layer in target.layers:
        layer.get_submodule("self_attn").register_parameter("sinks", None)
    assert (outputs(target, drafter)["hidden"] - expected["hidden"]).abs().max() > 0.01


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("bias", "shared"), [(False, False), (True, False), (True, True)])
def test_fp8_layers_and_pages(bias: bool, shared: bool) -> None:
    """Every product in FP8, and the target's pages. `shared`: weights of one input have one scale."""
    target, drafter = pair(tiny_decoder("llama", attention_bias=bias))
    models = in_fp8(target, cache=True), in_fp8(drafter)
    for model in models if shared else ():
        for name, linear in model.named_modules():
            if isinstance(linear, Fp8Linear) and name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                linear.weight_scale = torch.tensor(3e-4)
    together = fused(models[0]), fused(models[1])
    for one in together:
        assert isinstance(one.compiled, FusedLayers)
        assert all((part.scales is None) == shared for part in products(one.compiled) if joined(part))
    expected, found = outputs(*models), outputs(*together)
    for name, tensor in expected.items():
        assert_fp8_agrees(found[name], tensor, 2e-5)


@pytest.mark.usefixtures("anywhere")
def test_products_of_one_input_share_its_largest_scale() -> None:
    model = in_fp8(tiny_decoder())
    together = copy.deepcopy(model)
    for which, one in enumerate((model, together)):
        for layer in one.layers:
            for factor, name in enumerate(("q_proj", "k_proj", "v_proj"), start=1):
                linear = layer.get_submodule(f"self_attn.{name}")
                assert isinstance(linear, Fp8Linear)
                linear.input_scale = torch.tensor(0.01 * (3 if which else factor))
    tokens = random_tokens(model, 1, 9)
    expected, found = (fused(one).full_pass(tokens).hidden for one in (together, model))
    assert torch.equal(found, expected)


#: Of the target's layers, and of the head's own projections.
FP8 = {"16 bits": (False, False), "the target in FP8": (True, False), "both in FP8": (True, True)}


@pytest.mark.slow
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("narrow", "narrow_head"), FP8.values(), ids=FP8)
def test_a_flexdraft_head_shares_fused_layers(narrow: bool, narrow_head: bool) -> None:
    """Mask rows pass the target's own MLPs, before and after it is fused, and no weight is there twice."""
    dtype, within = (torch.float32, 2e-5) if narrow else (torch.bfloat16, 0)
    target = tiny_decoder("qwen3" if narrow else "qwen2").to(dtype)
    target = in_fp8(target, cache=True) if narrow else target
    head = tiny_flex(target, layers=2, block_size=4, anchored=True).to(dtype)
    if narrow_head:
        head = in_fp8(head, [name for name in linear_names(head) if "self_attn" in name])
        head.join(target)
    own = sum(p.nbytes for name, p in head.layers.named_parameters() if name.endswith("proj.weight"))
    expected = drafts(target, head)
    fuse(head, target)
    assert head.compiled is None, "its target is not fused"
    modules = [weakref.ref(target.layers[layer]) for layer in (1, 2)]
    fuse(target)
    assert_agrees(drafts(target, head), expected, within, narrow=narrow)
    fuse(head, target)
    assert not len(head.layers)
    gc.collect()
    assert [module() for module in modules] == [None, None], "the target's unfused layers are gone"
    found, theirs, ours = drafts(target, head), target.compiled, getattr(head, "compiled", None)
    assert_agrees(found, expected, within, narrow=narrow)
    assert isinstance(theirs, FusedLayers)
    assert isinstance(ours, FusedLayers)
    held = {one.weight.data_ptr(): one.weight.nbytes for one in (*products(theirs), *products(ours))}
    assert sum(held.values()) == theirs.nbytes + own


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("narrow", "narrow_head"), FP8.values(), ids=FP8)
@torch.inference_mode()
def test_rows_that_join_fused_layers(narrow: bool, narrow_head: bool) -> None:
    """In parallel mode mask rows pass the target's fused MLPs beside its own rows, and a head keeps no layers."""
    target = tiny_decoder("qwen3", layers=4)
    target = in_fp8(target, cache=True) if narrow else target
    head = tiny_flex(target, layers=2, block_size=3)
    head = in_fp8(head, [name for name in linear_names(head) if "self_attn" in name]) if narrow_head else head
    head.join(target)
    tokens, context = random_tokens(target, REQUESTS, 12), torch.full((REQUESTS,), 9)
    for layer in head.layers if narrow_head else ():
        for name in "qkv":  # not the target's
            linear = layer.get_submodule(f"self_attn.{name}_proj")
            assert isinstance(linear, Fp8Linear)
            linear.input_scale *= 1.5

    def run() -> tuple[Tensor, ...]:
        pool, table = pool_for(target.config.body, REQUESTS, 12, fp8=kv_scales(target))
        feed(target, tokens[:, :9], pool, table, torch.zeros(REQUESTS, dtype=torch.long))
        rows = replace(Rows.chain(3, Where(table, context)), joining=head.joining)
        out = target(tokens[:, 9:], rows, pool)
        return out.hidden, out.k, out.v, out.joined

    expected = run()
    fuse(target)
    fuse(head, target)
    for found, wanted in zip(run(), expected, strict=True):
        assert_agrees(found, wanted, 5e-5, narrow=narrow)
    assert isinstance(head.compiled, FusedLayers)
    assert not len(head.layers)


def products(native: FusedLayers) -> list[Product]:
    parts = [part for one in native._layers for part in (*one.mixer.products, *one.feed_forward.children())]
    assert all(isinstance(part, Product) for part in parts)
    return cast("list[Product]", parts)


def joined(product: Product) -> bool:
    return product.weight_scales is not None and len(product.weight_scales) > 1


def weights_of(layers: nn.ModuleList) -> list[Tensor]:
    """Return the weights of all products, in FP8 or not."""
    tensors = [*layers.named_parameters(), *layers.named_buffers()]
    return [tensor for name, tensor in tensors if name.endswith("proj.weight")]


def storages(weights: list[Tensor]) -> set[tuple[int, int]]:
    """The address and bytes of the memory of each."""
    return {(memory.data_ptr(), memory.nbytes()) for memory in (weight.untyped_storage() for weight in weights)}


@pytest.mark.usefixtures("anywhere")
def test_weights_are_held_once() -> None:
    target, drafter = pair(tiny_decoder("qwen3"))
    for model in (target, drafter):
        layers = model.layers
        weights = sum(weight.nbytes for weight in weights_of(layers))
        fuse(model)
        fuse(model)
        native = model.compiled
        assert isinstance(native, FusedLayers)
        assert native.nbytes == weights
        assert not list(native.parameters())
        held = storages([product.weight for product in products(native)])
        assert sum(size for _, size in held) == weights, "and the context's product has none of its own"
        if model is target:  # a drafter's projections are joined once more, for its context
            assert storages(weights_of(layers)) == held, "nor have layers that somebody keeps"


def test_where_layers_are_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On CUDA where the kernels take them; else after a warning, or not at all."""
    weight: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(dispatch, "triton_version", lambda: Version("99"), raising=False)
    monkeypatch.delenv(dispatch.NO_FALLBACK, raising=False)
    dispatch.unsupported.cache_clear()
    dispatch._warn_once.cache_clear()

    def use(size: int = 128, *, fp8: bool = False, unlike: str | None = None) -> bool:
        return dispatch.use_fused_layers(weight, size, fp8=fp8, unlike=unlike)

    assert use()
    assert not caplog.records
    assert [use(8), use(fp8=True), use(unlike="some other modules")] == [False] * 3
    assert all(text in caplog.text for text in ("head size 8", "compute capability 8.9", "some other modules"))
    monkeypatch.setenv(dispatch.NO_FALLBACK, "1")
    with pytest.raises(D2SDError, match="some other modules"):
        use(unlike="some other modules")
    capability = (9, 0)
    assert use(fp8=True)
    weight.device = torch.device("cpu")
    assert not use()
    model = tiny_decoder()
    fuse(model)
    assert model.compiled is None


@pytest.mark.usefixtures("anywhere")
def test_products_of_two_kinds_stay_apart() -> None:
    model = in_fp8(tiny_decoder(), ["layers.1.mlp.up_proj"])
    fuse(model)
    assert model.compiled is None


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that launch something: not views, and not memory that is only reserved."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.inside = False  # an op of ours, counted as such

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (self.inside or func.is_view or "view" in name or "empty" in name):
            self.names[name] += 1
        return out


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches of what runs inside, as on a GPU: our ops are one each."""
    launches = Launches()

    def once(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            if launches.inside:  # a part of an op
                return run(*arguments, **named)
            launches.names[name] += 1
            launches.inside = True
            try:
                return run(*arguments, **named)
            finally:
                launches.inside = False

        return counting

    for op in [op for op in dispatch.OPS.values() if op.folder == "layer_ops"]:
        monkeypatch.setattr(op, "reference", once(op.name, op.reference))
    types = {True: None, False: torch.float8_e4m3fn}

    def result(q: Tensor, *_: object, scale: Tensor | None, out: Tensor | None, **_named: object) -> Tensor:
        return torch.empty_like(q, dtype=types[scale is None]) if out is None else out

    attention = once("attention", result)
    monkeypatch.setattr(kv_pool, "cascade_attention", attention)
    with launches:
        yield launches.names


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("fp8", [False, True])
@torch.inference_mode()
def test_a_pass_is_few_launches(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine kernels a layer and the last norm; of tokens the first norm makes embeddings and tables too."""
    target, drafter = pair(tiny_decoder("qwen3", layers=7))
    if fp8:
        target, drafter = in_fp8(target, cache=True), in_fp8(drafter)
    head = tiny_flex(target, layers=2)
    head = in_fp8(head, [name for name in linear_names(head) if "self_attn" in name]) if fp8 else head
    head.join(target)
    drafter = fused(drafter)
    fuse(target)
    fuse(head, target)
    rows, features = (
        Rows.chain(4, Where(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long))),
        torch.ones(1, 4, 64),
    )
    tokens, pool = torch.ones(1, 4, dtype=torch.long), pool_for(target.config.body, 1, 4)[0]
    embedded = target.embed_tokens(tokens)
    layer = 9
    with counted(monkeypatch) as launches:
        target(tokens, rows, pool, AUX)
    assert launches.total() == 7 * layer + 1, launches
    with counted(monkeypatch) as launches:
        drafter.draft(embedded, rows, pool)
    assert launches.total() == 3 * layer + 2, "rows that are no tokens have tables of their own"
    with counted(monkeypatch) as launches:
        head.draft(head.blocks(features[:, 0]), rows, pool.from_layer(5))
    assert launches.total() == 2 * layer + 2, "mask rows are one row, read by all"
    with counted(monkeypatch) as launches:
        drafter.context_keys_values(features, rows.positions)
    # fc, its norm, tables, product, heads; in FP8 a product for each of three layers, and fc's input
    assert launches.total() == (8 if fp8 else 5), launches


# -- context and draft together ----------------------------------------------------------------------------------------


@torch.inference_mode()
def injected(target: Decoder, drafter: Drafter, *, together: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts of two requests, hidden states [2, 5, E], and the pool's pages, over context that is injected first.

    The context is of three requests in another order, some of whose rows are not kept.
    """
    tokens, draw = random_tokens(target, 3, 14), torch.Generator().manual_seed(5)
    weight = target.embed_tokens.weight
    pool, table = pool_for(target.config.body, 3, 14, dtype=weight.dtype, fp8=kv_scales(target))
    drafts, _ = pool_for(drafter.config.body, 3, 14, dtype=weight.dtype, fp8=kv_scales(drafter))
    features = target(tokens[:, :9], Rows.chain(9, Where(table, torch.zeros(3, dtype=torch.long))), pool, AUX).features
    places = torch.arange(9).expand(3, 9)
    k, v = drafter.context_keys_values(features[:, :5], places[:, :5])
    drafts.write(k, v, (table,), places[:, :5], torch.ones(3, 5, dtype=torch.bool))
    keep = torch.tensor([[True, False, False, False], [True] * 4, [True, True, True, False]])
    order = [2, 0, 1]
    noise = torch.randn(3, 4, features.shape[2], generator=draw).to(weight.dtype)
    new = torch.where(keep[..., None], features[order, 5:], noise)  # rows that are not kept may hold anything
    committed = CommittedRows(new, (table[order],), places[:, 5:], keep, drafts.page_size)
    rows = Rows.chain(5, Where(table[[2, 1]], torch.tensor([6, 8])))
    drafted = tokens[[2, 1], 9:]
    if together:
        hidden = drafter.inject_and_draft(committed, drafted, target.embed_tokens, rows, drafts)
    else:
        k, v = drafter.context_keys_values(new, places[:, 5:])
        drafts.write(k, v, (table[order],), places[:, 5:], keep)
        hidden = drafter.draft(target.embed_tokens(drafted), rows, drafts)
    return hidden, drafts.k, drafts.v


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "bias"), [("llama", True), ("qwen3", False)])
def test_context_is_injected_by_the_draft(family: Family, bias: bool, dtype: torch.dtype, fuses: bool) -> None:
    target, drafter = pair(tiny_decoder(family, attention_bias=bias))
    target.to(dtype), drafter.to(dtype)
    expected = injected(target, drafter, together=False)
    found = injected(target, fused(drafter) if fuses else drafter, together=True)
    within = 1e-5 if dtype == torch.float32 else 0  # a product of another shape may sum in another order
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=within, rtol=within, equal_nan=True)  # pages are poisoned


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("cache", [False, True], ids=["16 bits", "FP8 pages"])
def test_fp8_context_is_injected_by_the_draft(cache: bool) -> None:
    """Layers of different input scales: one for all, the largest."""
    target, drafter = pair(tiny_decoder("llama"))
    drafter = in_fp8(drafter, cache=cache)
    for index, layer in enumerate(drafter.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = layer.get_submodule(f"self_attn.{name}")
            assert isinstance(linear, Fp8Linear)
            linear.input_scale = torch.tensor(0.01 * (1 + index))
    expected = injected(target, fused(drafter), together=False)
    found = injected(target, fused(drafter), together=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.usefixtures("anywhere")
def test_a_drafters_layers_share_the_largest_input_scale() -> None:
    """So that their context is quantized once for all."""
    drafter = in_fp8(pair(tiny_decoder())[1])
    for index, layer in enumerate(drafter.layers):
        linear = layer.get_submodule("self_attn.v_proj")
        assert isinstance(linear, Fp8Linear)
        linear.input_scale = torch.tensor(0.5 * (1 + index))
    native = fused(drafter).compiled
    assert isinstance(native, FusedLayers)
    assert {float(layer.mixer.joint.input_scale) for layer in native._layers} == {1.5}  # type: ignore[arg-type]
    assert native._context is not None
    assert float(native._context.input_scale) == 1.5  # type: ignore[arg-type]

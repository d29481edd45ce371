"""The table of tensors by arithmetic is what the modules are: every family, drafter, head and quantization scheme."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from d2sd.convert.checkpoint import schemes
from d2sd.convert.checkpoint.headers import ITEMSIZES
from d2sd.convert.checkpoint.weights import DTYPES, expected_shapes
from d2sd.convert.drafter_kind import DrafterKind
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
from d2sd.convert.kinds.flexdraft import KIND as FLEXDRAFT
from d2sd.modeling.config import DecoderConfig, Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.eagle3_config import eagle_parts
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.drafters.flexdraft_config import flex_parts
from d2sd.modeling.fp8 import linear_names, make_fp8, make_fp8_cache
from d2sd.modeling.scheme import Scheme
from d2sd.modeling.shapes import LinearShape, Parts, drafter_parts, linear_parts, shapes_of, target_parts
from tests.tiny import HEADS, tiny_decoder, tiny_drafter, tiny_eagle, tiny_flex

FAMILIES: tuple[Family, ...] = get_args(Family)
SCHEMES = {name: value for name, value in vars(schemes).items() if isinstance(value, Scheme)}


def check(model: nn.Module, parts: Parts) -> None:
    assert shapes_of(parts) == expected_shapes(model)
    assert sorted(linear_parts(parts)) == sorted(linear_names(model))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_targets(family: Family, tie: bool) -> None:
    config = tiny_decoder(family, tie=tie).config
    for bias in (False, True):
        other = replace(config, body=replace(config.body, qkv_bias=bias, o_bias=bias, qk_norm=not bias, sinks=bias))
        for each in (config, other):
            check(Decoder(each), target_parts(each))


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_pages_have_a_scale_in_each_layer_that_attends(family: Family) -> None:
    config = tiny_decoder(family).config
    model = Decoder(config)
    make_fp8_cache(model)
    assert shapes_of(target_parts(config, fp8_cache=True)) == expected_shapes(model)


@pytest.mark.parametrize("head", [None, *HEADS])
def test_drafters(head: str | None) -> None:
    config = tiny_drafter(tiny_decoder().config).config
    for changed in (config, replace(config, mask_embedding=True, draft_vocabulary=(1, 2, 3))):
        one = replace(changed, head=None if head is None else HEADS[head])
        model = Drafter(one)
        check(model, drafter_parts(one))
        assert DFLASH.fp8_layers(one) == [name for name in linear_names(model) if name in DFLASH.fp8_layers(one)]


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("ids", [None, (1, 4, 5)])
def test_flexdraft(anchored: bool, ids: tuple[int, ...] | None) -> None:
    config = replace(tiny_flex(tiny_decoder("qwen2"), anchored=anchored).config, draft_vocabulary=ids)
    check(FlexHead(config), flex_parts(config))


@pytest.mark.parametrize("ids", [None, (1, 4, 5)])
def test_eagle3(ids: tuple[int, ...] | None) -> None:
    config = replace(tiny_eagle(tiny_decoder("qwen2").config).config, draft_vocabulary=ids)
    check(Eagle3(config), eagle_parts(config))


def test_fp8_layers_of_drafters() -> None:
    target = tiny_decoder()
    cases: list[tuple[DrafterKind[Any, Any], Drafter | FlexHead | Eagle3]] = [
        (EAGLE3, tiny_eagle(target.config)),
        (DFLASH, tiny_drafter(target.config)),
        (FLEXDRAFT, tiny_flex(target)),
    ]
    for kind, model in cases:
        names = kind.fp8_layers(model.config)
        assert names
        with torch.device("meta"):
            made = kind.code().model(model.config)
            make_fp8(made, names)
        found = shapes_of(kind.parts(model.config), dict.fromkeys(names, schemes.FP8))
        assert found == expected_shapes(made)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [(32, 48), (160, 130), (256, 384)], ids=str)
def test_schemes(name: str, size: tuple[int, int]) -> None:
    scheme = SCHEMES[name]
    counts: Iterable[tuple[int, ...]] = [(3,)] if scheme == schemes.MXFP4 else [()]
    for count in counts:
        for bias in (False, True):
            with torch.device("meta"):
                layer = scheme.empty(*size, bias, *count)
            assert scheme.tensors(LinearShape(*size, bias), *count) == expected_shapes(layer)


def test_every_scheme_is_compared() -> None:
    assert len(SCHEMES) >= 13


def test_bytes_of_a_precision() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEMSIZES


def test_a_table_that_forgets_a_tensor_is_found() -> None:
    config: DecoderConfig = tiny_decoder().config
    parts = target_parts(config)
    del parts["norm.weight"]
    with pytest.raises(AssertionError):
        check(Decoder(config), parts)

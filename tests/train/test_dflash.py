"""Where a drafter starts: its shape, and that untrained it reads its context almost as the target's layers do."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.config import Family
from d2sd.modeling.layers import Layer
from d2sd.train.dflash import drafter_config, drafter_from_target
from d2sd.train_recipe import Geometry
from tests.tiny import random_tokens, tiny_decoder
from tests.train.helpers import GEOMETRY, target


def geometry(**changes: object) -> Geometry:
    return Geometry.model_validate(GEOMETRY.model_dump() | changes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_config_is_the_targets_with_the_layouts_norms(family: Family) -> None:
    decoder = tiny_decoder(family).config
    config = drafter_config(geometry(), decoder)
    assert (config.role, config.prefix_weight_base) == ("first", None)
    assert (config.body.hidden_size, config.body.head_dim, config.body.rope) == (32, 8, decoder.body.rope)
    assert (config.body.num_layers, config.num_target_layers) == (1, 3)
    assert (config.body.qk_norm, config.body.qkv_bias, config.body.o_bias) == (True, False, False)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 63, (0, 1))
    assert config.vocab_size == 64


@pytest.mark.parametrize(
    ("changes", "limit"), [({"layers": 4}, 3), ({"target_layer_ids": [0, 3]}, 2), ({"mask_token_id": 64}, 63)]
)
def test_a_geometry_that_the_target_cannot_hold_is_named(changes: dict[str, object], limit: int) -> None:
    (key,) = changes
    with pytest.raises(D2SDError, match=rf"drafter\.{key}(.|\n)*at most {limit}"):
        drafter_config(geometry(**changes), target().config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_untrained_drafter_reads_its_context_almost_as_the_target(family: Family, dtype: torch.dtype) -> None:
    """Values: like those of the target's own layer behind the auxiliary one. Keys: as large as the target's."""
    decoder = tiny_decoder(family, layers=4).to(dtype)
    config = drafter_config(geometry(target_layer_ids=[0, 2]), decoder.config)
    out = decoder.float().full_pass(random_tokens(decoder, 8, 12), aux_layer_ids=(0, 2))
    features = out.features.flatten(0, 1)
    decoder.to(dtype)
    drafter = drafter_from_target(config, decoder, features.to(dtype), torch.Generator().manual_seed(0))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in drafter.parameters())
    k, v = (x.detach() for x in drafter.context_keys_values(out.features, torch.arange(12).expand(8, 12)))
    source = cast(Layer, decoder.layers[3])
    values = out.v[3]
    if source.self_attn.v_proj.bias is not None:  # the layout has none
        values = values - source.self_attn.v_proj.bias.float().view(2, 8)
    assert float(F.cosine_similarity(v[0], values, dim=-1).mean()) > 0.9
    if family == "qwen3":
        assert float(F.cosine_similarity(k[0], out.k[3], dim=-1).mean()) > 0.9
    assert 0.8 < float(k[0].square().mean().sqrt() / out.k[3].square().mean().sqrt()) < 1.25


def test_layers_and_norms_come_from_the_targets_end() -> None:
    decoder = tiny_decoder("qwen3", layers=4)
    config = drafter_config(geometry(layers=2), decoder.config)
    drafter = drafter_from_target(config, decoder, torch.randn(5, 64), torch.Generator().manual_seed(0))
    for index in range(2):
        ours, theirs = drafter.layers[index].state_dict(), decoder.layers[index + 2].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(drafter.norm.weight, decoder.norm.weight)
    assert torch.equal(drafter.hidden_norm.weight, cast(Layer, decoder.layers[2]).input_layernorm.weight)


def test_fusion_passes_the_deepest_tap_and_scales_the_others() -> None:
    """Taps that differ a hundredfold, and one token with a massive activation: what leaves the fusion has size one."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([50.0, 0.5])
    sample = (torch.randn(200, 2, 32, generator=generator) * sizes[:, None]).flatten(1)
    sample[0] *= 1000
    config = drafter_config(geometry(), target().config)
    drafter = drafter_from_target(config, target(), sample, generator)
    columns = drafter.fc.weight.detach().view(32, 2, 32)
    parts = [(sample[1:, 32 * tap : 32 * tap + 32] @ columns[:, tap].T) for tap in (0, 1)]
    assert float(parts[1].square().mean().sqrt()) == pytest.approx(1, rel=0.1)
    assert float(parts[0].square().mean().sqrt()) == pytest.approx(0.2, rel=0.1)
    assert float(F.cosine_similarity(parts[1], sample[1:, 32:], dim=-1).mean()) > 0.95


def test_a_seed_decides_the_fusion() -> None:
    config = drafter_config(geometry(), target().config)
    sample = torch.randn(9, 64)
    one, again, other = (
        drafter_from_target(config, target(), sample, torch.Generator().manual_seed(seed)).fc.weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)

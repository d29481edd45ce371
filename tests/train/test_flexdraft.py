"""Where drafters start: their shapes, and what they compute before they are trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.nn import functional as F

from d2sd.errors import D2SDError
from d2sd.modeling.config import Family
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.flexdraft import FlexHead
from d2sd.modeling.kv_pool import KVPool, Rows
from d2sd.modeling.layers import Layer
from d2sd.modeling.where import Where
from d2sd.train.data.features import TrainingData
from d2sd.train.data.packing import pack_blocks
from d2sd.train.data.responses import Response
from d2sd.train.dflash import drafter_config, drafter_from_target
from d2sd.train.flexdraft import flex_added, flex_head, flex_hidden
from d2sd.train.loop import Trainer
from d2sd.train.pipeline.evaluate import as_written
from d2sd.train_recipe import FlexGeometry, Geometry
from tests.tiny import feed, pool_for, random_tokens, tiny_decoder, tiny_flex
from tests.train.helpers import BLOCK, GEOMETRY, features_of, responses_of, settings, share_of_blocks, target

LAYERS = 2


def made() -> Decoder:
    return tiny_decoder(layers=4)


def features(decoder: Decoder, known: list[Response]) -> TrainingData:
    """Outputs of the layer before the split."""
    return features_of(decoder, known, (3 - LAYERS,))


def fresh(decoder: Decoder, *, anchored: bool = False) -> FlexHead:
    geometry = FlexGeometry(layers=LAYERS, block_size=BLOCK, calibration_size=16, anchored=anchored)
    head = flex_head(geometry, decoder, features(decoder, responses_of(decoder)), seed=0)
    head.join(decoder)
    return head


@pytest.mark.parametrize("anchored", [False, True])
def test_training_computes_what_is_served(anchored: bool) -> None:
    """Mask rows over packed sequences equal those over the target's pages, block by block."""
    decoder = made()
    head = tiny_flex(decoder, layers=LAYERS, block_size=BLOCK, anchored=anchored)
    known = responses_of(decoder, 2)
    data = features(decoder, known)
    anchors = [torch.tensor([0, 4, 11]), torch.tensor([3, 8])]
    packed = pack_blocks([data[0], data[1]], anchors, BLOCK)
    table = decoder.embed_tokens.weight
    hidden = flex_hidden(head, table, packed, torch.ones(packed.tokens.shape[:2]))
    trained = flex_added(head, hidden, table, packed).logits(torch.float32)
    for row, starts in enumerate(anchors):
        text = torch.tensor([known[row].prompt_ids + known[row].response_ids])
        for block, anchor in enumerate(starts.tolist()):
            pool, table = pool_for(decoder.config.body, 1, 32)
            if anchor:
                feed(decoder, text[:, :anchor], pool, table, torch.tensor([0]))
            everywhere = torch.ones(1, BLOCK, BLOCK, dtype=torch.bool)
            place = torch.tensor([anchor])
            rows = Rows(place[:, None] + torch.arange(BLOCK), everywhere, Where(table, place))
            x = head.blocks(decoder.embed_tokens(text[:, anchor]))
            served = head.draft(x, rows, KVPool.from_layer(pool, head.config.split_layer))
            torch.testing.assert_close(hidden[row, block], served[0], atol=1e-4, rtol=0)
            added = head.calibrate(served[0], decoder.embed_tokens(text[0, anchor]))
            torch.testing.assert_close(trained[row, block], added, atol=1e-4, rtol=0)


def test_the_first_head_is_the_targets_attention() -> None:
    decoder = made()
    head = fresh(decoder)
    theirs = decoder.state_dict()
    for name, tensor in head.state_dict().items():
        if name.startswith("layers."):
            assert torch.equal(tensor, theirs[name.replace("layers.1", "layers.3").replace("layers.0", "layers.2")])
    assert not head.calibrate(torch.randn(3, 32), torch.randn(3, 32)).any()
    assert 0.01 < float(head.mask_embedding.detach().std()) < 0.03
    with pytest.raises(D2SDError, match="split off") as caught:
        flex_head(FlexGeometry(layers=4, block_size=BLOCK), decoder, features(decoder, []), seed=0)
    assert (caught.value.where, caught.value.expected) == ("flex.head.layers", "at most 3")


def test_the_projection_starts_as_the_best_linear_map_to_the_split_layer() -> None:
    """Gradients of its error over the sample vanish but for the ridge, which keeps it from growing."""
    decoder = made()
    head, data = fresh(decoder, anchored=True), features(decoder, responses_of(decoder))
    assert head.anchor_projection is not None
    sample = [data[i] for i in range(len(data))]
    embedded = torch.cat([decoder.embed_tokens(one.tokens[1:]) for one in sample])
    wanted = torch.cat([one.features[1:] for one in sample])
    weight = head.anchor_projection.weight.detach()
    ridge = 0.01 * embedded.square().sum(0).mean()
    slope = (embedded @ weight.T - wanted).T @ embedded + ridge * weight
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-3 * float(ridge), rtol=0)
    assert (embedded @ weight.T - wanted).square().mean() < 0.5 * wanted.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("anchored", [False, True])
def test_answers_are_learnt_by_heart_and_the_target_stays(anchored: bool, tmp_path: Path) -> None:
    """At least 0.9 of every block is accepted where it began with less than half."""
    decoder = made()
    known = responses_of(decoder)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    head = fresh(decoder, anchored=anchored)
    assert share_of_blocks(decoder, head, known) < 0.5
    wanted = settings(steps=80, learning_rate=1e-2, blocks=16, negatives=16, save_every=100)
    trainer = Trainer(decoder, head, features(decoder, known), wanted)
    trainer.run(tmp_path, lambda step, values: None)
    assert share_of_blocks(decoder, head, known) >= 0.9
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.slow
def test_an_interrupted_training_goes_on_to_the_same_head(tmp_path: Path) -> None:
    decoder = made()
    data, quick = features(decoder, responses_of(decoder)), settings(steps=4, optimizer="muon", precision="bf16")
    whole, parted = fresh(decoder), fresh(decoder)
    Trainer(decoder, whole, data, quick).run(tmp_path / "a", lambda step, values: None)

    def stop(step: int, values: dict[str, float]) -> None:
        if step == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Trainer(decoder, parted, data, quick).run(tmp_path / "b", stop)
    again = fresh(decoder)
    Trainer(decoder, again, data, quick).run(tmp_path / "b", lambda step, values: None)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert not torch.equal(whole.calibration.outer.weight, fresh(decoder).calibration.outer.weight)


def test_a_draft_vocabulary_takes_its_rows_of_the_calibration() -> None:
    head = tiny_flex(tiny_decoder(), layers=2)
    small = as_written(head, (3, 5, 60))
    outer = head.calibration.outer.weight.to(torch.bfloat16)
    assert torch.equal(small.calibration.outer.weight, outer[[3, 5, 60]])
    assert torch.equal(small.mask_embedding, head.mask_embedding.to(torch.bfloat16))
    assert small.config == replace(head.config, draft_vocabulary=(3, 5, 60))


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

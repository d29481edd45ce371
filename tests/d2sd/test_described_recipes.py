"""The recipes of public models by what they say themselves: sizes as published, plans of them alone, small builds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from d2sd.build.plan import make_plan
from d2sd.bundle.load import load_bundle
from d2sd.convert.checkpoint.layout import usual_ids
from d2sd.convert.kinds import DFLASH
from d2sd.convert.kinds.eagle3 import KIND as EAGLE3
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig
from d2sd.modeling.decoder import Decoder
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.modeling.drafters.eagle3 import Eagle3
from d2sd.modeling.drafters.eagle3_config import Eagle3Config
from d2sd.modeling.mixers.configs import DeltaConfig, ShortConvConfig
from d2sd.recipe import load_recipe
from d2sd.shipped import shipped_names
from tests.convert.helpers import write_target_dir
from tests.d2sd.test_recipes import lay_out, run
from tests.tiny import randomise

#: Numbers of the published targets, by their model cards and indexes; of experts, those active for a token too.
PUBLISHED = {
    "gemma-4-31b": (30_697_345_340, "61.39 GB"),
    "gpt-oss-20b": (20_914_757_184, "13.76 GB"),
    "llama-3.1-8b": (8_030_261_248, "16.06 GB"),
    "llama-3.3-70b": (70_553_706_496, "141.11 GB"),
    "qwen3-4b": (4_022_468_096, "8.04 GB"),
    "qwen3-8b": (8_190_735_360, "16.38 GB"),
    "qwen3-8b-dspine": (8_190_735_360, "16.38 GB"),
    "qwen3-14b": (14_768_307_200, "29.54 GB"),
    "qwen3-32b-fp8": (32_762_123_264, "34.33 GB"),
    "qwen3-coder-30b-a3b": (30_532_122_624, "61.06 GB"),
    "qwen3.5-4b": (4_205_751_296, "8.41 GB"),
    "qwen3.5-9b": (8_953_803_264, "17.91 GB"),
    "qwen3.6-27b": (26_895_998_464, "53.79 GB"),
    "qwen3.6-35b-a3b": (34_660_610_688, "69.32 GB"),
    "qwen3.8-27b": (26_895_998_464, "53.79 GB"),
    "lfm2.5-1.2b": (1_170_340_608, "2.34 GB"),
    "lfm2.5-8b-a1b": (8_467_856_832, "16.94 GB"),
}
#: Reported GiB of published drafters; of qwen3.8-27b its 1.92 billion numbers.
DRAFTERS = {
    "gemma-4-31b": 2.86,
    "gpt-oss-20b": 1.46,
    "qwen3-4b": 1.00,
    "qwen3-8b": 1.95,
    "llama-3.1-8b": 1.95,
    "qwen3-coder-30b-a3b": 0.88,
    "qwen3.5-4b": 1.18,
    "qwen3.5-9b": 2.41,
    "qwen3.8-27b": 3.58,
    "lfm2.5-1.2b": 0.55,
    "lfm2.5-8b-a1b": 0.61,
}
#: Bytes of recurrent state of a request: of each gated delta net 128 x 128 numbers of fp32 a value head, and three
#: inputs of its convolution in bf16; of each short convolution alone two inputs.
STATES = {
    "qwen3.5-4b": 24 * (32 * 65_536 + 3 * 2 * 8_192),
    "qwen3.5-9b": 24 * (32 * 65_536 + 3 * 2 * 8_192),
    "qwen3.6-27b": 48 * (48 * 65_536 + 3 * 2 * 10_240),
    "qwen3.6-35b-a3b": 30 * (32 * 65_536 + 3 * 2 * 8_192),
    "qwen3.8-27b": 48 * (48 * 65_536 + 3 * 2 * 10_240),
    "lfm2.5-1.2b": 10 * 2 * 2 * 2_048,
    "lfm2.5-8b-a1b": 18 * 2 * 2 * 2_048,
}
#: Recipes that are built in small, besides those of `STATES`.
IN_SMALL = (
    "gemma-4-31b", "gpt-oss-20b", "llama-3.3-70b", "qwen3-8b-dspine", "qwen3-14b", "qwen3-32b-fp8",
    "qwen3-coder-30b-a3b",
)  # fmt: skip
SMALL = [
    "limits.max_batch=2",
    "limits.max_context=256",
    "sampling.max_new_tokens=8",
    "checks.count=2",
    "tree.row_budget=16",
]


def test_every_recipe_of_a_download_is_here() -> None:
    assert {*PUBLISHED} == {name for name in shipped_names() if not name.startswith("smollm2")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_alone_is_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, told = load_recipe(Path(name)), run("build", name, "--plan")
    assert not [*tmp_path.iterdir()]
    parameters, download = PUBLISHED[name]
    assert f" {parameters:,}" in told
    assert f"about {download} of {recipe.target.repo}" in told
    drafters = recipe.drafters.sources
    for source in (recipe.target, *drafters.values()):
        revision = f" --revision {source.revision}" if source.revision else ""
        assert f"hf download {source.repo}{revision} " in told
        assert f"licence: {source.licence or 'not stated'}" in told
    assert told.count("d2sd convert ") == sum(getattr(source, "converted", False) for source in drafters.values())
    assert re.search(r"H200 141 GB +[\d.]+ GB (left|too much)", told)
    assert [role.key for role in drafters] == ["first"]
    assert (f"slots of {STATES[name]:,} B" in told) if name in STATES else ("slots of" not in told)
    if name in DRAFTERS:
        numbers = int(re.findall(r"drafter_first │ ([\d,]+)", told)[0].replace(",", ""))
        assert round(2 * numbers / 2**30, 2) == DRAFTERS[name]


def small(body: BodyConfig, layers: int) -> BodyConfig:
    """The same kind, in a hidden size of 64."""
    heads = body.num_heads // body.num_kv_heads
    experts = body.experts and replace(body.experts, count=8, chosen=2, intermediate_size=32)
    if experts and experts.shared_size:
        experts = replace(experts, shared_size=32)
    delta = body.recurrent
    if isinstance(delta, DeltaConfig):
        kept = tuple(layer for layer in delta.layers if layer < layers)
        delta = replace(delta, layers=kept, key_heads=2, value_heads=4, key_size=16, value_size=16)
    elif isinstance(delta, ShortConvConfig):
        delta = replace(delta, layers=tuple(layer for layer in delta.layers if layer < layers), channels=64)
    return replace(
        body,
        hidden_size=64,
        intermediate_size=96,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=16,
        windows=body.windows[-layers:],
        causal=body.causal[-layers:],
        experts=experts,
        recurrent=delta,
        rotary_dim=body.rotary_dim and 4,
        global_heads=body.global_heads and (1, 32),
    )


def write_small(name: str, checkpoints: Path) -> None:
    """Random weights of the geometry that the recipe describes, shrunken."""
    recipe = load_recipe(Path(name))
    plan = make_plan(recipe, weights=False)
    assert plan.target is not None
    target = cast("DecoderConfig", plan.target.config)
    target = replace(target, body=small(target.body, 8), vocab_size=320)
    model = Decoder(target)
    randomise(model, seed=0, residual_gain=2.0)
    write_target_dir(checkpoints / Path(recipe.target.path or "").name, model)
    for role, part in plan.drafters.items():
        folder, taps = checkpoints / Path(recipe.drafters.sources[role].path or "").name, tuple(usual_ids(5, 8))
        folder.mkdir()
        if isinstance(part.config, Eagle3Config):
            layer, ids = small(part.config.layer, 1), tuple(range(3, 300))
            head = Eagle3(Eagle3Config(layer, 320, part.config.block_size, taps[:3], ids))
            randomise(head, seed=1, residual_gain=1.0)
            EAGLE3.write(folder, head.config, head.state_dict())
            continue
        config = cast("DrafterConfig", part.config)
        config = replace(
            config,
            body=small(config.body, 2),
            vocab_size=320,
            mask_token_id=310,
            num_target_layers=8,
            target_layer_ids=taps,
        )
        drafter = Drafter(config)
        randomise(drafter, seed=1, residual_gain=1.0)
        DFLASH.write(folder, config, drafter.state_dict())


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_SMALL, *STATES])
def test_it_builds_on_random_weights_and_is_lossless(name: str, tmp_path: Path) -> None:
    write_small(name, lay_out(tmp_path) / "checkpoints")
    undescribed = ["target.geometry=null", "target.dequantize=false", "drafters.first.geometry=null", "checks.tokens=8"]
    sets = [word for override in (*SMALL, *undescribed, "precision=fp32") for word in ("--set", override)]
    out = tmp_path / "bundle"
    run("build", tmp_path / "recipes" / f"{name}.yaml", "--out", out, *sets)
    bundle = load_bundle(out)
    greedy = bundle.manifest.checks["greedy"]
    assert isinstance(greedy, dict)
    assert greedy.keys() == {"chain", "hybrid"}
    for figures in greedy.values():
        assert isinstance(figures, dict)
        assert figures["equal_to_plain_decoding"] == figures["prompts"] == 2
    assert re.search(r"w\d", run("generate", out, "-p", "w3 w5 w7"))

"""Arithmetic of step costs: bytes and products of a known geometry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from d2sd.bench.roofline import EFFICIENCY, LAYER_SECONDS, PEAKS, Roofline, step_costs
from d2sd.build.plan import GPUS, Part, Plan
from d2sd.errors import D2SDError
from d2sd.modeling.config import BodyConfig, DecoderConfig, DrafterConfig, ExpertsConfig, RopeConfig
from d2sd.policies import DrafterRole
from d2sd.recipe import Recipe
from d2sd.runtime.speculation.policy import make_policy
from d2sd.runtime.step_times import StepTimes

RECIPE = Recipe.model_validate(
    {
        "d2sd": 1,
        "name": "qwen3-8b",
        "target": {"path": "t"},
        "precision": "bf16",
        "drafters": {"first": {"path": "f"}, "second": {"path": "s"}},
        "tree": {"block_size": 16, "branches": 4, "row_budget": 64},
        "limits": {"max_batch": 16, "max_context": 8192, "prefill_chunk": 512},
    }
)


def body(layers: int) -> BodyConfig:
    return BodyConfig(4096, 12288, layers, 32, 8, 128, 1e-6, RopeConfig(1e6), 40960, True, False, False)


def drafter(role: DrafterRole) -> Part:
    config = DrafterConfig(body(5), 151_936, 16, 151_669, (1, 9, 17, 25, 33), 36, "first")
    return Part(role.folder, "", config, 1_048_626_432, 2 * 1_048_626_432, 20_480, True, role)


TARGET = Part(
    "target", "", DecoderConfig("qwen3", body(36), 151_936, False), 8_190_735_360, 2 * 8_190_735_360, 147_456, True
)
PLAN = Plan(RECIPE, None, TARGET, {role: drafter(role) for role in (DrafterRole.FIRST, DrafterRole.SECOND)})
ROOFLINE = Roofline(PLAN, "H100", 1.0)
HEAD = 151_936 * 4096
OFF = make_policy("off", block_size=16, branches=4, row_budget=64)
TREE = make_policy("d2sd", block_size=16, branches=4, row_budget=64)


def test_every_gpu_of_the_plan_has_peaks() -> None:
    assert PEAKS.keys() == GPUS.keys()


def test_plain_decoding_reads_the_weights_and_the_context_once() -> None:
    read = 2 * (8_190_735_360 - HEAD)  # the embedding is looked up
    assert read / 1e9 == pytest.approx(15.14, abs=0.01)
    layers = 36 * LAYER_SECONDS
    assert ROOFLINE.decode_seconds(OFF, 1, 0) == pytest.approx(read / 3.35e12 + layers)
    assert ROOFLINE.decode_seconds(OFF, 8, 1000) == pytest.approx((read + 8000 * 147_456) / 3.35e12 + layers)
    assert Roofline(PLAN, "H100", 0.5).decode_seconds(OFF, 1, 0) == pytest.approx(2 * read / 3.35e12 + layers)


def test_a_tree_adds_two_drafters_that_read_the_head_again() -> None:
    read = 2 * (8_190_735_360 - HEAD) + 2 * 2 * (1_048_626_432 + HEAD)
    assert ROOFLINE.decode_seconds(TREE, 1, 0) == pytest.approx(read / 3.35e12 + 46 * LAYER_SECONDS)


def test_many_rows_are_bound_by_products() -> None:
    weights = 8_190_735_360 - 2 * HEAD
    attention = 4 * 512 * 1000 * 32 * 128 * 36
    found = ROOFLINE.prefill_seconds(512, 1000)
    assert found == pytest.approx((2 * 512 * weights + attention) / 989e12 + 36 * LAYER_SECONDS)


def test_experts_that_no_row_chose_are_not_read() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts a row; two rows choose 8 + 8 · 120 / 128 on average."""
    moe = replace(body(48), hidden_size=2048, experts=ExpertsConfig(128, 8, 768, normalized=True))
    config, head = DecoderConfig("qwen3_moe", moe, 151_936, False), 151_936 * 2048
    each, total = 48 * 3 * 2048 * 768, 30_532_122_624
    others = total - 128 * each - 2 * head
    roofline = Roofline(replace(PLAN, target=Part("target", "", config, total, 2 * total, 0, True)), "H100", 1.0)
    layers = 48 * LAYER_SECONDS
    for batch, read in ((1, 8), (2, 15.5), (4096, 128)):
        seconds = 2 * (others + head + read * each) / 3.35e12
        products = 2 * batch * (others + 8 * each + head) / 989e12
        assert roofline.decode_seconds(OFF, batch, 0) == pytest.approx(max(seconds, products) + layers, rel=1e-6)


def test_fp8_layers_read_half_and_compute_twice_as_fast() -> None:
    layers = 8_190_735_360 - 2 * HEAD
    narrow = replace(PLAN, target=replace(TARGET, weight_bytes=layers + 4 * HEAD))
    roofline = Roofline(narrow, "H100", 1.0)
    assert roofline.decode_seconds(OFF, 1, 0) == pytest.approx((layers + 2 * HEAD) / 3.35e12 + 36 * LAYER_SECONDS)
    assert roofline.prefill_seconds(512, 0) == pytest.approx(2 * 512 * layers / 1979e12 + 36 * LAYER_SECONDS)


def test_auto_chooses_by_batch_and_serves_plain_decoding_where_nothing_pays() -> None:
    costs = step_costs(ROOFLINE, "auto", 16, 1000, tau=4.0)
    assert costs[1].policy == costs[4].policy == "hybrid+lookup of 64 rows and 4 branches"
    assert costs[4].tokens == 4.0
    largest = make_policy("hybrid", block_size=16, branches=4, row_budget=64)
    assert costs[4].seconds == ROOFLINE.decode_seconds(largest, 4, 1000)
    hardly = step_costs(ROOFLINE, "auto", 16, 1000, tau=1.05)
    assert {one.policy for one in hardly.values()} == {"off"}
    assert {one.tokens for one in hardly.values()} == {1.0}


def test_unknown_tokens_a_step_are_asked_for() -> None:
    with pytest.raises(D2SDError, match=r"(?s)tokens a step are unknown.*--tau"):
        step_costs(ROOFLINE, "auto", 16, 1000)
    with pytest.raises(D2SDError, match=r"(?s)out of range.*1 \.\. 16"):
        step_costs(ROOFLINE, "auto", 16, 1000, tau=17)


def test_layers_with_windows_read_no_more_than_those() -> None:
    """Half of the target's layers see 512 tokens, the row itself among them."""
    config = DecoderConfig("qwen3", replace(body(36), windows=(512, None) * 18), 151_936, False)
    windowed = Roofline(replace(PLAN, target=replace(TARGET, config=config)), "H100", 1.0)
    for context in (100, 511, 512, 8000):
        for batch in (1, 8):
            saved = batch * 18 * 4096 * max(0, context - 511) / 3.35e12
            whole = ROOFLINE.decode_seconds(OFF, batch, context)
            assert windowed.decode_seconds(OFF, batch, context) == pytest.approx(whole - saved)


def test_without_an_efficiency_a_share_of_the_peaks_is_assumed() -> None:
    assumed = Roofline(PLAN, "H100")
    for found, at_peak, layers in (
        (assumed.decode_seconds(OFF, 8, 1000), ROOFLINE.decode_seconds(OFF, 8, 1000), 36),
        (assumed.decode_seconds(TREE, 1, 1000), ROOFLINE.decode_seconds(TREE, 1, 1000), 46),
        (assumed.prefill_seconds(512, 1000), ROOFLINE.prefill_seconds(512, 1000), 36),
    ):
        small = layers * LAYER_SECONDS
        assert found == pytest.approx((at_peak - small) / EFFICIENCY + small)


def test_shares_of_the_users_gpu_replace_the_assumed_one() -> None:
    """Those of FP8 layers are apart from those of the head, which is in 16 bits; attention keeps the assumed share."""
    read, context = 2 * (8_190_735_360 - HEAD), 8000 * 147_456 / 3.35e12
    timed = Roofline(PLAN, "H100", measured={("16-bit weights", 8): 0.5})
    expected = read / 3.35e12 / 0.5 + context / EFFICIENCY + 36 * LAYER_SECONDS
    assert timed.decode_seconds(OFF, 8, 1000) == pytest.approx(expected)
    assert timed.decode_seconds(OFF, 5, 0) == pytest.approx(read / 3.35e12 / 0.5 + 36 * LAYER_SECONDS)
    assert timed.decode_seconds(OFF, 1, 0) == Roofline(PLAN, "H100").decode_seconds(OFF, 1, 0)
    layers = 8_190_735_360 - 2 * HEAD
    plan = replace(PLAN, target=replace(TARGET, weight_bytes=layers + 4 * HEAD))
    narrow = Roofline(plan, "H100", measured={("FP8 weights", 1): 0.6, ("16-bit weights", 1): 0.74})
    expected = (layers / 0.6 + 2 * HEAD / 0.74) / 3.35e12 + 36 * LAYER_SECONDS
    assert narrow.decode_seconds(OFF, 1, 0) == pytest.approx(expected)


def test_step_times_of_the_users_gpu_replace_arithmetic() -> None:
    """At the load's context, and only if they have every step that is asked for."""
    tree = make_policy("hybrid", block_size=16, branches=4, row_budget=64, lookup=True)
    seconds = {(policy, size): 0.01 * size for policy in (OFF, tree) for size in (1, 2, 3, 4)} | {(tree, 4): 0.5}
    times = StepTimes(seconds, {(OFF, 1): 1e-6}, {})
    costs = step_costs(ROOFLINE, "auto", 4, 1064, tau=4.0, measured=lambda *_: times)
    assert [cost.policy for cost in costs.values()] == ["hybrid+lookup of 64 rows and 4 branches"] * 3 + ["off"]
    assert [cost.seconds for cost in costs.values()] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert all(cost.measured for cost in costs.values())
    plain = step_costs(ROOFLINE, "off", 4, 1064, measured=lambda *_: times)
    assert plain[1].seconds == pytest.approx(0.01 + 1e-6 * 1000)
    fewer = StepTimes({step: found for step, found in seconds.items() if step != (tree, 4)}, {}, {})
    assert step_costs(ROOFLINE, "auto", 4, 1064, tau=4.0, measured=lambda *_: fewer)[4].policy == "off"
    whole = step_costs(ROOFLINE, "hybrid", 4, 1064, tau=4.0, measured=lambda *_: fewer)
    assert whole == step_costs(ROOFLINE, "hybrid", 4, 1064, tau=4.0)
    assert not whole[1].measured

"""A widened pair commits what the small one commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu.wide import Size, widened
from d2sd.bundle.load import Bundle
from d2sd.modeling.drafters.interface import DraftModel
from d2sd.modeling.fp8 import Fp8Linear, linear_names, round_to_fp8
from d2sd.policies import DrafterRole, PolicyName
from d2sd.runtime.engine import Engine
from d2sd.runtime.model_runner import ModelRunner
from d2sd.runtime.request import Limits, Request
from d2sd.runtime.speculation.policy import make_policy
from tests.tiny import HEADS, runner_of, tiny_decoder, tiny_drafter

BLOCK = 5
SIZE = Size(hidden=112, intermediate=144, heads=12, kv_heads=3, layers=5, drafter_layers=3)


def pair(**changes: Any) -> Bundle:
    target = tiny_decoder("llama")
    first = tiny_drafter(target.config, block_size=BLOCK, layers=2, **changes)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=2, role="variable_prefix", seed=2, **changes)
    drafters: dict[DrafterRole, DraftModel] = {DrafterRole.FIRST: first, DrafterRole.SECOND: second}
    for drafter in (first, second):
        drafter.join(target)
    return Bundle(Path(), cast("Any", None), target, drafters, None, (), None)


def committed(bundle: Bundle, policy: PolicyName) -> list[tuple[list[int], Any]]:
    """Answers and what each step of them committed."""
    runner: ModelRunner = runner_of(bundle.target, *bundle.drafters.values(), block_size=BLOCK)
    policy_of = make_policy(policy, block_size=BLOCK, branches=3, row_budget=14)
    engine = Engine(runner, policy_of, Limits(max_batch=2, max_context=128, page_size=16, prefill_chunk=32))
    draw = torch.Generator().manual_seed(1)
    asked = [Request(tuple(torch.randint(64, (9,), generator=draw).tolist()), 24) for _ in range(4)]
    return [(one.tokens, one.stats.accepted) for one in engine.generate(asked)]


@pytest.mark.parametrize("policy", ["off", "chain", "hybrid"])
@pytest.mark.parametrize("head", [None, "pair"])
def test_a_widened_pair_commits_what_the_small_one_does(policy: PolicyName, head: str | None) -> None:
    small = pair(head=HEADS[head] if head else None)
    large = widened(small, SIZE, "cpu")
    assert large.target.config.body.hidden_size == 112
    assert len(large.target.layers) == 5
    expected = committed(small, policy)
    assert policy == "off" or sum(sum(k * n for k, n in stats.items()) for _, stats in expected) > 0
    assert committed(large, policy) == expected


def test_fp8_layers_keep_their_numbers() -> None:
    small = pair()
    for drafter in small.drafters.values():
        round_to_fp8(drafter, dict.fromkeys(linear_names(drafter), 0.25))
    large = widened(small, SIZE, "cpu")
    first, again = (one.drafters[DrafterRole.FIRST] for one in (small, large))
    own, wide = (cast("Fp8Linear", one.get_submodule("layers.1.self_attn.v_proj")) for one in (first, again))
    assert torch.equal(wide.dequantized()[:16, :32], own.dequantized())
    assert float(wide.input_scale) == 0.25
    assert isinstance(again.get_submodule("layers.2.mlp.up_proj"), Fp8Linear)
    assert committed(large, "hybrid") == committed(small, "hybrid")


def test_every_layer_has_weights_to_read() -> None:
    large = widened(pair(), SIZE, "cpu")
    for model in (large.target, *large.drafters.values()):
        for name in linear_names(model):
            if not name.endswith(("v_proj", "up_proj")):
                weight = cast("torch.Tensor", model.get_submodule(name).weight)
                assert weight.count_nonzero() > 0.3 * weight.numel(), name

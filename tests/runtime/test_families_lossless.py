"""Every family of targets speculates without loss, by every policy: joining, preempted, on prefix hits, sampled or not.

All pages hold NaN wherever no request or cached prefix is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from d2sd.modeling.config import Family
from d2sd.policies import PolicyName
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from tests.choosing import chosen
from tests.runtime.helpers import BLOCK, all_pages, free_pages, make_engine, run_staggered
from tests.runtime.nan_pages import NaNPages
from tests.runtime.oracle import plain_text
from tests.tiny import PAIR_CASES, tiny_decoder, tiny_drafter

#: Without those whose layers are of the model that all other tests run.
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "Qwen3-MoE": ("qwen3_moe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, in PyTorch": ("gpt_oss", {"head_dim": 8}),  # which the compiled kernels do not take
    "Gemma 3": ("gemma3_text", {"tie": False}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", {"tie": False}),
    "Qwen3-Next": ("qwen3_next", {}),
}
KINDS = SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_p=0.9), SamplingParams(1.0, top_k=9)
POLICIES = PAIR_CASES
PREFIX = tuple(random.Random(11).choices(range(64), k=9))  # two pages of 4, and one token


@cache
def models(name: str) -> tuple[Any, ...]:
    family, changes = FAMILIES[name]
    target = tiny_decoder(family, **{"layers": 3, "head_dim": 16} | changes)
    first = tiny_drafter(target.config, block_size=BLOCK, layers=1)
    second = tiny_drafter(target.config, block_size=BLOCK, layers=1, role="variable_prefix", seed=2)
    return target, first, second


@cache
def requests(name: str) -> dict[Request, tuple[int, ...]]:
    """Four with a prefix in common, and a block more of the text than each asks for."""
    dice, made = random.Random(5), {}
    for seed, length in enumerate((0, 3, 4, 9), start=1):
        prompt = PREFIX + tuple(dice.randrange(64) for _ in range(length))
        kind = KINDS[seed % 4]
        request = Request(prompt, dice.randrange(8, 15), SamplingParams(kind.temperature, kind.top_p, kind.top_k, seed))
        text = plain_text(models(name)[0], prompt, request.sampling, request.max_new_tokens + BLOCK)
        made[request] = tuple(text)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(
            name, policy, id=f"{name}-{policy}", marks=[] if name in chosen(policy, FAMILIES, 1) else pytest.mark.slow
        )
        for name in FAMILIES
        for policy in POLICIES
    ],
)
def test_speculation_is_plain_decoding(name: str, policy: PolicyName) -> None:
    asked = requests(name)
    texts: dict[int, Sequence[int]] = {request.seed: request.prompt + text for request, text in asked.items()}
    runner: Any = NaNPages
    engine = make_engine(
        runner(*deepcopy(models(name)), texts),
        policy,
        max_batch=4,
        pages=9 if "Qwen3.5" in name or "Next" in name else 10,
    )
    for gap in (0, 1):  # the second time with prefixes of the first
        sequences = run_staggered(engine, tuple(asked), gap=gap)
        for sequence, (request, text) in zip(sequences, asked.items(), strict=True):
            assert tuple(sequence.answer) == text[: request.max_new_tokens]
    assert free_pages(engine) == all_pages(engine)
    assert engine.stats.slots_used == 0
    assert engine.stats.preemptions > 0
    assert engine.stats.prefix_hit_tokens >= 4 * 8

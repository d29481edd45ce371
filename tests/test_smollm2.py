"""The main job on the real target with the shipped drafters: a subset of what `make verify` runs whole."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from d2sd.build.validate.drafter_config import check_drafter_config
from d2sd.build.validate.near_ties import TIE_TOLERANCE, first_mismatch, top2_margin
from d2sd.bundle.load import Bundle, load_bundle
from d2sd.bundle.requests import chat_request
from d2sd.bundle.serving import make_engine
from d2sd.errors import BuildError
from d2sd.modeling.drafters.dflash import Drafter
from d2sd.policies import DrafterRole
from d2sd.prompts import OWN_PROMPTS, read_prompts
from d2sd.recipe import Policy
from d2sd.runtime.request import Request
from d2sd.runtime.sampling_params import SamplingParams
from d2sd.runtime.stats import mean_tau
from tests.data import DATA

TOKENS = 24
#: Of greedy and of sampled requests: every policy has one of the two, and `hybrid`, which uses all models, both.
GREEDY: tuple[Policy, ...] = ("chain", "d2sd", "ddtree", "hybrid")
SAMPLED: tuple[Policy, ...] = ("lookup", "reanchor", "hybrid", "auto")
#: One of each eval set, as far as `make data` has been given them, or a prompt of our own.
EVAL = DATA / "eval"


pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    """A real model gains from a second thread; the tiny ones of the other tests lose (see conftest)."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bundle(smollm2_bundle: Path) -> Bundle:
    return load_bundle(smollm2_bundle)


def requests(bundle: Bundle, sampling: list[SamplingParams]) -> list[Request]:
    """Prompts of our own only where there are no others: the build of the bundle has decoded those already."""
    files = [EVAL / f"{name}.jsonl" for name in ("gsm8k", "humaneval", "mbpp", "mt_bench")]
    own = read_prompts(OWN_PROMPTS)[1:5]
    prompts = [read_prompts(file)[0][1] if file.is_file() else own[place][1] for place, file in enumerate(files)]
    return [chat_request(bundle, text, params, TOKENS) for text, params in zip(prompts, sampling, strict=False)]


def assert_lossless(bundle: Bundle, asked: list[Request], policy: Policy, plain: list[list[int]]) -> float:
    """In flight, joining one by one, tokens equal plain decoding's; returns tau."""
    # `auto` first times the steps of all policies at each batch size, which takes longer than the test itself
    engine = make_engine(bundle, policy=policy, max_batch=2 if policy == "auto" else 4)
    sequences = []
    for request in asked:
        sequences.append(engine.submit(request))
        engine.step()
    while engine.busy:
        engine.step()
    for request, sequence, expected in zip(asked, sequences, plain, strict=True):
        place = first_mismatch(sequence.answer, expected)
        if place is not None:
            assert top2_margin(bundle.target, [*request.prompt, *expected[:place]], request.sampling) <= TIE_TOLERANCE
    return mean_tau(s.stats for s in sequences)


def test_greedy_is_lossless_and_trees_beat_chains(bundle: Bundle) -> None:
    asked = requests(bundle, [SamplingParams()] * 4)
    engine = make_engine(bundle, policy="off", max_batch=1)
    plain = [engine.generate([request])[0].answer for request in asked]
    tau = {policy: assert_lossless(bundle, asked, policy, plain) for policy in GREEDY}
    assert 1.25 < tau["chain"] < min(tau["d2sd"], tau["ddtree"]), "a drafter read wrongly accepts next to nothing"
    assert max(tau["d2sd"], tau["ddtree"]) < tau["hybrid"]


def test_sampling_is_lossless(bundle: Bundle) -> None:
    params = [SamplingParams(temperature=0.7, top_p=0.95, seed=1), SamplingParams(temperature=1.0, seed=2)]
    asked = requests(bundle, params)
    engine = make_engine(bundle, policy="off", max_batch=1)
    plain = [engine.generate([request])[0].answer for request in asked]
    for policy in SAMPLED:
        assert_lossless(bundle, asked, policy, plain)


def test_a_drafter_read_one_layer_too_high_is_named(bundle: Bundle) -> None:
    asked = requests(bundle, [SamplingParams()] * 4)
    plain = make_engine(bundle, policy="off").generate(asked)
    shifted = copy.copy(bundle.drafters[DrafterRole.FIRST])
    assert isinstance(shifted, Drafter)
    shifted.config = replace(shifted.config, target_layer_ids=tuple(i + 1 for i in shifted.config.target_layer_ids))
    with pytest.raises(BuildError, match=r"acceptance rises from .* layer ids minus one"):
        check_drafter_config(replace(bundle, drafters={DrafterRole.FIRST: shifted}), plain)
